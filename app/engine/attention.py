"""Attention of a ragged step: each row attends through its own block table, and nothing is padded.

mlx-lm models call ``cache.update_and_fetch(k, v)`` and then ``scaled_dot_product_attention(..., cache=cache)``. Those
two calls are the seam: ``LayerCache`` stands behind the first, ``install_seam`` rebinds the second.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from app.engine.kernels import LOG2_E, causal_attention, on_cpu
from app.engine.storage import LayerPool, PagedStorage
from app.engine.tails import Tail, Tails
from app.engine.tiles import Tiles
from app.scheduler.plan import Row

SEAM = "scaled_dot_product_attention"


@dataclass(frozen=True, slots=True)
class Chunk:
    """One row of several tokens: its place among the step's tokens, its block table, its length after the step."""

    first: int
    num_tokens: int
    blocks: mx.array
    num_context: int


class Geometry:
    """Which token of a step belongs to which request, as arrays every layer shares. One-token rows come first."""

    def __init__(
        self,
        rows: Sequence[Row],
        block_size: int,
        num_padded: int = 0,
        width: int | None = None,
        tails: Tails | None = None,
    ) -> None:
        """The step is filled up to ``num_padded`` tokens that are computed and then forgotten. ``width``: how many
        neighbouring tokens of a chunk attend together, by block table as one-token rows do; None: see ``Chunk``.
        ``tails``: where K and V are written instead of the pool; all rows are of one token then."""
        self.block_size = block_size
        num_pooled = None if tails is None else [tails.num_pooled(row) for row in rows]
        rows = rows if tails is None else [tails.moved(row) for row in rows]
        self.num_attended = 0
        positions = np.concatenate([np.arange(row.start, row.start + row.num_new) for row in rows])
        blocks = np.concatenate([np.asarray(row.blocks)[_block_span(row, block_size)] for row in rows])
        self.num_tokens = len(positions)
        self.num_padding = max(num_padded - self.num_tokens, 0)
        self.offsets = mx.array(np.pad(positions, (0, self.num_padding)).astype(np.int32))
        self._blocks = blocks
        self._places = positions % block_size
        num_singles = sum(1 for row in rows if row.num_new == 1)
        singles, longer = rows[:num_singles], rows[num_singles:]
        # A BLAS takes a single query for a vector, which costs a fifth of a small matrix of three (docs/benchmarks.md).
        apart = width is None and on_cpu()
        self.tiles = [Tiles(singles, 0, 1, block_size, apart, num_pooled)] if singles else []
        self.chunks: list[Chunk] = []
        if longer and width is not None:
            self.tiles.append(Tiles(longer, num_singles, math.gcd(width, block_size), block_size))
        elif longer:
            self.chunks = _chunks(longer, num_singles, block_size)
        self._writes: dict[int, mx.array] = {}

    def writes(self, num_heads: int) -> mx.array:
        """Vectors of a ``LayerPool`` or ``Tail`` that the step's tokens are written to: ``[T, num_heads]``."""
        if num_heads not in self._writes:
            heads = np.arange(num_heads)
            at = (self._blocks[:, None] * num_heads + heads) * self.block_size + self._places[:, None]
            self._writes[num_heads] = mx.array(at)
        return self._writes[num_heads]


