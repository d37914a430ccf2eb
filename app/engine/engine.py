"""The engine: one ragged forward for whatever rows a plan holds. It computes and never decides."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from app.engine.attention import Geometry, install_seam, layer_caches
from app.engine.fixed import AnyShape, FixedShapes, Piece, prove
from app.engine.head import HeadRows
from app.engine.kernels import on_cpu, quicken
from app.engine.loader import LoadedModel, free_bytes
from app.engine.sampler import Drawing, draw_rows
from app.engine.storage import PagedStorage
from app.errors import EngineFault, StartError
from app.request import SamplingParams
from app.scheduler.plan import Draw, Plan, Result, Row

log = logging.getLogger("mlxcel.engine")

# Largest allowed difference between ragged and plain logits, as a part of the largest logit.
PROBE_TOLERANCE = {mx.float32: 1e-4, mx.float16: 2e-2, mx.bfloat16: 8e-2}


@dataclass(frozen=True, slots=True)
class InFlight:
    """A submitted step: what it will draw, and the rows that have failed already, as in ``Result``."""

    drawing: Drawing | None
    failures: dict[int, str]


class Engine:
    """Owns model and block pool. Use it from the thread that made it: MLX arrays do not cross threads before they are
    evaluated."""

    def __init__(self, loaded: LoadedModel, num_blocks: int, block_size: int, deterministic: bool = False) -> None:
        """Allocate the pool once and prove the model on it. ``deterministic``: see ``app.engine.fixed``.

        Raises:
            StartError: the ragged step does not give this family's logits, the pool does not fit into memory, or no
                size of a forward is deterministic.
        """
        self._model = loaded.model
        self._shapes = loaded.layer_shapes
        probe = _Probe(self._model, loaded.vocab_size)
        install_seam(self._model)
        self._head = HeadRows(self._model)
        if on_cpu():
            quicken(self._model)
        self._cuts: AnyShape | FixedShapes = AnyShape()
        self._check(probe, loaded)
        if deterministic:
            self._cuts = prove(self._forward, self._use_pool, loaded.vocab_size, block_size)
            log.info("deterministic: forwards of %s tokens, tiles of %d", self._cuts.sizes, self._cuts.width)
            self._check(probe, loaded)
        self._use_pool(num_blocks, block_size)
        _evaluate(self._storage.arrays())

    @property
    def pool_bytes(self) -> int:
        return self._storage.nbytes

    def step(self, plan: Plan) -> Result:
        """Compute one plan to its end: prefill and decode rows of any number, in one forward.

        Raises:
            EngineFault: the evaluation failed; nothing the pool held can be trusted, and it is empty again.
        """
        return self.finish_rows(self.submit(plan))

    prefill = step

    def submit(self, plan: Plan) -> InFlight:
        """Start a step and return before it is done. Raises as ``step``."""
        rows = sorted(plan.rows, key=lambda row: row.num_new > 1)
        try:
            self._storage.copy(plan.copies)
            drawing, failures = draw_rows(self.logits(rows), [row for row in rows if row.draws])
            mx.async_eval(*self._storage.arrays(), *(drawing.arrays() if drawing else ()))
        except Exception as error:
            raise self._fault(error) from error
        return InFlight(drawing, failures)

    def finish_rows(self, step: InFlight) -> Result:
        """Wait for a submitted step and read what it drew. Raises as ``step``."""
        drawing, failures = step.drawing, dict(step.failures)
        draws: dict[int, Draw] = {}
        try:
            _evaluate([*self._storage.arrays(), *(drawing.arrays() if drawing else ())])
            if drawing is not None:
                draws = {row.request_id: draw for row, draw in zip(drawing.rows, drawing.read(), strict=True)}
                for row in drawing.unsound():
                    del draws[row.request_id]
                    failures[row.request_id] = "its logits are not finite numbers"
                    self._storage.clean(row.blocks)
        except Exception as error:
            raise self._fault(error) from error
        return Result(draws, failures)

    def resize(self, num_blocks: int) -> int:
        """Grow the pool to ``num_blocks`` if memory allows; returns its number of blocks then. Raises as ``step``.

        Layer by layer, so that old and new are there at once for one layer only. Nothing may be in flight.
        """
        storage = self._storage
        layer_bytes = storage.nbytes // len(storage.layers)
        added_bytes = storage.nbytes // storage.num_blocks * (num_blocks - storage.num_blocks)
        if added_bytes + layer_bytes > free_bytes():
            log.warning("the pool stays at %d blocks: no memory for %d", storage.num_blocks, num_blocks)
            return storage.num_blocks
        try:
            for layer in storage.layers:
                layer.extend(num_blocks)
                _evaluate([layer.keys, layer.values])
            mx.clear_cache()
        except Exception as error:
            raise self._fault(error) from error
        log.info("the pool has grown from %d to %d blocks", storage.num_blocks, num_blocks)
        storage.num_blocks = num_blocks
        return num_blocks

    def close(self) -> None:
        """Free weights and pool, and say what came of it. The engine cannot be used afterwards."""
        held_bytes, began_s = mx.get_active_memory(), time.monotonic()
        del self._model, self._head, self._storage, self._cuts
        gc.collect()  # a model's modules and their wrappers refer to one another
        mx.clear_cache()
        left_bytes, took_s = mx.get_active_memory(), time.monotonic() - began_s
        log.info(
            "weights and pool freed: %.1f of %.1f MiB in %.2f s",
            (held_bytes - left_bytes) / 2**20,
            held_bytes / 2**20,
            took_s,
        )

    def logits(self, rows: Sequence[Row]) -> mx.array:
        """Logits ``[R, vocab]`` of the rows that draw; K and V of all go to the pool. One-token rows come first."""
        *earlier, last = self._cuts.cut(rows)
        drawn = []
        for piece in earlier:
            logits = self._forward(piece)
            if any(row.draws for row in piece.rows):
                drawn.append(logits)
            # Done before the next one begins: the pool is written in place only while nothing waits to read it.
            _evaluate([*drawn, *self._storage.arrays()])
        logits = self._forward(last)
        if drawn and not any(row.draws for row in last.rows):
            return mx.concatenate(drawn)
        return mx.concatenate([*drawn, logits]) if drawn else logits

    def _forward(self, piece: Piece) -> mx.array:
        """Logits of the rows that draw; if none does, of one that means nothing."""
        geometry = Geometry(piece.rows, self._storage.block_size, piece.num_padded, piece.width)
        ends: list[int] = []
        ids: list[int] = []
        for row in piece.rows:
            ids += row.tokens[row.start : row.start + row.num_new]
            if row.draws:
                ends.append(len(ids) - 1)
        ids += [0] * geometry.num_padding
        self._head.aim(mx.array(ends + [0] * (max(piece.num_draws, 1) - len(ends))))
        out = self._model(mx.array(ids)[:, None], cache=layer_caches(self._storage, geometry))
        if geometry.num_attended != len(self._shapes):
            raise RuntimeError(f"{geometry.num_attended} of {len(self._shapes)} layers attended by block table")
        return self._head.finish(out)[: max(len(ends), 1)]

    def _use_pool(self, num_blocks: int, block_size: int) -> None:
        self._storage = PagedStorage(self._shapes, num_blocks, block_size)

    def _check(self, probe: _Probe, loaded: LoadedModel) -> None:
        """Raises StartError where the step does not give the model's own logits."""
        self._use_pool(_Probe.NUM_BLOCKS, _Probe.BLOCK_SIZE)
        try:
            difference = probe.compare(self.logits)
        except Exception as error:
            raise StartError(f"{_family(loaded)} cannot be served yet: {type(error).__name__}: {error}") from error
        allowed = PROBE_TOLERANCE.get(self._shapes[0].dtype, PROBE_TOLERANCE[mx.bfloat16])
        if not difference <= allowed:
            raise StartError(
                f"{_family(loaded)} cannot be served yet: its ragged logits differ from the plain ones by"
                f" {difference:.1e} of the largest (allowed {allowed:.0e})"
            )

    def _fault(self, error: Exception) -> EngineFault:
        self._use_pool(self._storage.num_blocks, self._storage.block_size)
        return EngineFault(f"{type(error).__name__}: {error}")


