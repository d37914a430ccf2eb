"""A step that was submitted, and what comes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import mlx.core as mx

from app.engine.sampler import Drawing
from app.scheduler.plan import Draw, Result, Row

UNSOUND = "its logits are not finite numbers"


@dataclass(frozen=True, slots=True)
class InFlight:
    """A submitted step: what it will draw, and the rows that have failed already, as in ``Result``. ``astray`` are the
    requests whose row has started from another token than was drawn in the step before. ``reused`` as in ``Result``."""

    drawing: Drawing | None
    failures: dict[int, str]
    astray: set[int] = field(default_factory=set)
    reused: dict[int, int] = field(default_factory=dict)

    def following(self, rows: Sequence[Row]) -> mx.array:
        """As ``Drawing.following``."""
        return mx.zeros(len(rows), mx.uint32) if self.drawing is None else self.drawing.following(rows)

    def arrays(self) -> list[mx.array]:
        """What has to be computed before it can be read."""
        return [] if self.drawing is None else self.drawing.arrays()

    def unsound(self) -> list[Row]:
        """As ``Drawing.unsound``."""
        return [] if self.drawing is None else self.drawing.unsound()

    def read(self) -> Result:
        """What was drawn. A row whose logits were no numbers has failed."""
        draws: dict[int, tuple[Draw, ...]] = {}
        failures = dict(self.failures)
        if self.drawing is not None:
            for row, draw in zip(self.drawing.rows, self.drawing.read(), strict=True):
                draws[row.request_id] = (*draws.get(row.request_id, ()), draw)
        for row in self.unsound():
            draws.pop(row.request_id, None)
            failures[row.request_id] = UNSOUND
        return Result(draws, failures, self.reused)
