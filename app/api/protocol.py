"""Request bodies: bytes in, checked values out. Whatever is wrong is an InvalidRequest that names the field."""

from __future__ import annotations

import dataclasses
import secrets
from functools import cached_property
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from app.api.answer_shape import shape_of
from app.api.fields import INERT, NEUTRAL, Limits, check_messages, check_prompts
from app.errors import InvalidRequest
from app.request import SamplingParams
from app.service import Ask, Shape

SEED_MODULUS = 2**63
DEFAULT_TEXT_TOKENS = 16


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


NonEmpty = Annotated[str, Field(min_length=1)]
Bias = Annotated[float, Field(ge=-100, le=100)]


class Body(BaseModel):
    """Strict types: a bool is no int, "5" no number, 1.0 no int, infinity no number; an int is a fine float."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Generation(Body):
    """What chat and text completions have in common."""

    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    n: int = Field(1, ge=1, le=128)
    stop: Annotated[list[NonEmpty], BeforeValidator(_listed), Field(max_length=16)] = []
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    repeat_penalty: float | None = Field(None, ge=0.01, le=100)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[str, Bias], Field(max_length=1024)] = {}
    max_tokens: int | None = Field(None, ge=1)
    ignore_eos: bool = False
    cache_prompt: bool = True
    cache_salt: str = Field("", max_length=256)
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    response_format: dict[str, Any] | None = None
    json_schema: dict[str, Any] | None = None
    grammar: str = ""

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}

    @classmethod
    def known_fields(cls) -> frozenset[str]:
        """Every name that is honoured, refused by value, or documented as without effect."""
        return frozenset(cls.model_fields) | frozenset(cls.neutral) | INERT

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if (
            None not in (self.repetition_penalty, self.repeat_penalty)
            and self.repetition_penalty != self.repeat_penalty
        ):
            raise InvalidRequest("repeat_penalty: differs from repetition_penalty, send one of them", "repeat_penalty")
        if self.ignore_eos and self.shape is not None:
            param = self.shape.param
            raise InvalidRequest(
                f"ignore_eos: not possible with {param}, which says where the answer ends", "ignore_eos"
            )
        return self

    @cached_property
    def shape(self) -> Shape | None:
        """What the answer must look like. Raises InvalidRequest."""
        return shape_of(self.response_format, self.json_schema, self.grammar)

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage is True

    def _ask(self, default: SamplingParams, limits: Limits, num_logprobs: int | None, max_tokens: int | None) -> Ask:
        given = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty or self.repeat_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
        }
        if self.top_k is not None and (self.top_k < 0 or self.top_k >= limits.vocab_size):
            given["top_k"] = 0  # keeping the whole vocabulary is keeping all of it: the stage is off
        sampling = dataclasses.replace(
            default,
            **{name: value for name, value in given.items() if value is not None},  # type: ignore[arg-type]
            seed=secrets.randbelow(SEED_MODULUS) if self.seed is None else self.seed % SEED_MODULUS,
            logit_bias=limits.bias(self.logit_bias),
            num_logprobs=num_logprobs,
        )
        return Ask(
            sampling=sampling,
            max_tokens=max_tokens,
            stop=tuple(self.stop),
            n=self.n,
            priority=self.priority,
            use_prefix_cache=self.cache_prompt,
            cache_salt=self.cache_salt,
            ignore_eos=self.ignore_eos,
            shape=self.shape,
        )


class ChatBody(Generation):
    messages: Annotated[list[dict[str, Any]], BeforeValidator(check_messages)]
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20)
    tools: list[dict[str, Any]] = []
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] = {}

    neutral = NEUTRAL["chat"]

    @model_validator(mode="after")
    def _agree_on_chat(self) -> Self:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequest("max_tokens: differs from max_completion_tokens, send one of them", "max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs: needs logprobs to be true", "top_logprobs")
        if self.shape is not None and self.tools and self.tool_choice != "none":
            param = self.shape.param
            raise InvalidRequest(f"{param}: leaves no way to call tools; send tool_choice none", param)
        return self

    def ask(self, default: SamplingParams, limits: Limits) -> Ask:
        """The request in the service's terms. Fields left out come from ``default``; a seed left out is a random one.

        Raises:
            InvalidRequest: ``logit_bias`` names a token that the vocabulary does not have.
        """
        num_logprobs = (self.top_logprobs or 0) if self.logprobs else None
        return self._ask(default, limits, num_logprobs, self.max_completion_tokens or self.max_tokens)

    @property
    def template(self) -> dict[str, Any]:
        """Variables for the chat template. Tools that must not be called are not shown to the model."""
        tools = {"tools": self.tools} if self.tools and self.tool_choice != "none" else {}
        return {**self.chat_template_kwargs, **tools}


class CompletionBody(Generation):
    prompt: Annotated[list[str | list[int]], BeforeValidator(check_prompts)]
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: int | None = None

    neutral = NEUTRAL["completion"]

    @model_validator(mode="after")
    def _agree_on_text(self) -> Self:
        if self.best_of not in (None, 1, self.n):
            raise InvalidRequest("best_of: choosing among more candidates than n is not supported", "best_of")
        return self

    def ask(self, default: SamplingParams, limits: Limits) -> Ask:
        """As for chat, but with 16 tokens where no number is given.

        Raises:
            InvalidRequest: ``logit_bias`` or ``prompt`` names a token that the vocabulary does not have.
        """
        for prompt in self.prompt:
            if not isinstance(prompt, str):
                limits.check_ids(prompt, "prompt")
        return self._ask(
            default, limits, self.logprobs, DEFAULT_TEXT_TOKENS if self.max_tokens is None else self.max_tokens
        )


class TokenizeBody(Body):
    """``prompt`` is another name for ``content``."""

    content: str | None = None
    prompt: str | None = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False

    @model_validator(mode="after")
    def _has_text(self) -> Self:
        if self.content is None and self.prompt is None:
            raise InvalidRequest("content: is required", "content")
        return self

    @property
    def text(self) -> str:
        return (self.prompt or "") if self.content is None else self.content


class DetokenizeBody(Body):
    tokens: list[int]


class TemplateBody(Body):
    messages: Annotated[list[dict[str, Any]], BeforeValidator(check_messages)]
    tools: list[dict[str, Any]] = []
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def template(self) -> dict[str, Any]:
        return {**self.chat_template_kwargs, **({"tools": self.tools} if self.tools else {})}
