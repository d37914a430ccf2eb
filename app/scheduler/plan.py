"""What passes between the scheduler and the engine in one tick, and what comes out of it: ids and numbers only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from app.request import FinishReason, Request, SamplingParams


@dataclass(frozen=True, slots=True)
class Row:
    """One request's share of a tick: compute ``num_new`` tokens from position ``start`` on.

    ``tokens`` and ``blocks`` are the request's own growing lists, lent for the tick and never written by the engine.
    ``blocks[i]`` holds positions ``i * block_size`` up to the next multiple. ``draws`` says that the row reaches
    ``len(tokens)``, so the token after its last one is drawn; the draw stands at position ``start + num_new``.
    """

    request_id: int
    tokens: Sequence[int]
    start: int
    num_new: int
    blocks: Sequence[int]
    draws: bool
    num_prompt: int
    sampling: SamplingParams

    @classmethod
    def of(cls, request: Request, num_new: int, blocks: Sequence[int]) -> Row:
        """The next ``num_new`` tokens of a request that holds ``blocks``."""
        start = request.num_computed
        draws = start + num_new == len(request.tokens)
        return cls(request.id, request.tokens, start, num_new, blocks, draws, request.num_prompt, request.sampling)


@dataclass(frozen=True, slots=True)
class Plan:
    """One tick. Rows with one token come first, chunks after them. ``copies`` are (source block, target block): all
    sources are read before any target or row is written."""

    rows: tuple[Row, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(row.num_new for row in self.rows)


@dataclass(frozen=True, slots=True)
class Draw:
    """A drawn token. ``logprob`` and ``top`` ((token, logprob), likeliest first) where asked for; natural log."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """What a tick brought, by request id. A failed request did not get its token; the text says why (for the log)."""

    draws: dict[int, Draw] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Admitted:
    """The request got a slot; ``num_cached`` of its prompt tokens came from the prefix cache. Sent once."""

    request_id: int
    num_cached: int
    at_s: float


@dataclass(frozen=True, slots=True)
class Token:
    request_id: int
    draw: Draw
    at_s: float


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a request. ``num_output`` counts drawn tokens, an end token included."""

    request_id: int
    reason: FinishReason
    num_output: int
    at_s: float


Event = Admitted | Token | Finished
