"""What passes between the scheduler and the engine in one tick, and what comes out of it: ids and numbers only.

What is made for every row of every tick is a named tuple: a frozen dataclass takes three times as long to make.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from app.request import Constraint, FinishReason, Request, SamplingParams

Kind = Literal["decode", "prefill", "mixed"]


class Row(NamedTuple):
    """One request's share of a tick: compute ``num_new`` tokens from position ``start`` on.

    ``tokens`` and ``blocks`` are the request's own growing lists, lent for the tick and never written by the engine.
    ``blocks[i]`` holds positions ``i * block_size`` up to the next multiple. ``draws`` says that the row reaches
    ``len(tokens)``, so the token after its last one is drawn; the draw stands at position ``start + num_new``.

    A row that decodes may carry a ``draft``: tokens that are guessed to follow, counted in ``num_new`` and computed as
    if they were the request's. It draws after its last own token and after each of the draft. A row with a
    ``constraint`` never does: what may be drawn depends on every token before.

    ``salt`` says with whom it may share what it begins with; None: with nobody. Only an engine that finds out by itself
    what can be shared looks at it.
    """

    request_id: int
    tokens: Sequence[int]
    start: int
    num_new: int
    blocks: Sequence[int]
    draws: bool
    num_prompt: int
    sampling: SamplingParams
    draft: tuple[int, ...] = ()
    constraint: Constraint | None = None
    salt: str | None = None

    @classmethod
    def of(cls, request: Request, num_new: int, blocks: Sequence[int], draft: tuple[int, ...] = ()) -> Row:
        """The next ``num_new`` tokens of a request that holds ``blocks``, and a draft on top if they are its last."""
        tokens, start, num_all = request.tokens, request.num_computed, num_new + len(draft)
        draws, sampling, num_prompt = start + num_new == len(tokens), request.sampling, request.num_prompt
        salt, constraint = request.cache_salt if request.use_prefix_cache else None, request.constraint
        return cls(request.id, tokens, start, num_all, blocks, draws, num_prompt, sampling, draft, constraint, salt)

    @property
    def is_chunk(self) -> bool:
        """Whether it reads a prompt, or again what was lost. A single token of an answer counts as decoded, also where
        it is the last one that is read again."""
        return self.start < self.num_prompt or (self.num_new > 1 and not self.draft)

    def each_draw(self) -> list[Row]:
        """One row for each of its draws: the row that would make this draw alone, had the request said what the draft
        says before it."""
        if not self.draft:
            return [self] if self.draws else []
        tokens, first = [*self.tokens, *self.draft], self.num_new - len(self.draft)
        return [self._replace(tokens=tokens, num_new=n, draft=()) for n in range(first, self.num_new + 1)]


@dataclass(frozen=True, slots=True)
class Plan:
    """One tick. Rows with one token come first, longer ones after them. ``copies`` are (source block, target block):
    all sources are read before any target or row is written.

    A plan with ``num_blocks`` has no rows: it asks for a pool of that size (``Scheduler.resized`` takes the answer).

    ``num_ahead`` above 0 is for a step that is submitted while the one before it is in flight, which draws the tokens
    that its rows compute: they are not in ``Row.tokens`` yet, nor may the block that a row writes be in ``Row.blocks``.
    It counts the steps since the last one that was submitted with nothing in flight.

    ``gone`` are the requests that have left their seats since the plan before, to take one again later or never: what
    an engine holds of them outside their blocks is of no use any more. They come before the rows. ``epoch`` counts how
    often all that was shared had to be forgotten.
    """

    rows: tuple[Row, ...] = ()
    copies: tuple[tuple[int, int], ...] = ()
    num_blocks: int = 0
    num_ahead: int = 0
    gone: tuple[int, ...] = ()
    epoch: int = 0

    @property
    def kind(self) -> Kind:
        """What the tick does."""
        singles = any(not row.is_chunk for row in self.rows)
        chunks = any(row.is_chunk for row in self.rows)
        return "mixed" if singles and chunks else "decode" if singles else "prefill"

    @property
    def num_tokens(self) -> int:
        return sum(row.num_new for row in self.rows)


class Draw(NamedTuple):
    """A drawn token. ``logprob`` and ``top`` ((token, logprob), likeliest first) where asked for; natural log."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """What a tick brought, by request id: the draws of a row in their order, also those behind a draft that turns out
    wrong. A failed request did not get its token; the text says why (for the log). ``reused`` has those for whom the
    engine itself has looked for something to begin from: how many tokens it found, 0 for none."""

    draws: dict[int, tuple[Draw, ...]] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)
    reused: dict[int, int] = field(default_factory=dict)


class Admitted(NamedTuple):
    """The request got a slot; ``num_cached`` of its prompt tokens came from the prefix cache. Sent once."""

    request_id: int
    num_cached: int
    at_s: float


class Token(NamedTuple):
    request_id: int
    draw: Draw
    at_s: float


class Finished(NamedTuple):
    """The last event of a request. ``num_output`` counts drawn tokens, an end token included."""

    request_id: int
    reason: FinishReason
    num_output: int
    at_s: float

    @property
    def is_fault(self) -> bool:
        """Whether it ended for want of a token, through nothing that its client asked for."""
        return self.reason is FinishReason.ERROR


Event = Admitted | Token | Finished
