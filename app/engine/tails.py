"""Where a run of steps that are submitted ahead keeps its K and V: the pool is only read in it, and written at its end.

MLX writes a buffer in place while nothing in flight holds it, and copies it whole otherwise. So with a step in flight
each row has the blocks that it fills in a tail of its own, outside of the pool. Of each tail there are two, written in
turn: the one that a step in flight reads is left alone, and the other one catches up first. So tails are not copied
either.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from app.engine.storage import LayerPool, LayerShape, PagedStorage
from app.scheduler.plan import Row

# A run is at most as many steps as a block has tokens (see ``app.scheduler.lookahead``), so a row writes to two blocks.
TAIL_BLOCKS = 2


class Tail:
    """The tails of one pool: two small ones in which the i-th row has ``TAIL_BLOCKS`` blocks for each group of layers,
    from the first row's on, in the order of a table."""

    def __init__(self, shape: LayerShape, num_tables: int, block_size: int) -> None:
        """``num_tables``: rows times groups."""
        self.shape = shape
        self.block_size = block_size
        self._halves = [LayerPool(shape, TAIL_BLOCKS * num_tables, block_size) for _ in range(2)]
        self._missing: list[tuple[mx.array, mx.array, mx.array]] = []  # in the half that is written now
        self._written: list[tuple[mx.array, mx.array, mx.array]] = []  # in this step

    def load(self, pool: LayerPool, sources: mx.array, targets: mx.array) -> None:
        """Copy blocks of the pool into tails."""
        for half in self._halves:
            half.copy(sources, targets, pool)

    def flush(self, pool: LayerPool, sources: mx.array, targets: mx.array) -> None:
        """Copy blocks of tails into the pool."""
        pool.copy(sources, targets, self._halves[0])

    def turn(self) -> None:
        """A step begins."""
        self._halves.reverse()
        self._missing, self._written = self._written, []

    def write(self, at: mx.array, keys: mx.array, values: mx.array) -> None:
        """As ``LayerPool.write``."""
        for vectors in (*self._missing, (at, keys, values)):
            self._halves[0].write(*vectors)
        self._missing = []
        self._written.append((at, keys, values))

    def tiles(self) -> tuple[mx.array, mx.array]:
        """As ``LayerPool.tiles``."""
        return self._halves[0].tiles()

    def arrays(self) -> list[mx.array]:
        return [array for half in self._halves for array in (half.keys, half.values)]


class Tails:
    """The tails of all rows and pools in one run."""

    def __init__(self, storage: PagedStorage, rows: Sequence[Row]) -> None:
        """``rows`` are those of the run's first step. Reads the blocks that they go on in."""
        size = storage.block_size
        self._storage = storage
        self._rows = rows
        self._places = {row.request_id: place for place, row in enumerate(rows)}
        self._num_groups = storage.num_groups
        self._num_pooled = [row.start // size for row in rows]
        self.pools = [Tail(pool.shape, len(rows) * self._num_groups, size) for pool in storage.pools]
        begun = [place for place, row in enumerate(rows) if row.start % size]
        if begun:
            n = self._num_groups
            sources = mx.array([rows[i].blocks[self._num_pooled[i] * n + k] for i in begun for k in range(n)])
            targets = mx.array([TAIL_BLOCKS * i * n + k for i in begun for k in range(n)])
            for tail, pool in zip(self.pools, storage.pools, strict=True):
                tail.load(pool, sources, targets)

    def turn(self, rows: Sequence[Row]) -> None:
        """The run's next step begins, with these rows."""
        self._rows = rows
        for tail in self.pools:
            tail.turn()

    def num_pooled(self, row: Row) -> int:
        """How many of a row's blocks are read from the pool, in each group."""
        return self._num_pooled[self._places[row.request_id]]

    def moved(self, row: Row) -> Row:
        """The row with its tail's blocks behind those in the pool."""
        num_groups = self._num_groups
        first, num_pooled = self._places[row.request_id] * TAIL_BLOCKS * num_groups, self.num_pooled(row) * num_groups
        return row._replace(blocks=[*row.blocks[:num_pooled], *range(first, first + TAIL_BLOCKS * num_groups)])

    def flush(self) -> None:
        """Put into the pool what was computed; nothing may be in flight. A block that a row was never given, since its
        request had ended, is left out."""
        pairs: list[tuple[int, int]] = []
        for row in self._rows:
            num_groups = self._num_groups
            first, num_pooled = (
                self._places[row.request_id] * TAIL_BLOCKS * num_groups,
                self.num_pooled(row) * num_groups,
            )
            num_blocks = min((row.start // self._storage.block_size + 1) * num_groups, len(row.blocks))
            pairs += [(first + i - num_pooled, row.blocks[i]) for i in range(num_pooled, num_blocks)]
        if pairs:
            sources, targets = (mx.array(side) for side in zip(*pairs, strict=True))
            for tail, pool in zip(self.pools, self._storage.pools, strict=True):
                tail.flush(pool, sources, targets)

    def arrays(self) -> list[mx.array]:
        """Every array of the tails, to be evaluated with the step that wrote it."""
        return [array for tail in self.pools for array in tail.arrays()]
