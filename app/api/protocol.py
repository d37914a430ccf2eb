"""Request bodies: bytes in, checked values out. Whatever is wrong is an InvalidRequest that names the field."""

from __future__ import annotations

import dataclasses
import secrets
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from app.api.answer_shape import forced_calls, shape_of
from app.api.fields import INERT, NEUTRAL, Limits, check_messages, check_prompts, check_tools
from app.api.tool_choice import CallRule, read_tool_choice
from app.api.written import WrittenChoice, WrittenMessages, WrittenPrompts, WrittenTools
from app.errors import InvalidRequest
from app.request import SamplingParams
from app.service import Ask, Shape

SEED_MODULUS = 2**63
DEFAULT_TEXT_TOKENS = 16


def _listed(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


NonEmpty = Annotated[str, Field(min_length=1)]
Bias = Annotated[float, Field(ge=-100, le=100)]
StopList = Annotated[list[NonEmpty], Field(max_length=16)]
Stop = Annotated[StopList, BeforeValidator(_listed, json_schema_input_type=StopList | NonEmpty)]
Messages = Annotated[list[dict[str, Any]], BeforeValidator(check_messages, json_schema_input_type=WrittenMessages)]
Tools = Annotated[list[dict[str, Any]], BeforeValidator(check_tools, json_schema_input_type=WrittenTools)]
Prompts = Annotated[list[str | list[int]], BeforeValidator(check_prompts, json_schema_input_type=WrittenPrompts)]
Choice = Annotated[CallRule, BeforeValidator(read_tool_choice, json_schema_input_type=WrittenChoice)]
EFFORT_OPTIONS = ("reasoning_effort", "enable_thinking")
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class Body(BaseModel):
    """Strict types: a bool is no int, "5" no number, 1.0 no int, infinity no number; an int is a fine float."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, frozen=True)


class StreamOptions(Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class ModelBody(Body):
    """What is asked of the model that is served, and the fate of each field that its API knows.

    ``neutral`` are fields that are refused, with the values that ask for nothing; ``inert`` those without effect, and
    why; ``parts`` those that have fields of their own.
    """

    model: str | None = Field(None, description="an accepted name, else 404")

    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}
    inert: ClassVar[dict[str, str]] = {}
    parts: ClassVar[dict[str, type[Body]]] = {}

    @classmethod
    def known_fields(cls) -> frozenset[str]:
        """Every name that is honoured, refused by value, or documented as without effect."""
        return frozenset(cls.model_fields) | frozenset(cls.neutral) | frozenset(cls.inert)

    def unread(self, chat_template: str) -> list[str]:
        """The fields given that the model's chat template has no use for."""
        return []


class Generation(ModelBody):
    """What completions and responses have in common."""

    stream: bool = Field(False, description="the answer as server-sent events")
    stop: Stop = Field(
        [], description="a string or a list; found in what the model writes, calls and reasoning included"
    )
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, description="0 and -1: off")
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64, description="choice i uses seed + i")
    repetition_penalty: float | None = Field(None, ge=0.01, le=100)
    repeat_penalty: float | None = Field(None, ge=0.01, le=100, description="another name for `repetition_penalty`")
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[str, Bias], Field(max_length=1024)] = Field(
        {}, description="token ids as strings, to a number from -100 to 100"
    )
    ignore_eos: bool = Field(False, description="go on to `max_tokens`")
    cache_prompt: bool = Field(True, description="false: neither adopts a prefix nor leaves one")
    cache_salt: str = Field("", max_length=256, description="shares prefixes only with the same one")
    priority: int = Field(0, ge=-(2**31), lt=2**31, description="higher first, see below")

    inert = INERT


class Choices(Generation):
    """What chat and text completions have in common."""

    stream_options: StreamOptions | None = Field(
        None, description="`include_usage`; `include_obfuscation` has no effect"
    )
    n: int = Field(1, ge=1, le=128, description="each takes a slot")
    max_tokens: int | None = Field(
        None, ge=1, description="absent: the rest of the window in chat, 16 in text completions"
    )
    response_format: dict[str, Any] | None = Field(None, description="see Answers in a given shape")
    json_schema: dict[str, Any] | None = Field(None, description="a schema, as llama-server has it")
    grammar: str = Field("", description="GBNF or Lark")

    parts: ClassVar[dict[str, type[Body]]] = {"stream_options": StreamOptions}

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

    def _ask(
        self,
        default: SamplingParams,
        limits: Limits,
        num_logprobs: int | None,
        max_tokens: int | None,
        biases: tuple[tuple[int, float], ...] | None = None,
    ) -> Ask:
        """``biases`` stand for those of ``logit_bias``, where that has another form."""
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
            logit_bias=limits.bias(self.logit_bias) if biases is None else biases,
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


