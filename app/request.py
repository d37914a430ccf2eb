"""A request, from arrival to its finish reason: the one record that scheduler and engine share."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

# Below this temperature a distribution is its likeliest token, and dividing logits by it would leave no numbers.
GREEDY_BELOW = 1e-5


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one token is drawn from one row of logits. Ranges are checked where requests are parsed.

    ``top_k`` 0, ``top_p`` 1, ``min_p`` 0 and penalties at their neutral value switch that stage off. ``num_logprobs``
    is None for no log-probabilities, else how many alternatives to report (0 to 20) beside the drawn token.
    ``banned`` are tokens that can never be drawn (the end tokens under ``ignore_eos``).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    banned: tuple[int, ...] = ()
    num_logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def has_penalty(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class Constraint(Protocol):
    """Which tokens a request may draw. It follows the request's tokens by itself, and goes where the request goes."""

    is_at_limit: bool
    """Whether ``mask`` has raised because what it would have to work out is too much. It will not get further."""

    def mask(self, tokens: Sequence[int]) -> bytes:
        """Which token may follow ``tokens``, one bit each, the lowest of a byte first. Raises ValueError where none
        can be told."""
        ...


class State(enum.Enum):
    QUEUED = "queued"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"


class FinishReason(enum.Enum):
    STOP = "stop"
    LENGTH = "length"
    GRAMMAR_LIMIT = "grammar_limit"
    CANCELLED = "cancelled"
    ERROR = "error"
    NO_MEMORY = "no_memory"
    REFUSED = "refused"

    @property
    def is_answer(self) -> bool:
        """Whether what has come until then is to be delivered."""
        return self in (FinishReason.STOP, FinishReason.LENGTH, FinishReason.GRAMMAR_LIMIT)


LEGAL_MOVES: dict[State, frozenset[State]] = {
    State.QUEUED: frozenset({State.PREFILLING, State.FINISHED}),
    State.PREFILLING: frozenset({State.DECODING, State.QUEUED, State.FINISHED}),
    State.DECODING: frozenset({State.QUEUED, State.FINISHED}),
    State.FINISHED: frozenset(),
}


@dataclass(slots=True, eq=False)
class Request:
    """``tokens`` is the prompt followed by the output and only ever grows; ``num_computed`` (tokens whose K and V are
    in the pool) chases its length. A fresh prompt, a prefix hit and a resumed request differ in nothing else.
    """

    id: int
    tokens: list[int]
    num_prompt: int
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    end_tokens: frozenset[int] = frozenset()
    priority: int = 0
    arrival_s: float = 0.0
    use_prefix_cache: bool = True
    cache_salt: str = ""
    constraint: Constraint | None = None

    state: State = State.QUEUED
    finish_reason: FinishReason | None = None
    num_computed: int = 0
    num_cached: int = 0
    num_known: int = 0  # how many the engine has by itself, though they are planned as if they were computed
    slot: int | None = None
    num_faults: int = 0  # steps that failed as a whole while this request had a row in them
    arrival: int = 0  # place in the order of arrival, given by the scheduler

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    def num_passed_over(self, start: int, num_new: int) -> int:
        """How many of ``num_new`` tokens from ``start`` on the engine need not compute."""
        return min(max(self.num_known - start, 0), num_new)

    def move(self, to: State, reason: FinishReason | None = None) -> None:
        """Change state. A finish carries its reason, and nothing else does.

        Raises:
            ValueError: the move is not in ``LEGAL_MOVES``, or reason and state do not go together.
        """
        if to not in LEGAL_MOVES[self.state]:
            raise ValueError(f"request {self.id} cannot go from {self.state.value} to {to.value}")
        if (to is State.FINISHED) != (reason is not None):
            raise ValueError("a finish needs a reason, and only a finish has one")
        self.state = to
        self.finish_reason = reason