class _Probe:
    """Two short prompts that join at different steps, first through the plain forward, then through the ragged one."""

    BLOCK_SIZE = 4
    NUM_BLOCKS = 4
    PROMPTS = (6, 5)  # tokens

    def __init__(self, model: object, vocab_size: int) -> None:
        assert callable(model)
        self._prompts = [[(17 * i + 5 * n + 3) % vocab_size for i in range(n)] for n in self.PROMPTS]
        self._plain = [model(mx.array([prompt]))[0].astype(mx.float32) for prompt in self._prompts]
        _evaluate(self._plain)

    def compare(self, logits: object) -> float:
        """The largest difference of the ragged logits from the plain ones, as a part of the largest plain logit."""
        assert callable(logits)
        worst = 0.0
        for rows in (
            [self._row(0, 0, 3)],
            [self._row(0, 3, 1), self._row(1, 0, 3)],
            [self._row(0, 4, 2), self._row(1, 3, 2)],
        ):
            got = logits(rows).astype(mx.float32)
            want = mx.stack([self._plain[row.request_id][row.start + row.num_new - 1] for row in rows])
            worst = max(worst, (mx.abs(got - want).max() / mx.abs(want).max()).item())
        return worst

    def _row(self, prompt: int, start: int, num_new: int) -> Row:
        tokens = self._prompts[prompt]
        return Row(prompt, tokens, start, num_new, (2 * prompt + 1, 2 * prompt), True, len(tokens), SamplingParams())


def _family(loaded: LoadedModel) -> str:
    return f"model family '{loaded.config.get('model_type', 'unknown')}'"


def _evaluate(arrays: Sequence[mx.array]) -> None:
    """The one place where MLX computes and may fail."""
    mx.eval(*arrays)
