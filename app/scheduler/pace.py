"""How long ticks take, measured while they run, and the chunk of prefill that keeps them within a budget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import sub

from app.scheduler import policy

# What is left of older measurements with each new one.
KEPT = 0.75


class Pace:
    """Fading means of what a tick costs without prefill and of what a prefill token adds to it, in seconds; and what
    one costs in ticks of prefill alone.

    Those are few, and whatever a machine does besides makes them slower, never quicker: the first one after the start
    may take four times as long. So the quickest of the last few counts, and no mean.

    A chunk's own overhead is counted in its tokens: the chunk that is chosen settles where it meets the budget.
    """

    def __init__(self, budget_s: float | None, grant_interval: int) -> None:
        self._budget_s = budget_s
        self._grant_interval = grant_interval
        self._decode = _Mean()
        self._token = _Mean()
        self._alone = _Quickest()
        self._num_held_back = 0

    def chunk(self, chunk: int) -> int:
        """How much of a chunk of ``chunk`` tokens is due beside live decode; 0 means that prefill waits for this tick.

        Until both costs are known a chunk is due whole: it is how they become known.
        """
        if self._budget_s is None or not (self._decode.is_known and self._token.is_known):
            return chunk
        if policy.is_granted(self._num_held_back, self._grant_interval):
            return chunk
        return policy.affordable_chunk(chunk, self._budget_s, self._decode.value, self._token.value)

    @property
    def alone_s(self) -> float | None:
        """Seconds a prefill token where nobody decodes; None while nothing is known."""
        return self._alone.value

    def hold_back(self, is_held_back: bool) -> None:
        """Count the ticks in a row in which prefill was wanted and not due."""
        self._num_held_back = self._num_held_back + 1 if is_held_back else 0

    def observe(self, num_decode: int, num_prefill: int, took_s: float) -> None:
        """Learn from a tick of so many decode rows and prefill tokens."""
        if not num_decode and not num_prefill:
            return
        if not num_decode and num_prefill >= policy.LEAST_ALONE:
            self._alone.add(took_s / num_prefill)
        if num_prefill:
            self._token.add(max(took_s - self._decode.value, 0.0) if num_decode else took_s, num_prefill)
        else:
            self._decode.add(took_s, 1)

    def observe_decode(self, moments_s: Sequence[float]) -> None:
        """As ``observe``, for ticks without prefill that followed each other, from one of the moments to the next."""
        self._decode.add_each(map(sub, moments_s[1:], moments_s))


class _Quickest:
    """The least of the last three values. 0: there is none yet."""

    def __init__(self) -> None:
        self._last = self._second = self._third = 0.0

    @property
    def value(self) -> float | None:
        return min(filter(None, (self._last, self._second, self._third)), default=None)

    def add(self, value: float) -> None:
        self._last, self._second, self._third = value, self._last, self._second


class _Mean:
    """Seconds by pieces of work, of which older ones count less and less."""

    def __init__(self) -> None:
        self._total_s = 0.0
        self._num_pieces = 0.0

    @property
    def is_known(self) -> bool:
        return self._num_pieces > 0

    @property
    def value(self) -> float:
        """Seconds a piece; 0 while nothing is known."""
        return self._total_s / self._num_pieces if self._num_pieces else 0.0

    def add(self, took_s: float, num_pieces: int) -> None:
        self._total_s = KEPT * self._total_s + took_s
        self._num_pieces = KEPT * self._num_pieces + num_pieces

    def add_each(self, each_took_s: Iterable[float]) -> None:
        """As ``add`` of one piece, for each of them in turn."""
        total_s, num_pieces = self._total_s, self._num_pieces
        for took_s in each_took_s:
            total_s = KEPT * total_s + took_s
            num_pieces = KEPT * num_pieces + 1
        self._total_s, self._num_pieces = total_s, num_pieces
