"""The bodies of llama-server's own routes that generate text: /completion and /infill."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from app.api import llama_fields
from app.api.fields import Limits
from app.api.protocol import Body, Choices, StreamOptions
from app.errors import InvalidRequest
from app.request import SamplingParams
from app.service import Ask

Encode = Callable[[str], Sequence[int]]


def _is_text(value: Any) -> Any:
    if not isinstance(value, str):
        raise InvalidRequest("prompt: must be a string", "prompt")
    return value


def _random_if_minus_one(value: Any) -> Any:
    return None if value == -1 and type(value) is int else value


# Any, since these fields have another type than those whose place they take.
Biases = Annotated[
    Any,
    BeforeValidator(llama_fields.check_biases),
    WithJsonSchema({"anyOf": [{"type": "array", "maxItems": llama_fields.MAX_BIASES}, {"type": "object"}]}),
]
Prompts = Annotated[
    list[str | list[int | str]],
    BeforeValidator(llama_fields.check_prompts, json_schema_input_type=str | list[Any] | dict[str, Any]),
]
Text = Annotated[Any, BeforeValidator(_is_text), WithJsonSchema({"type": "string"})]


class LlamaBody(Choices):
    """``max_tokens`` and ``max_completion_tokens`` are other names for ``n_predict``, and ``n`` for ``n_cmpl``."""

    prompt: Prompts = Field(description="a string, token ids with strings among them, or a list of such prompts")
    stream_options: StreamOptions | None = Field(None, description="no effect: the last event has the counts")
    n_predict: int | None = Field(None, ge=-1, description="absent or -1: the rest of the window; 0 is refused")
    max_tokens: int | None = Field(None, ge=-1, description="another name for `n_predict`")
    max_completion_tokens: int | None = Field(None, ge=-1, description="another name for `n_predict`")
    n_cmpl: int | None = Field(None, ge=1, le=128, description="answers to each prompt; each takes a slot")
    n: int = Field(1, ge=1, le=128, description="another name for `n_cmpl`")
    temperature: float | None = Field(None, ge=0, le=100)
    seed: Annotated[int | None, BeforeValidator(_random_if_minus_one)] = Field(
        None, ge=-(2**63), lt=2**64, description="-1: a random one; answer i uses seed + i"
    )
    repeat_last_n: int = Field(
        -1, ge=-1, description="-1: all; 0: no penalties; another number is refused beside a penalty"
    )
    logit_bias: Biases = Field(
        [],
        description="pairs of a token and its bias, or an object; a token is an id or a text, all tokens of which are"
        " meant; a bias is a number from -100 to 100, or `false`: never",
    )
    samplers: Annotated[
        list[str] | None, BeforeValidator(llama_fields.check_samplers, json_schema_input_type=list[str] | str)
    ] = Field(
        None, description="the steps to take; those left out are off, another order is refused where it would matter"
    )
    n_probs: int = Field(0, ge=0, le=20, description="alternatives to report for each token; 0: no log-probabilities")
    return_tokens: bool = Field(False, description="token ids in whole answers; streams always have them")
    timings_per_token: bool = Field(False, description="`timings` in every event of a stream")
    response_fields: list[str] = Field(
        [], max_length=64, description="the fields to answer with; `a/b` is field `b` of `a`"
    )

    neutral = llama_fields.NEUTRAL
    inert = llama_fields.INERT

    @model_validator(mode="after")
    def _agree_on_names(self) -> Self:
        if len({self.n_predict, self.max_tokens, self.max_completion_tokens} - {None}) > 1:
            raise InvalidRequest("n_predict: differs from its other names, send one of them", "n_predict")
        if self.n_cmpl is not None and "n" in self.model_fields_set and self.n != self.n_cmpl:
            raise InvalidRequest("n_cmpl: differs from n, send one of them", "n_cmpl")
        if self.num_predict == 0:
            raise InvalidRequest("n_predict: 0 is not supported: it would read a prompt for nothing", "n_predict")
        return self

    @property
    def num_predict(self) -> int:
        """Most tokens of an answer; -1 is the rest of the window."""
        names = (self.n_predict, self.max_tokens, self.max_completion_tokens)
        return next((number for number in names if number is not None), -1)

    def ask(self, default: SamplingParams, limits: Limits, encode: Encode) -> Ask:
        """The request in the service's terms. ``encode`` gives the tokens of a text in ``logit_bias``.

        Raises:
            InvalidRequest: a token is not in the vocabulary, or the draw is to be made in a way that it is not here.
        """
        for prompt in self.prompt:
            if not isinstance(prompt, str):
                limits.check_ids([part for part in prompt if isinstance(part, int)], "prompt")
        ask = self._ask(
            default,
            limits,
            self.n_probs or None,
            None if self.num_predict == -1 else self.num_predict,
            self._biases(limits, encode),
        )
        if self.shape is not None and any(bias == llama_fields.NEVER for _, bias in ask.sampling.logit_bias):
            raise InvalidRequest(
                f"logit_bias: false is not possible with {self.shape.param}, which may leave no other token",
                "logit_bias",
            )
        sampling = llama_fields.with_memory(ask.sampling, self.repeat_last_n)
        sampling = llama_fields.with_steps(sampling, self.samplers)
        return dataclasses.replace(ask, sampling=sampling, n=self.n_cmpl or self.n)

    def _biases(self, limits: Limits, encode: Encode) -> tuple[tuple[int, float], ...]:
        biases: list[tuple[int, float]] = []
        for token, bias in self.logit_bias:
            ids = [token] if isinstance(token, int) else list(encode(token))
            limits.check_ids(ids, "logit_bias")
            biases += [(one, bias) for one in ids]
            if len(biases) > llama_fields.MAX_BIASES:
                raise InvalidRequest(f"logit_bias: more than {llama_fields.MAX_BIASES} tokens", "logit_bias")
        return tuple(biases)


class Snippet(Body):
    """Another piece of code that the model may look at."""

    text: str = ""
    filename: str = ""


class InfillBody(LlamaBody):
    """What /completion takes, but for the prompt, which is what the answer begins with."""

    prompt: Text = Field("", description="what the answer is to begin with")
    input_prefix: str = Field(description="the code before the place")
    input_suffix: str = Field(description="the code after it")
    input_extra: list[Snippet] = Field([], max_length=1024, description="more code: objects of `text` and `filename`")
