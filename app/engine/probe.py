"""Whether the ragged step gives a model's own logits: two prompts, tried when it is loaded."""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from app.engine.storage import LayerShape
from app.request import SamplingParams
from app.scheduler.plan import Row

# Largest allowed difference between ragged and plain logits, as a part of the largest logit.
TOLERANCE = {mx.float32: 1e-4, mx.float16: 2e-2, mx.bfloat16: 8e-2}


def difference(got: mx.array, want: mx.array) -> float:
    """The largest difference of any logit, as a part of the largest one wanted; infinite where one is no number.

    A token that a model never draws has minus infinity in both: no difference.
    """
    got, want = got.astype(mx.float32), want.astype(mx.float32)
    apart = mx.where(got == want, 0.0, mx.abs(got - want))
    largest = mx.where(mx.isfinite(want), mx.abs(want), 0.0).max()
    return float((mx.where(mx.isnan(apart), mx.inf, apart).max() / largest).item())


class Probe:
    """Two prompts that join at different steps, first through the plain forward, then through the ragged one.

    The first is longer than the shortest sliding window, unless that is more than ``LONGEST``: the plain forward gives
    logits of every token, a megabyte each with a large vocabulary. Of a longer window the model's word is taken.
    """

    BLOCK_SIZE = 4
    SHORT = 6  # tokens; the other prompt has one less
    LONGEST = 256

    def __init__(self, model: object, vocab_size: int, shapes: Sequence[LayerShape]) -> None:
        assert callable(model)
        windows = [shape.window for shape in shapes if shape.window is not None and shape.window <= self.LONGEST]
        lengths = (self.SHORT + min(windows, default=0), self.SHORT - 1)
        self._prompts = [[(17 * i + 5 * n + 3) % vocab_size for i in range(n)] for n in lengths]
        self._num_blocks = [-(-n // self.BLOCK_SIZE) for n in lengths]
        self._plain = [model(mx.array([prompt]))[0] for prompt in self._prompts]
        mx.eval(self._plain)

    @property
    def num_blocks(self) -> int:
        return sum(self._num_blocks)

    def compare(self, logits: object) -> float:
        """How far the ragged logits are from the plain ones; see ``difference``."""
        assert callable(logits)
        worst = 0.0
        read = len(self._prompts[0]) - 3
        for rows in (
            [self._row(0, 0, read)],
            [self._row(0, read, 1), self._row(1, 0, 3)],
            [self._row(0, read + 1, 2), self._row(1, 3, 2)],
        ):
            want = mx.stack([self._plain[row.request_id][row.start + row.num_new - 1] for row in rows])
            worst = max(worst, difference(logits(rows), want))
        return worst

    def _row(self, prompt: int, start: int, num_new: int) -> Row:
        tokens, before = self._prompts[prompt], sum(self._num_blocks[:prompt])
        blocks = range(before, before + self._num_blocks[prompt])[::-1]
        return Row(prompt, tokens, start, num_new, blocks, True, len(tokens), SamplingParams())