class ChatBody(Choices):
    messages: Messages = Field(description="content is text, a list of text parts, or null beside calls")
    max_completion_tokens: int | None = Field(None, ge=1, description="another name for `max_tokens`")
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=20, description="needs `logprobs`")
    tools: Tools = Field([], description="functions; see Calls. `strict` in one changes nothing")
    tool_choice: Choice = Field(
        CallRule(),
        description="`auto`, `none`, `required`, a function by its name, or `allowed_tools`; see Calls",
        json_schema_extra={"default": "auto"},
    )
    parallel_tool_calls: bool = Field(True, description="false: the first call ends the answer")
    reasoning_effort: Effort | None = Field(
        None, description="an option of the chat template; `none` also sets `enable_thinking` to false"
    )
    chat_template_kwargs: dict[str, Any] = Field({}, description="more options of the chat template")

    neutral = NEUTRAL["chat"]

    @model_validator(mode="after")
    def _agree_on_chat(self) -> Self:
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            raise InvalidRequest("max_tokens: differs from max_completion_tokens, send one of them", "max_tokens")
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs: needs logprobs to be true", "top_logprobs")
        if self.tool_choice.must_call and self.ignore_eos:
            raise InvalidRequest("ignore_eos: not possible where tool_choice forces a call", "ignore_eos")
        if self.permitted and self.shape is not None:
            param = self.shape.param
            raise InvalidRequest(f"{param}: leaves no way to call tools; send tool_choice none", param)
        effort = self.reasoning_effort
        if effort is not None and self.chat_template_kwargs.get("reasoning_effort", effort) != effort:
            raise InvalidRequest(
                "reasoning_effort: differs from chat_template_kwargs.reasoning_effort, send one of them",
                "reasoning_effort",
            )
        return self

    def ask(self, default: SamplingParams, limits: Limits) -> Ask:
        """The request in the service's terms. Fields left out come from ``default``; a seed left out is a random one.

        Raises:
            InvalidRequest: ``logit_bias`` names a token that the vocabulary does not have.
        """
        num_logprobs = (self.top_logprobs or 0) if self.logprobs else None
        ask = self._ask(default, limits, num_logprobs, self.max_completion_tokens or self.max_tokens)
        return dataclasses.replace(
            ask,
            tools=tuple(self.permitted),
            many_calls=self.parallel_tool_calls and not self.tool_choice.only_once,
            forced=self.forced,
        )

    def unread(self, chat_template: str) -> list[str]:
        if not chat_template:
            return []  # it is a program, whose words are not known
        unread = [] if "tools" in chat_template or self.tool_choice.must_call or not self.offered else ["tools"]
        knows_effort = any(name in chat_template for name in self.template if name in EFFORT_OPTIONS)
        return [*unread, *([] if self.reasoning_effort is None or knows_effort else ["reasoning_effort"])]

    @property
    def offered(self) -> list[dict[str, Any]]:
        """The tools that are shown to the model: all of them, unless none may be called."""
        return [] if self.tool_choice.names == frozenset() else self.tools

    @cached_property
    def permitted(self) -> list[dict[str, Any]]:
        """The tools that may be called. Raises InvalidRequest."""
        return self.tool_choice.among(self.tools)

    @cached_property
    def forced(self) -> tuple[tuple[str, str], ...]:
        """The functions of which one has to be called, and the schemas of their arguments. Raises InvalidRequest."""
        names = {tool["function"]["name"] for tool in self.permitted}
        return forced_calls(self.tools, names) if self.tool_choice.must_call else ()

    @property
    def template(self) -> dict[str, Any]:
        """Variables for the chat template. To have no reasoning is to not enable it, where a template asks that."""
        effort: dict[str, Any] = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        if self.reasoning_effort == "none":
            effort["enable_thinking"] = False
        return {**effort, **self.chat_template_kwargs, **({"tools": self.offered} if self.offered else {})}


class CompletionBody(Choices):
    prompt: Prompts = Field(description="a string, token ids, or a list of either")
    logprobs: int | None = Field(None, ge=0, le=20, description="in text completions, as many alternatives")
    echo: bool = Field(False, description="the prompt's text first; refused beside `logprobs`")
    best_of: int | None = Field(None, description="1 or `n`; other values are refused")

    neutral = NEUTRAL["completion"]

    @model_validator(mode="after")
    def _agree_on_text(self) -> Self:
        if self.best_of not in (None, 1, self.n):
            raise InvalidRequest("best_of: choosing among more candidates than n is not supported", "best_of")
        if self.echo and self.logprobs is not None:
            raise InvalidRequest("echo: not supported beside logprobs: a prompt's tokens have none here", "echo")
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
