"""The engine for families that keep more than keys and values, or attend past the seam: state in mlx-lm's own caches.

Prompts are read each for itself; all rows that draw share one forward, if the family's caches can be batched. A chat
that goes on begins from a snapshot, and a step is never submitted before the last one was read.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from typing import Literal

import mlx.core as mx
from mlx.utils import tree_flatten

from app.engine.blas import packed
from app.engine.caches import empty_caches
from app.engine.kernels import FEW, on_cpu, quicken
from app.engine.loader import LoadedModel, free_bytes
from app.engine.pages import use_huge_pages
from app.engine.probe import Probe, refused
from app.engine.sampler import draw_rows
from app.engine.snapshots import Snapshots
from app.engine.states import States, arrays
from app.engine.step import InFlight
from app.errors import EngineFault
from app.scheduler.plan import Plan, Result, Row

log = logging.getLogger("mlxcel.engine")

DensePath = Literal["dense native batched", "per-row fallback", "one row at a time"]
# What a probe would have to be longer for than the context at which it begins.
UNBATCHED = {"minimax_m3_vl": "it attends to blocks of keys that are counted from the batch's padding on"}


class DenseEngine:
    """Owns model and states. Use it from the thread that made it, as ``Engine``. Blocks are only counted: the scheduler
    admits and requeues by them, and what they stand for is allocated by the caches as they grow."""

    is_paged = False
    windows: tuple[int | None, ...] = (None,)

    def __init__(
        self,
        loaded: LoadedModel,
        num_blocks: int,
        block_size: int,
        path: DensePath,
        snapshots: Snapshots | None = None,
    ) -> None:
        """Prove the model on this path. Without ``snapshots`` nothing is kept of a request that has ended, nor where a
        request has to be alone: what is not in caches then is in the model itself.

        Raises:
            StartError: rows that are computed together, or in pieces, do not give this family's logits.
        """
        self._batches = path == "dense native batched"
        if self._batches and (why := UNBATCHED.get(loaded.config.get("model_type", ""))):
            raise refused(loaded, why)
        self._model = loaded.model
        self._num_blocks, self._block_size = num_blocks, block_size
        self._block_bytes = loaded.kept.bytes_per_token * block_size
        self._states = States(lambda: empty_caches(self._model))
        self.max_rows = 1 if path == "one row at a time" else None
        self._snapshots = Snapshots.none() if snapshots is None or self.max_rows == 1 else snapshots
        self._epoch = 0
        self._known: dict[int, int] = {}  # how many tokens of a request were there when it began
        self.decode_path = path
        probe = Probe.of_caches(loaded)
        if on_cpu():
            quicken(self._model)
            use_huge_pages(array for _, array in tree_flatten(self._model.parameters()))
        kind = "batched" if self._batches else "chunked"
        probe.check(self.logits, loaded, kind, takes_turns=self.max_rows is None)
        self._states.clear()

    @property
    def _num_tokens(self) -> int:
        return self._num_blocks * self._block_size

    def step(self, plan: Plan) -> Result:
        """As ``Engine.step``."""
        return self.finish_rows(self.submit(plan))

    def submit(self, plan: Plan) -> InFlight:
        """Start a step and return before its draws are known. Raises as ``Engine.step``."""
        drawing, failures = None, dict[int, str]()
        try:
            self._forget(plan)
            drawn = [draw for row in plan.rows for draw in row.each_draw()]
            logits = self.logits(plan.rows)
            if logits is not None:
                mx.async_eval(logits, *self._states.arrays())
                drawing, failures = draw_rows(logits, drawn)
                mx.async_eval(*(drawing.arrays() if drawing else ()))
        except Exception as error:
            raise self._fault(error) from error
        begun = [row.request_id for row in plan.rows if row.start == 0 and row.salt is not None]
        reused = {request_id: self._known.get(request_id, 0) for request_id in begun if self._snapshots.is_on}
        return InFlight(drawing, failures, reused=reused)

    def finish_rows(self, step: InFlight) -> Result:
        """As ``Engine.finish_rows``."""
        try:
            mx.eval(*self._states.arrays(), *step.arrays())
            result = step.read()
            for request_id in result.failures:
                self._snapshots.withdraw(request_id)
            return result
        except Exception as error:
            raise self._fault(error) from error

    def resize(self, num_blocks: int) -> int:
        """As ``Engine.resize``; only counted, since caches grow by themselves."""
        if (num_blocks - self._num_blocks) * self._block_bytes > free_bytes():
            log.warning("the pool stays at %d blocks: no memory for %d", self._num_blocks, num_blocks)
        else:
            self._num_blocks = num_blocks
        return self._num_blocks

    def close(self) -> None:
        """Free weights and states. The engine cannot be used afterwards."""
        held_bytes = mx.get_active_memory()
        self._states.clear()
        del self._model, self._states, self._snapshots
        gc.collect()  # a model's modules and their wrappers refer to one another
        mx.clear_cache()
        left_bytes = mx.get_active_memory()
        log.info("weights freed: %.1f of %.1f MiB", (held_bytes - left_bytes) / 2**20, held_bytes / 2**20)

    def logits(self, rows: Sequence[Row]) -> mx.array | None:
        """Logits ``[R, vocab]`` of the rows that draw, in their order; None where none does.

        A row's last token is computed with those of all others that draw, what comes before it in a forward of its own.
        No output head is computed there: MLX computes what is asked for, and those logits are not.
        """
        for row in rows:
            if row.start == 0:
                self._begin(row)
            begin, end = max(row.start, self._known.get(row.request_id, 0)), row.start + row.num_new - row.draws
            boundary = self._snapshots.boundary(row) if begin < end else 0
            if begin < boundary <= end:
                self._read(row, begin, boundary)
                self._snapshots.keep(row, boundary, self._states.apart(row.request_id))
                begin = boundary
            if begin < end:
                self._read(row, begin, end)
        drawing = [row for row in rows if row.draws]
        return self._draw_from(drawing) if drawing else None

    def _forget(self, plan: Plan) -> None:
        self._states.forget(plan.gone)
        for request_id in plan.gone:
            self._known.pop(request_id, None)
        if plan.epoch != self._epoch:
            self._snapshots.clear()
        self._epoch = plan.epoch

    def _begin(self, row: Row) -> None:
        num_known, caches = self._snapshots.find(row)
        self._states.begin(row.request_id, caches)
        self._known.pop(row.request_id, None)
        if num_known:
            self._known[row.request_id] = num_known

    def _read(self, row: Row, begin: int, end: int) -> None:
        caches = self._states.apart(row.request_id)
        with packed(end - begin > FEW):
            self._model(mx.array([row.tokens[begin:end]]), cache=caches)
            mx.eval(arrays(caches))

    def _draw_from(self, rows: Sequence[Row]) -> mx.array:
        # Caches in which nothing was written yet cannot all be merged with others; nor is there a reason to merge one.
        begun = [row.request_id for row in rows if row.start + row.num_new > 1]
        joinable = self._bounded(rows, self._states.joinable(begun)) if self._batches else set()
        alone = [row for row in rows if row.request_id not in joinable]
        if not alone and len(rows) == 1 and self._states.is_apart(rows[0].request_id):
            alone = list(rows)
        found = {row.request_id: self._last([row], self._states.apart(row.request_id))[0] for row in alone}
        if batch := {row.request_id: row for row in rows if row.request_id not in found}:
            members, caches = self._states.together(list(batch))
            logits = self._last([batch[member] for member in members], caches)
            if list(members) == [row.request_id for row in rows]:
                return logits
            found |= dict(zip(members, logits, strict=True))
        return mx.stack([found[row.request_id] for row in rows])

    def _bounded(self, rows: Sequence[Row], joinable: Sequence[int]) -> set[int]:
        """Those that share caches without taking more, padded to the longest, than the whole pool would: the longest
        stay outside."""
        lengths = sorted((row.start + row.num_new, row.request_id) for row in rows if row.request_id in joinable)
        while len(lengths) > 1 and len(lengths) * lengths[-1][0] > self._num_tokens:
            lengths.pop()
        return {request_id for _, request_id in lengths}

    def _last(self, rows: Sequence[Row], caches: list[object]) -> mx.array:
        """Logits ``[R, vocab]`` after the last token of each row."""
        tokens = mx.array([[row.tokens[row.start + row.num_new - 1]] for row in rows])
        logits: mx.array = self._model(tokens, cache=caches)
        return logits[:, -1]

    def _fault(self, error: Exception) -> EngineFault:
        self._states.clear()
        self._known.clear()
        return EngineFault(f"{type(error).__name__}: {error}")
