"""A question in, a stream of text out: what HTTP and the command line both call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from app.request import SamplingParams


@dataclass(frozen=True, slots=True)
class Ask:
    """What is wanted, whoever asks. ``sampling.seed`` is the seed of choice 0; choice i uses seed + i.

    ``max_tokens`` None means the rest of the window.
    """

    sampling: SamplingParams = SamplingParams()
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    priority: int = 0
    use_prefix_cache: bool = True
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """``data`` are the token's raw bytes, also where they are only part of a character; ``text`` then has U+FFFD."""

    text: str
    logprob: float
    data: bytes
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of one choice. The last delta of a choice has a ``finish_reason``: "stop" or "length"."""

    index: int
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None


@dataclass(slots=True)
class Usage:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(slots=True)
class Timings:
    """Seconds; prompt: admission to first token, predicted: first token to last."""

    queue_s: float = 0.0
    prompt_s: float = 0.0
    predicted_s: float = 0.0


@dataclass(slots=True)
class Completion:
    """A call under way: ``async for delta in completion``, then ``usage`` and ``timings`` are complete."""

    usage: Usage = field(default_factory=Usage)
    timings: Timings = field(default_factory=Timings)

    async def admitted(self, timeout_s: float) -> None:
        """Return when every choice has a slot, or after ``timeout_s``; raise the refusal, if that comes first."""
        raise NotImplementedError

    def __aiter__(self) -> Completion:
        return self

    async def __anext__(self) -> Delta:
        raise NotImplementedError

    def close(self) -> None:
        """Cancel what still runs. May be called at any time, and again."""
        raise NotImplementedError


class Service:
    """``model_ids``: accepted names, the first is shown; "*" among them accepts any."""

    model_ids: tuple[str, ...]

    async def chat(self, messages: Sequence[dict[str, Any]], ask: Ask, template: dict[str, Any]) -> Completion:
        """Raises InvalidRequest (bad messages, template error, prompt too long), Overloaded, Unavailable."""
        raise NotImplementedError

    async def complete(self, prompts: Sequence[str | Sequence[int]], ask: Ask) -> Completion:
        """Choice ``index`` is prompt * n + i, as OpenAI numbers them. Raises as ``chat``."""
        raise NotImplementedError
