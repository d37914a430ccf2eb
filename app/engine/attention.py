"""Attention of a ragged step: each row attends through its own block table, and nothing is padded.

mlx-lm models call ``cache.update_and_fetch(k, v)`` and then ``scaled_dot_product_attention(..., cache=cache)``. Those
two calls are the seam: ``LayerCache`` stands behind the first, ``install_seam`` rebinds the second.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from app.engine.kernels import LOG2_E, causal_attention, on_cpu
from app.engine.storage import LayerPool, PagedStorage
from app.scheduler.plan import Row

SEAM = "scaled_dot_product_attention"


@dataclass(frozen=True, slots=True)
class DecodeIndex:
    """Where the one-token rows find their context, for layers with ``num_heads`` KV heads.

    A pair is one (row, block) the row attends to; there are P of them over R rows.
    """

    queries: mx.array  # [P, num_heads] row * num_heads + head
    tiles: mx.array  # [P, num_heads] block * num_heads + head
    pairs: mx.array  # [P, num_heads] counts up: one probability tile a pair and head


@dataclass(frozen=True, slots=True)
class Chunk:
    """One row of several tokens: its place among the step's tokens, its block table, its length after the step."""

    first: int
    num_tokens: int
    blocks: mx.array
    num_context: int


class Geometry:
    """Which token of a step belongs to which request, as arrays every layer shares. One-token rows come first."""

    def __init__(self, rows: Sequence[Row], block_size: int) -> None:
        self.block_size = block_size
        self.num_attended = 0
        positions = np.concatenate([np.arange(row.start, row.start + row.num_new) for row in rows])
        blocks = np.concatenate([np.asarray(row.blocks)[_block_span(row, block_size)] for row in rows])
        self.offsets = mx.array(positions.astype(np.int32))
        self._blocks = blocks
        self._places = positions % block_size
        singles = [row for row in rows if row.num_new == 1]
        self.num_singles = len(singles)
        self.chunks: list[Chunk] = []
        first = self.num_singles
        for row in rows[self.num_singles :]:
            num_context = row.start + row.num_new
            table = np.asarray(row.blocks[: -(-num_context // block_size)])
            self.chunks.append(Chunk(first, row.num_new, mx.array(table), num_context))
            first += row.num_new
        self._set_pairs(singles)
        self._writes: dict[int, mx.array] = {}
        self._decode: dict[int, DecodeIndex] = {}

    def _set_pairs(self, singles: Sequence[Row]) -> None:
        size = self.block_size
        counts = [row.start // size + 1 for row in singles]
        self._pair_rows = np.repeat(np.arange(len(singles)), counts)
        self._pair_blocks = np.concatenate(
            [np.asarray(row.blocks[:count]) for row, count in zip(singles, counts, strict=True)] or [np.zeros(0, int)]
        )
        ordinals = np.concatenate([np.arange(count) for count in counts] or [np.zeros(0, int)])
        lengths = np.asarray([row.start + 1 for row in singles], dtype=int)
        hidden = ordinals[:, None] * size + np.arange(size) >= lengths[self._pair_rows][:, None]
        self.pair_rows = mx.array(self._pair_rows)
        ends = np.cumsum(counts, dtype=np.uint32)
        self._segments = mx.array(np.stack([ends - np.asarray(counts, np.uint32), ends], axis=1))
        self._ones = mx.ones((1, len(self._pair_rows)))
        self.pair_bias = mx.array(np.where(hidden, -np.inf, 0.0).astype(np.float32))[
            :, None, None, :
        ]  # [P, 1, 1, size]

    def sum_pairs(self, parts: mx.array) -> mx.array:
        """Add up what each row's pairs hold: ``[P, ...]`` to ``[R, ...]``."""
        flat = parts.reshape(len(parts), -1).astype(mx.float32)
        return mx.segmented_mm(self._ones, flat, self._segments).reshape(-1, *parts.shape[1:])

    def writes(self, num_heads: int) -> mx.array:
        """Vectors of a ``LayerPool`` that the step's tokens are written to: ``[T, num_heads]``."""
        if num_heads not in self._writes:
            heads = np.arange(num_heads)
            at = (self._blocks[:, None] * num_heads + heads) * self.block_size + self._places[:, None]
            self._writes[num_heads] = mx.array(at)
        return self._writes[num_heads]

    def decode(self, num_heads: int) -> DecodeIndex:
        if num_heads not in self._decode:
            heads = np.arange(num_heads)
            self._decode[num_heads] = DecodeIndex(
                queries=mx.array((self._pair_rows[:, None] * num_heads + heads).astype(np.uint32)),
                tiles=mx.array((self._pair_blocks[:, None] * num_heads + heads).astype(np.uint32)),
                pairs=mx.arange(len(self._pair_rows) * num_heads, dtype=mx.uint32).reshape(-1, num_heads),
            )
        return self._decode[num_heads]


def _block_span(row: Row, block_size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.arange(row.start, row.start + row.num_new) // block_size


class LayerCache:
    """One layer's cache for one step, in the shape mlx-lm models expect: ``offset`` and ``update_and_fetch``."""

    def __init__(self, pool: LayerPool, geometry: Geometry) -> None:
        self.pool = pool
        self.geometry = geometry

    @property
    def offset(self) -> mx.array:
        return self.geometry.offsets

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write K and V ``[T, heads, 1, dim]`` to the pool, which is where attention reads them; give them back."""
        at = self.geometry.writes(self.pool.shape.num_heads)
        self.pool.write(at, keys.squeeze(2), values.squeeze(2))
        return keys, values

    def attend(self, queries: mx.array, scale: float) -> mx.array:
        """Attention of ``queries [T, query_heads, 1, key_dim]``; gives ``[T, query_heads, 1, value_dim]``."""
        geometry = self.geometry
        geometry.num_attended += 1
        parts = []
        if geometry.num_singles:
            index = geometry.decode(self.pool.shape.num_heads)
            parts.append(_attend_singles(queries[: geometry.num_singles], self.pool, geometry, index, scale))
        parts += [_attend_chunk(queries, self.pool, chunk, scale) for chunk in geometry.chunks]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def _attend_singles(
    queries: mx.array, pool: LayerPool, geometry: Geometry, index: DecodeIndex, scale: float
) -> mx.array:
    """Block-table attention of R one-token rows, read where it lies: two ``gather_mm`` over the pool's tiles.

    Each pair gives partial scores and sums; rows are put together by their maximum and sum, as in flash attention
    (Dao et al., 2022), so rows of any lengths share the call without padding. Sums over a row's pairs are segments of
    a product with ones: no row's numbers ever meet another's.
    """
    num_rows, num_queries = queries.shape[:2]
    heads = pool.shape.num_heads
    group = num_queries // heads
    keys, values = pool.tiles()
    rows = geometry.pair_rows
    # In powers of two: the factor goes into the queries, where it costs nothing.
    scaled = (queries * (scale * LOG2_E)).reshape(num_rows * heads, group, -1)
    scores = mx.gather_mm(scaled, keys.swapaxes(-1, -2), index.queries, index.tiles) + geometry.pair_bias
    peak = mx.full((num_rows, heads, group, 1), -mx.inf, scores.dtype).at[rows].maximum(scores.max(-1, keepdims=True))
    weights = mx.power(2.0, scores - peak[rows])  # [P, heads, group, block_size]
    tiles = weights.astype(values.dtype).reshape(-1, group, pool.block_size)
    partial = mx.gather_mm(tiles, values, index.pairs, index.tiles)
    total, summed = (geometry.sum_pairs(part) for part in (weights.sum(-1, keepdims=True), partial))
    return (summed / total).astype(queries.dtype).reshape(num_rows, num_queries, 1, -1)


def _attend_chunk(queries: mx.array, pool: LayerPool, chunk: Chunk, scale: float) -> mx.array:
    own = queries[chunk.first : chunk.first + chunk.num_tokens].transpose(2, 1, 0, 3)
    keys, values = pool.context(chunk.blocks, chunk.num_context)
    if on_cpu():
        out = causal_attention(own, keys, values, scale)
    else:
        out = mx.fast.scaled_dot_product_attention(own, keys, values, scale=scale, mask="causal")
    return out.transpose(2, 1, 0, 3)


def layer_caches(storage: PagedStorage, geometry: Geometry) -> list[LayerCache]:
    return [LayerCache(pool, geometry) for pool in storage.layers]


def _seam(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def scaled_dot_product_attention(
        queries: mx.array, keys: mx.array, values: mx.array, cache: Any, scale: float, mask: Any, sinks: Any = None
    ) -> mx.array:
        if isinstance(cache, LayerCache):
            if mask is not None or sinks is not None:
                raise NotImplementedError("attention masks and sinks have no block-table form here")
            return cache.attend(queries, scale)
        return original(queries, keys, values, cache=cache, scale=scale, mask=mask, sinks=sinks)

    return scaled_dot_product_attention


def install_seam(model: nn.Module) -> None:
    """Rebind mlx-lm's attention function in every module that defines a class of ``model``.

    Model modules import it by name, so each has a binding of its own; all caches but ``LayerCache`` still reach the
    original. Doing it twice changes nothing.
    """
    for name in {cls.__module__ for part in model.modules() for cls in type(part).__mro__}:
        module = sys.modules[name]
        bound = getattr(module, SEAM, None)
        if bound is not None and bound.__module__ != __name__:
            setattr(module, SEAM, _seam(bound))