def _chunks(rows: Sequence[Row], first: int, block_size: int) -> list[Chunk]:
    chunks = []
    for row in rows:
        num_context = row.start + row.num_new
        table = np.asarray(row.blocks[: -(-num_context // block_size)])
        chunks.append(Chunk(first, row.num_new, mx.array(table), num_context))
        first += row.num_new
    return chunks


def _block_span(row: Row, block_size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.arange(row.start, row.start + row.num_new) // block_size


class LayerCache:
    """One layer's cache for one step, in the shape mlx-lm models expect: ``offset`` and ``update_and_fetch``."""

    def __init__(self, pool: LayerPool, geometry: Geometry, tail: Tail | None = None) -> None:
        """With a ``tail`` the pool is only read."""
        self.pool = pool
        self.geometry = geometry
        self.places: tuple[LayerPool | Tail, ...] = (pool,) if tail is None else (pool, tail)

    @property
    def offset(self) -> mx.array:
        return self.geometry.offsets

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write K and V ``[T, heads, 1, dim]`` to pool or tail, where attention reads them; give them back."""
        at = self.geometry.writes(self.pool.shape.num_heads)
        num_tokens = self.geometry.num_tokens
        self.places[-1].write(at, keys.squeeze(2)[:num_tokens], values.squeeze(2)[:num_tokens])
        return keys, values

    def attend(self, queries: mx.array, scale: float) -> mx.array:
        """Attention of ``queries [T, query_heads, 1, key_dim]``; gives ``[T, query_heads, 1, value_dim]``."""
        geometry = self.geometry
        geometry.num_attended += 1
        parts = [_attend_tiles(queries, self.places, tiles, scale) for tiles in geometry.tiles]
        parts += [_attend_chunk(queries, self.pool, chunk, scale) for chunk in geometry.chunks]
        if geometry.num_padding:
            parts.append(mx.zeros((geometry.num_padding, *parts[0].shape[1:]), parts[0].dtype))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def _attend_tiles(queries: mx.array, places: Sequence[LayerPool | Tail], tiles: Tiles, scale: float) -> mx.array:
    """Block-table attention of queries in tiles, K and V read where they lie: two ``gather_mm`` over each place.

    Each pair gives partial scores and sums; queries are put together by their maximum and sum, as in flash attention
    (Dao et al., 2022), so rows of any lengths share the call without padding. Sums over a query's pairs are segments
    of a product with ones: no row's numbers ever meet another's.
    """
    heads, width, size = places[0].shape.num_heads, tiles.width, places[0].block_size
    group = queries.shape[1] // heads
    keys, values = zip(*(place.tiles() for place in places), strict=True)
    index, rows = tiles.index(heads, group), tiles.pair_tiles
    # In powers of two: the factor goes into the queries, where it costs nothing.
    scaled = tiles.gather(queries * (scale * LOG2_E), heads, index.height)
    scores = _joined(
        [mx.gather_mm(scaled, keys[part.place].swapaxes(-1, -2), part.queries, part.blocks) for part in index.parts]
    )
    scores = scores.reshape(-1, heads, width, group, size) + tiles.bias
    peak = mx.full((tiles.num_tiles, heads, width, group, 1), -mx.inf, scores.dtype)
    peak = peak.at[rows].maximum(scores.max(-1, keepdims=True))
    weights = mx.power(2.0, scores - peak[rows])  # [P, heads, width, group, block_size]
    flat = weights.astype(values[0].dtype).reshape(-1, index.height, size)
    partial = _joined([mx.gather_mm(flat, values[part.place], part.pairs, part.blocks) for part in index.parts])
    total, summed = (
        tiles.sum_pairs(part.reshape(-1, heads, width, group, part.shape[-1]))
        for part in (weights.sum(-1, keepdims=True), partial)
    )
    return tiles.scatter((summed / total).astype(queries.dtype).reshape(-1, heads * group, 1, summed.shape[-1]))


def _joined(parts: Sequence[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def _attend_chunk(queries: mx.array, pool: LayerPool, chunk: Chunk, scale: float) -> mx.array:
    own = queries[chunk.first : chunk.first + chunk.num_tokens].transpose(2, 1, 0, 3)
    keys, values = pool.context(chunk.blocks, chunk.num_context)
    if on_cpu():
        out = causal_attention(own, keys, values, scale)
    else:
        out = mx.fast.scaled_dot_product_attention(own, keys, values, scale=scale, mask="causal")
    return out.transpose(2, 1, 0, 3)


def layer_caches(storage: PagedStorage, geometry: Geometry, tails: Tails | None = None) -> list[LayerCache]:
    """A cache for each layer, as mlx-lm models take them. ``tails`` as in ``Geometry``."""
    if tails is None:
        return [LayerCache(pool, geometry) for pool in storage.layers]
    return [LayerCache(pool, geometry, tail) for pool, tail in zip(storage.layers, tails.layers, strict=True)]


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
