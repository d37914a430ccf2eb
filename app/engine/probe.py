"""Whether a way of computing gives a model's own logits: two prompts, tried when it is loaded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx

from app.engine.caches import empty_caches
from app.engine.loader import LoadedModel, one_line
from app.engine.states import arrays
from app.errors import StartError
from app.request import SamplingParams
from app.scheduler.plan import Row

# Largest allowed difference between ragged and plain logits, as a part of the largest logit.
TOLERANCE = {mx.float32: 1e-4, mx.float16: 2e-2, mx.bfloat16: 8e-2}


def refused(loaded: LoadedModel, why: str) -> StartError:
    """The error for a model that cannot be served."""
    return StartError(f"model family '{loaded.config.get('model_type', 'unknown')}' cannot be served yet: {why}")


def difference(got: mx.array, want: mx.array) -> float:
    """The largest difference of any logit, as a part of the largest one wanted; infinite where one is no number.

    A token that a model never draws has minus infinity in both: no difference.
    """
    got, want = got.astype(mx.float32), want.astype(mx.float32)
    apart = mx.where(got == want, 0.0, mx.abs(got - want))
    largest = mx.where(mx.isfinite(want), mx.abs(want), 0.0).max()
    return float((mx.where(mx.isnan(apart), mx.inf, apart).max() / largest).item())


class Probe:
    """Two prompts that join at different steps, first through the plain forward, then through the one to be proved.

    The first is longer than the shortest sliding window, unless that is more than ``LONGEST``: the plain forward gives
    logits of every token, a megabyte each with a large vocabulary. Of a longer window the model's word is taken.
    """

    BLOCK_SIZE = 4
    SHORT = 6  # tokens; the other prompt has one less
    LONGEST = 256

    def __init__(self, loaded: LoadedModel, windows: Sequence[int], caches: Sequence[Any]) -> None:
        """``caches`` are what the model's own forward of each prompt is given. Raises StartError where it fails."""
        window = min((window for window in windows if window <= self.LONGEST), default=0)
        lengths = (self.SHORT + window, self.SHORT - 1)
        self._prompts = [[(17 * i + 5 * n + 3) % loaded.vocab_size for i in range(n)] for n in lengths]
        self._num_blocks = [-(-n // self.BLOCK_SIZE) for n in lengths]
        try:
            pairs = zip(self._prompts, caches, strict=True)
            self._plain = [loaded.model(mx.array([prompt]), cache=cache)[0] for prompt, cache in pairs]
            mx.eval(self._plain)
        except Exception as error:
            raise refused(loaded, one_line(error)) from error
        kept = [loaded.kept.shapes[0]] if caches[0] is None else arrays(caches[0])
        types = [each.dtype for each in kept if each.dtype in TOLERANCE] or [mx.bfloat16]
        self._allowed = max(TOLERANCE[dtype] for dtype in types)

    @classmethod
    def of_blocks(cls, loaded: LoadedModel) -> Probe:
        """Against the forward of a model that is given no cache."""
        windows = [shape.window for shape in loaded.kept.shapes if shape.window is not None]
        return cls(loaded, windows, (None, None))

    @classmethod
    def of_caches(cls, loaded: LoadedModel) -> Probe:
        """Against the forward of a whole prompt into mlx-lm's own caches."""
        caches = [empty_caches(loaded.model) for _ in range(2)]
        windows = [cache.max_size for cache in caches[0] if isinstance(getattr(cache, "max_size", None), int)]
        return cls(loaded, windows, caches)

    @property
    def num_blocks(self) -> int:
        return sum(self._num_blocks)

    def check(
        self,
        logits: Callable[[Sequence[Row]], mx.array | None],
        loaded: LoadedModel,
        kind: str,
        takes_turns: bool = True,
    ) -> None:
        """Raises StartError where ``logits`` of rows, named by their ``kind``, are not the model's own."""
        try:
            apart = self.compare(logits, takes_turns)
        except Exception as error:
            raise refused(loaded, str(error) if isinstance(error, NotImplementedError) else one_line(error)) from error
        if apart > self._allowed:
            allowed = f"allowed {self._allowed:.0e}"
            raise refused(
                loaded, f"its {kind} logits differ from the plain ones by {apart:.1e} of the largest ({allowed})"
            )

    def compare(self, logits: Callable[[Sequence[Row]], mx.array | None], takes_turns: bool = True) -> float:
        """How far logits of rows are from the plain ones; see ``difference``. Without ``takes_turns`` the second prompt
        begins when the first one is done."""
        worst = 0.0
        read = len(self._prompts[0]) - 3
        steps = [
            [self._row(0, 0, read)],
            [self._row(0, read, 1), self._row(1, 0, 3)],
            [self._row(0, read + 1, 2), self._row(1, 3, 2)],
        ]
        if not takes_turns:
            steps = [[row] for row in sorted((row for rows in steps for row in rows), key=lambda row: row.request_id)]
        for rows in steps:
            want = mx.stack([self._plain[row.request_id][row.start + row.num_new - 1] for row in rows])
            got = logits(rows)
            assert got is not None
            worst = max(worst, difference(got, want))
        return worst

    def _row(self, prompt: int, start: int, num_new: int) -> Row:
        tokens, before = self._prompts[prompt], sum(self._num_blocks[:prompt])
        blocks = range(before, before + self._num_blocks[prompt])[::-1]
        return Row(prompt, tokens, start, num_new, blocks, True, len(tokens), SamplingParams())
