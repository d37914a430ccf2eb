"""The rows that draw, picked before the output head: no logits are computed that nobody reads."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx
import mlx.nn as nn


class HeadRows:
    """Stands in front of a model's output head, be it an ``lm_head`` or the embedding used backwards (tied weights).

    A family may multiply by its embedding weights itself and pass both by; then ``finish`` picks from all logits.
    """

    def __init__(self, model: nn.Module) -> None:
        self._rows: mx.array | None = None
        self._picked = False
        for part in list(model.modules()):
            if isinstance(head := part.get("lm_head"), nn.Module):
                part.lm_head = _PickingHead(self, head)
            elif hasattr(part, "as_linear"):
                part.as_linear = self._before(part.as_linear)

    def aim(self, rows: mx.array | None) -> None:
        """Pick ``rows [R]`` of the next forward's ``[T, 1, dim]``; None: nothing is picked any more."""
        self._rows = rows
        self._picked = False

    def pick(self, hidden: mx.array) -> mx.array:
        self._picked = True
        return hidden if self._rows is None else hidden[self._rows]

    def finish(self, logits: mx.array) -> mx.array:
        """Logits of the forward to ``[R, vocab]``."""
        return (logits if self._picked else logits[self._rows]).squeeze(1)

    def _before(self, head: Callable[[mx.array], mx.array]) -> Callable[[mx.array], mx.array]:
        return lambda hidden: head(self.pick(hidden))


class _PickingHead(nn.Module):
    def __init__(self, rows: HeadRows, head: nn.Module) -> None:
        super().__init__()
        self._head_rows = rows
        self.head = head

    def __call__(self, hidden: mx.array) -> mx.array:
        return self.head(self._head_rows.pick(hidden))
