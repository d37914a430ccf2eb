"""What a simulation adds up as it goes, in bounded memory: gaps between tokens, and occupancy over time."""

from __future__ import annotations

import math
from collections import Counter
from typing import NamedTuple

GAP_STEP = math.log(1.01)
MAX_BINS = 512
LIVE_BLOCKS, RUNNING, WAITING = range(3)


class Occupancy(NamedTuple):
    """Means over a span of time that begins at ``at_s``: blocks held, requests running and requests waiting, all hosts
    together."""

    at_s: float
    live_blocks: float
    running: float
    waiting: float


class Tally:
    """Gaps go into buckets one per cent wide. Time goes into at most 512 spans, which double in width as need be; a
    host counts with the values it last told."""

    def __init__(self, num_hosts: int, span_s: float = 0.25) -> None:
        self.span_s = span_s
        self._gaps: Counter[int] = Counter()
        self._sums: list[list[float]] = []
        self._told = [[(0.0, 0)] * 3 for _ in range(num_hosts)]

    def gap(self, seconds: float, count: int) -> None:
        """``count`` tokens came ``seconds`` after the one before."""
        self._gaps[round(math.log(seconds) / GAP_STEP)] += count

    @property
    def num_gaps(self) -> int:
        return sum(self._gaps.values())

    @property
    def mean_gap_s(self) -> float:
        total = sum(math.exp(bucket * GAP_STEP) * count for bucket, count in self._gaps.items())
        return total / self.num_gaps if self._gaps else 0.0

    def gap_s(self, share: float) -> float:
        """The gap that ``share`` of all gaps did not exceed; 0 where there was none."""
        left = share * self.num_gaps
        for bucket in sorted(self._gaps):
            left -= self._gaps[bucket]
            if left <= 0:
                return math.exp(bucket * GAP_STEP)
        return 0.0

    def tell(self, host: int, kind: int, now: float, value: int) -> None:
        """From now on there are ``value`` of a kind (``LIVE_BLOCKS``, ``RUNNING``, ``WAITING``) on a host."""
        since_s, was = self._told[host][kind]
        if value == was:
            return
        self._told[host][kind] = now, value
        while now >= MAX_BINS * self.span_s:
            self._widen()
        while since_s < now:
            index = int(since_s / self.span_s)
            until_s = min(now, (index + 1) * self.span_s)
            if until_s <= since_s:  # the quotient was rounded down onto the end of the span before
                index, until_s = index + 1, min(now, (index + 2) * self.span_s)
            while len(self._sums) <= index:
                self._sums.append([0.0, 0.0, 0.0])
            self._sums[index][kind] += was * (until_s - since_s)
            since_s = until_s

    def occupancy(self) -> list[Occupancy]:
        """From the start to the last moment that anybody told."""
        end_s = max(since_s for told in self._told for since_s, _ in told)
        spans = []
        for index, sums in enumerate(self._sums):
            at_s = index * self.span_s
            seconds = min(self.span_s, end_s - at_s)
            if seconds > 0:
                spans.append(Occupancy(at_s, sums[0] / seconds, sums[1] / seconds, sums[2] / seconds))
        return spans

    def _widen(self) -> None:
        if len(self._sums) % 2:
            self._sums.append([0.0, 0.0, 0.0])
        pairs = zip(self._sums[::2], self._sums[1::2], strict=True)
        self._sums = [[a + b for a, b in zip(early, late, strict=True)] for early, late in pairs]
        self.span_s *= 2
