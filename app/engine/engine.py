"""The engine: one ragged forward for whatever rows a plan holds. It computes and never decides."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Sequence
from dataclasses import replace

import mlx.core as mx
from mlx.utils import tree_flatten

from app.engine.attention import Geometry, install_seam, layer_caches
from app.engine.blas import packed
from app.engine.fixed import AnyShape, FixedShapes, Piece, prove
from app.engine.groups import Groups, one_group
from app.engine.head import HeadRows
from app.engine.kernels import FEW, LEAST_TOKENS, on_cpu, quicken
from app.engine.loader import LoadedModel, free_bytes
from app.engine.pages import use_huge_pages
from app.engine.probe import Probe, refused
from app.engine.sampler import draw_rows
from app.engine.step import InFlight
from app.engine.storage import PagedStorage
from app.engine.tails import Tails
from app.errors import EngineFault, StartError
from app.scheduler.plan import Plan, Result, Row

log = logging.getLogger("mlxcel.engine")


class Engine:
    """Owns model and block pool. Use it from the thread that made it: MLX arrays do not cross threads before they are
    evaluated."""

    is_paged = True
    max_rows: int | None = None

    def __init__(
        self,
        loaded: LoadedModel,
        num_blocks: int,
        block_size: int,
        deterministic: bool = False,
        groups: Groups | None = None,
    ) -> None:
        """Allocate the pool once and prove the model on it. ``deterministic``: see ``app.engine.fixed``. ``groups``:
        which layers share blocks; None: all of them.

        Raises:
            StartError: the ragged step does not give this family's logits, the pool does not fit into memory, or no
                size of a forward is deterministic.
        """
        if not loaded.kept.shapes:
            kept = ", ".join(loaded.kept.names)
            raise refused(loaded, f"its layers keep {kept}, not keys and values alone")
        self._model = loaded.model
        self._groups = groups or one_group(loaded.kept.shapes)
        self._tails: Tails | None = None  # while steps are submitted ahead, and until the pool has what they hold
        self._last: InFlight | None = None  # the step submitted last, until it is finished
        self._unclean: list[int] = []  # blocks that may hold what is no number
        probe = Probe.of_blocks(loaded)
        install_seam(self._model)
        self._head = HeadRows(self._model)
        self._cuts: AnyShape | FixedShapes = AnyShape()
        if on_cpu():
            quicken(self._model)
            self._cuts = AnyShape(LEAST_TOKENS)
        self._check(probe, loaded)
        if deterministic:
            self._cuts = prove(self._prove, self._use_blocks, loaded.vocab_size, block_size)
            log.info("deterministic: forwards of %s tokens, tiles of %d", self._cuts.sizes, self._cuts.width)
            self._check(probe, loaded)
        self._use_pool(num_blocks, block_size)
        _evaluate(self._storage.arrays())
        if on_cpu():
            use_huge_pages([*(array for _, array in tree_flatten(self._model.parameters())), *self._storage.arrays()])

    @property
    def decode_path(self) -> str:
        """How rows are decoded, for people to read."""
        places = self._groups.places
        windows = [place.window for place in places if place.window is not None]
        sizes = " or ".join(map(str, sorted(set(windows))))
        sliding = f", {len(windows)} of {len(places)} layers see the last {sizes} tokens" if windows else ""
        kept = " and keep no more" if self._groups.gives_back else ""
        return f"ragged paged{sliding}{kept}"

    @property
    def windows(self) -> tuple[int | None, ...]:
        """One for each block that the same tokens take: how far back those look who need it; None: all the way."""
        return self._groups.windows

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
        """Start a step and return before it is done. Raises as ``step``.

        With a step in flight only one that is ahead of it may be started: it writes to tails, the pool is left alone.
        """
        rows = sorted(plan.rows, key=lambda row: row.num_new > 1)
        try:
            if plan.num_ahead:
                self._tails = self._tails or Tails(self._storage, rows)
                self._tails.turn(rows)
            else:
                self._settle()
                if self._groups.gives_back:
                    self._storage.blank(self._begun(rows))
                self._storage.copy(plan.copies)
            drawn = [draw for row in rows for draw in row.each_draw()]
            logits = self.logits(rows, self._last if plan.num_ahead else None)
            if any(row.constraint is not None for row in drawn):
                # Begun before the draws are built: meanwhile this thread computes what constrained rows may draw.
                mx.async_eval(*self._written(), logits)
            drawing, failures = draw_rows(logits, drawn)
            mx.async_eval(*self._written(), *(drawing.arrays() if drawing else ()))
        except Exception as error:
            raise self._fault(error) from error
        self._last = InFlight(drawing, failures)
        return self._last

    def finish_rows(self, step: InFlight) -> Result:
        """Wait for a submitted step and read what it drew. Raises as ``step``."""
        try:
            _evaluate([*self._storage.arrays(), *step.arrays()])
            result = step.read()
            self._unclean += [block for row in step.unsound() for block in row.blocks if block >= 0]
            if step.drawing is not None and self._last is not None and self._last is not step:
                self._last.astray.update(row.request_id for row in step.drawing.redrawn)
        except Exception as error:
            raise self._fault(error) from error
        if self._last is step:
            self._last = None
        for request_id in step.astray:
            result.draws.pop(request_id, None)
            result.failures.pop(request_id, None)
        return result

    def resize(self, num_blocks: int) -> int:
        """Grow the pool to ``num_blocks`` if memory allows; returns its number of blocks then. Raises as ``step``.

        Pool by pool, so that old and new are there at once for one of them only. Nothing may be in flight.
        """
        storage = self._storage
        copied_bytes = storage.nbytes // len(storage.pools)
        added_bytes = storage.nbytes // storage.num_blocks * (num_blocks - storage.num_blocks)
        if added_bytes + copied_bytes > free_bytes():
            log.warning("the pool stays at %d blocks: no memory for %d", storage.num_blocks, num_blocks)
            return storage.num_blocks
        try:
            for pool in storage.pools:
                pool.extend(num_blocks)
                _evaluate([pool.keys, pool.values])
            mx.clear_cache()
        except Exception as error:
            raise self._fault(error) from error
        log.info("the pool has grown from %d to %d blocks", storage.num_blocks, num_blocks)
        storage.num_blocks = num_blocks
        return num_blocks

    def close(self) -> None:
        """Free weights and pool, and say what came of it. The engine cannot be used afterwards."""
        held_bytes, began_s = mx.get_active_memory(), time.monotonic()
        del self._model, self._head, self._storage, self._tails, self._last, self._cuts
        gc.collect()  # a model's modules and their wrappers refer to one another
        mx.clear_cache()
        left_bytes, took_s = mx.get_active_memory(), time.monotonic() - began_s
        log.info(
            "weights and pool freed: %.1f of %.1f MiB in %.2f s",
            (held_bytes - left_bytes) / 2**20,
            held_bytes / 2**20,
            took_s,
        )

    def logits(self, rows: Sequence[Row], before: InFlight | None = None) -> mx.array:
        """Logits ``[R, vocab]``, one row a draw; K and V of all tokens are written. One-token rows come first.

        ``before``: the step in flight that draws the tokens of these rows.
        """
        *earlier, last = self._cuts.cut(rows)
        drawn = []
        for piece in earlier:
            logits = self._forward(piece, before)
            if any(row.draws for row in piece.rows):
                drawn.append(logits)
            # Done before the next one begins: the pool is written in place only while nothing waits to read it.
            _evaluate([*drawn, *self._written()])
        logits = self._forward(last, before)
        if drawn and not any(row.draws for row in last.rows):
            return mx.concatenate(drawn)
        return mx.concatenate([*drawn, logits]) if drawn else logits

    def _forward(self, piece: Piece, before: InFlight | None = None) -> mx.array:
        """Logits of each draw; if there is none, of one that means nothing."""
        num_groups, places = self._groups.num_groups, self._groups.places
        size = self._storage.block_size
        geometry = Geometry(piece.rows, size, piece.num_padded, piece.width, self._tails, num_groups)
        ends: list[int] = []
        ids: list[int] = []
        for row in piece.rows:
            ids += [*row.tokens[row.start : row.start + row.num_new], *row.draft] if before is None else [0]
            if row.draws:
                ends += range(len(ids) - 1 - len(row.draft), len(ids))
        ids += [0] * geometry.num_padding
        tokens = mx.array(ids) if before is None else mx.pad(before.following(piece.rows), (0, geometry.num_padding))
        self._head.aim(mx.array(ends + [0] * (max(piece.num_draws, 1) - len(ends))))
        caches = layer_caches(places, self._storage, geometry, self._tails)
        with packed(len(ids) > FEW):  # computed while it is built, but for the output head, which sees few rows
            out = self._model(tokens[:, None], cache=caches)
        if geometry.num_attended != len(places):
            raise NotImplementedError(f"{geometry.num_attended} of {len(places)} layers attended by block table")
        return self._head.finish(out)[: max(len(ends), 1)]

    def _use_pool(self, num_blocks: int, block_size: int) -> None:
        self._storage = PagedStorage(self._groups.pools, num_blocks, block_size, self._groups.num_groups)
        self._tails = self._last = None
        self._unclean.clear()

    def _use_blocks(self, num_blocks: int, block_size: int) -> None:
        """A pool with room for so many blocks of each group."""
        self._use_pool(num_blocks * self._groups.num_groups, block_size)

    def _prove(self, piece: Piece) -> mx.array:
        return self._forward(replace(piece, rows=tuple(map(self._groups.spread, piece.rows))))

    def _settle(self) -> None:
        """Bring the pool up to date, with nothing in flight: what the steps ahead have computed, and what was no number
        and would show in the blocks' next holder."""
        if self._tails is not None:
            self._tails.flush()
            self._tails = None
        if self._unclean:
            self._storage.clean(self._unclean)
            self._unclean.clear()

    def _begun(self, rows: Sequence[Row]) -> list[int]:
        """The blocks that a step begins and does not fill. What was given back behind a window may hold what is no
        number, before that shows in any logits of whoever wrote it."""
        size, num_groups, begun = self._storage.block_size, self._groups.num_groups, list[int]()
        for row in rows:
            end = row.start + row.num_new
            if end % size and end // size * size >= row.start:
                begun += row.blocks[end // size * num_groups : (end // size + 1) * num_groups]
        return begun

    def _written(self) -> list[mx.array]:
        """What the step that is submitted writes to."""
        return self._storage.arrays() if self._tails is None else self._tails.arrays()

    def _check(self, probe: Probe, loaded: LoadedModel) -> None:
        """Raises StartError where the step does not give the model's own logits."""
        self._use_blocks(probe.num_blocks, probe.BLOCK_SIZE)
        try:
            probe.check(lambda rows: self.logits(list(map(self._groups.spread, rows))), loaded, "ragged")
        except StartError:
            self._head.aim(None)  # another engine may serve the model
            raise

    def _fault(self, error: Exception) -> EngineFault:
        self._use_pool(self._storage.num_blocks, self._storage.block_size)
        return EngineFault(f"{type(error).__name__}: {error}")


def _evaluate(arrays: Sequence[mx.array]) -> None:
    """The one place where MLX computes and may fail."""
    mx.eval(*arrays)
