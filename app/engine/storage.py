"""The block pool on the device: K and V of every layer, written in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class LayerShape:
    """What one layer keeps of one token: ``num_heads`` keys of ``key_dim`` and values of ``value_dim`` numbers. A token
    looks at the last ``window`` tokens, itself among them; None: at all."""

    num_heads: int
    key_dim: int
    value_dim: int
    dtype: mx.Dtype
    window: int | None = None

    @property
    def bytes_per_token(self) -> int:
        return self.num_heads * (self.key_dim + self.value_dim) * self.dtype.size


class LayerPool:
    """K and V of one layer, flat: vector (block, head, position in block) is at ``(block * num_heads + head) *
    block_size + position``. Flat, because a write is then one scatter of whole vectors and each view a free reshape.
    """

    def __init__(self, shape: LayerShape, num_blocks: int, block_size: int) -> None:
        self.shape = shape
        self.block_size = block_size
        num_vectors = num_blocks * shape.num_heads * block_size
        self.keys = mx.zeros((num_vectors, shape.key_dim), shape.dtype)
        self.values = mx.zeros((num_vectors, shape.value_dim), shape.dtype)

    def write(self, at: mx.array, keys: mx.array, values: mx.array) -> None:
        """Store keys and values ``[T, num_heads, 1, dim]`` at vectors ``at [T, num_heads, 1]``.

        In place as long as nothing but this object holds the arrays when they are evaluated; MLX copies the whole pool
        otherwise.
        """
        self.keys[at] = keys
        self.values[at] = values

    def extend(self, num_blocks: int) -> None:
        """Have ``num_blocks`` blocks in all; those there were keep their content."""
        size = num_blocks * self.shape.num_heads * self.block_size
        self.keys = mx.pad(self.keys, [(0, size - len(self.keys)), (0, 0)])
        self.values = mx.pad(self.values, [(0, size - len(self.values)), (0, 0)])

    def tiles(self) -> tuple[mx.array, mx.array]:
        """K and V as ``[num_blocks * num_heads, block_size, dim]``: one tile is one head of one block."""
        return (
            self.keys.reshape(-1, self.block_size, self.shape.key_dim),
            self.values.reshape(-1, self.block_size, self.shape.value_dim),
        )

    def context(self, blocks: mx.array, num_tokens: int) -> tuple[mx.array, mx.array]:
        """Gather the first ``num_tokens`` positions of a block table: K and V ``[1, num_heads, num_tokens, dim]``."""
        return self._gather(self.keys, blocks, num_tokens), self._gather(self.values, blocks, num_tokens)

    def _gather(self, vectors: mx.array, blocks: mx.array, num_tokens: int) -> mx.array:
        heads, size = self.shape.num_heads, self.block_size
        picked = vectors.reshape(-1, heads, size, vectors.shape[-1])[blocks]
        return picked.transpose(1, 0, 2, 3).reshape(1, heads, -1, vectors.shape[-1])[:, :, :num_tokens]

    def copy(self, sources: mx.array, targets: mx.array, origin: LayerPool | None = None) -> None:
        """Copy whole blocks, of ``origin`` if it is another pool; every source is read before any target is written."""
        origin = origin or self
        read, write = self._vectors(sources), self._vectors(targets)
        self.keys[write] = origin.keys[read]
        self.values[write] = origin.values[read]

    def clean(self, blocks: mx.array) -> None:
        """Put zeros where whole blocks hold anything but finite numbers."""
        at = self._vectors(blocks)
        self.keys[at] = _finite(self.keys[at])
        self.values[at] = _finite(self.values[at])

    def blank(self, blocks: mx.array) -> None:
        """Put zeros into whole blocks, in place as ``write``."""
        at = self._vectors(blocks)
        self.keys[at] = mx.array(0, self.keys.dtype)
        self.values[at] = mx.array(0, self.values.dtype)

    def _vectors(self, blocks: mx.array) -> mx.array:
        """Every vector of these blocks, block by block."""
        rows = mx.arange(self.shape.num_heads * self.block_size)
        return (blocks[:, None] * rows.size + rows).reshape(-1)


def _finite(vectors: mx.array) -> mx.array:
    return mx.where(mx.isfinite(vectors), vectors, mx.zeros_like(vectors))


class PagedStorage:
    """All pools: one for each layer of a group. The block ids in them are the scheduler's; nothing here decides who
    owns a block, or to which group of layers it belongs."""

    def __init__(self, shapes: Sequence[LayerShape], num_blocks: int, block_size: int, num_groups: int = 1) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.num_groups = num_groups
        self.pools = [LayerPool(shape, num_blocks, block_size) for shape in shapes]

    @property
    def nbytes(self) -> int:
        return sum(pool.keys.nbytes + pool.values.nbytes for pool in self.pools)

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks (source, target) in every pool."""
        if copies:
            sources, targets = (mx.array(side) for side in zip(*copies, strict=True))
            for pool in self.pools:
                pool.copy(sources, targets)

    def clean(self, blocks: Sequence[int]) -> None:
        """Put zeros where blocks hold anything but finite numbers. Attention gives what lies behind a row's end no
        weight, but no weight times NaN is NaN: the next holder of these blocks would see it."""
        for pool in self.pools:
            pool.clean(mx.array(blocks))

    def blank(self, blocks: Sequence[int]) -> None:
        """Put zeros into blocks of which only a beginning will be written now."""
        if blocks:
            for pool in self.pools:
                pool.blank(mx.array(blocks))

    def arrays(self) -> list[mx.array]:
        """Every array of the pools, to be evaluated with the step that wrote it."""
        return [array for pool in self.pools for array in (pool.keys, pool.values)]
