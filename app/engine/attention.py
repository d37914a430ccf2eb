"""Attention of a ragged step: each row attends through its own block table, and nothing is padded.

mlx-lm models call ``cache.update_and_fetch(k, v)`` and then ``scaled_dot_product_attention(..., cache=cache)``. Those
two calls are the seam: ``LayerCache`` stands behind the first, ``install_seam`` rebinds the second.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from app.engine.groups import Place
from app.engine.kernels import LOG2_E, causal_attention, filled, on_cpu
from app.engine.storage import LayerPool, PagedStorage
from app.engine.tails import Tail, Tails
from app.engine.tiles import Tiles
from app.scheduler.plan import Row

SEAM = "scaled_dot_product_attention"
SHARED = "a layer attends to what another layer keeps"
BEGIN_EVERY = 3  # layers (docs/benchmarks.md)


@dataclass(frozen=True, slots=True)
class Window:
    """The mask of a layer whose tokens see the last ``num_tokens`` up to themselves: all that a ragged step needs."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """One row of several tokens: its place among the step's tokens, the blocks it looks at, its length after the step
    from the first of them on. ``mask [num_tokens, num_context]`` has the ``window``, if there is one."""

    first: int
    num_tokens: int
    blocks: mx.array
    num_context: int
    window: int | None
    mask: mx.array | str


@dataclass(frozen=True, slots=True)
class Sight:
    """What the tokens of a step look at, in layers with the same window."""

    tiles: list[Tiles]
    chunks: list[Chunk]


class Geometry:
    """Which token of a step belongs to which request, as arrays every layer shares. One-token rows come first."""

    def __init__(
        self,
        rows: Sequence[Row],
        block_size: int,
        num_padded: int = 0,
        width: int | None = None,
        tails: Tails | None = None,
        num_groups: int = 1,
    ) -> None:
        """The step is filled up to ``num_padded`` tokens that are computed and then forgotten. ``width``: how many
        neighbouring tokens of a chunk attend together, by block table as one-token rows do; None: see ``Chunk``.
        ``tails``: where K and V are written instead of the pool; all rows are of one token then. ``num_groups``: how
        many groups of layers the rows have blocks for (``app.kv.layout``)."""
        self.block_size = block_size
        num_pooled = None if tails is None else [tails.num_pooled(row) for row in rows]
        rows = rows if tails is None else [tails.moved(row) for row in rows]
        self.num_attended = 0
        positions = np.concatenate([np.arange(row.start, row.start + row.num_new) for row in rows])
        self.num_tokens = len(positions)
        self.num_padding = max(num_padded - self.num_tokens, 0)
        self.offsets = mx.array(np.pad(positions, (0, self.num_padding)).astype(np.int32))
        self._places = positions % block_size
        self._rows = [rows if num_groups == 1 else _of_group(rows, k, num_groups) for k in range(num_groups)]
        self._width = width
        self._num_pooled = num_pooled
        self._longest = int(positions.max()) + 1
        self._sights: dict[tuple[int | None, int], Sight] = {}
        self._writes: dict[tuple[int, int], mx.array] = {}

    def sight(self, window: int | None, group: int = 0) -> Sight:
        """What to look at in the blocks of a group where a token sees the last ``window`` tokens; None: all."""
        if window is not None and window >= self._longest:
            window = None
        if (window, group) not in self._sights:
            self._sights[window, group] = self._look(window, self._rows[group])
        return self._sights[window, group]

    def _look(self, window: int | None, rows: Sequence[Row]) -> Sight:
        size, width = self.block_size, self._width
        num_singles = sum(1 for row in rows if row.num_new == 1)
        singles, longer = rows[:num_singles], rows[num_singles:]
        # A BLAS takes a single query for a vector, which costs a fifth of a small matrix of three (docs/benchmarks.md).
        apart = width is None and on_cpu()
        tiles = [Tiles(singles, 0, 1, size, apart, self._num_pooled, window)] if singles else []
        if longer and width is not None:
            tiles.append(Tiles(longer, num_singles, math.gcd(width, size), size, window=window))
            longer = []
        return Sight(tiles, _chunks(longer, num_singles, size, window))

    def writes(self, num_heads: int, group: int = 0) -> mx.array:
        """Vectors of a ``LayerPool`` or ``Tail`` that the step's tokens are written to: ``[T, num_heads, 1]``."""
        if (num_heads, group) not in self._writes:
            size, rows, heads = self.block_size, self._rows[group], np.arange(num_heads)
            blocks = np.concatenate([np.asarray(row.blocks)[_block_span(row, size)] for row in rows])
            at = (blocks[:, None] * num_heads + heads) * size + self._places[:, None]
            self._writes[num_heads, group] = mx.array(at[:, :, None])
        return self._writes[num_heads, group]


def _of_group(rows: Sequence[Row], group: int, num_groups: int) -> Sequence[Row]:
    return [row._replace(blocks=row.blocks[group::num_groups]) for row in rows]


def _chunks(rows: Sequence[Row], first: int, block_size: int, window: int | None) -> list[Chunk]:
    chunks = []
    for row in rows:
        end = row.start + row.num_new
        behind = 0 if window is None else max(row.start - window + 1, 0) // block_size
        table = np.asarray(row.blocks[behind : -(-end // block_size)])
        num_context = end - behind * block_size
        mask = "causal" if window is None else _window_mask(row.num_new, num_context, window)
        chunks.append(Chunk(first, row.num_new, mx.array(table), num_context, window, mask))
        first += row.num_new
    return chunks


def _window_mask(num_tokens: int, num_context: int, window: int) -> mx.array:
    """Which positions of a context its last ``num_tokens`` see: ``[num_tokens, num_context]``."""
    positions, others = mx.arange(num_context - num_tokens, num_context)[:, None], mx.arange(num_context)
    return (others <= positions) & (others > positions - window)


def _block_span(row: Row, block_size: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    return np.arange(row.start, row.start + row.num_new) // block_size


class LayerCache:
    """One layer's cache for one step, in the shape mlx-lm models expect: ``offset`` and ``update_and_fetch``."""

    def __init__(self, place: Place, pool: LayerPool, geometry: Geometry, tail: Tail | None = None) -> None:
        """With a ``tail`` the pool is only read."""
        self.place = place
        self.pool = pool
        self.geometry = geometry
        self.places: tuple[LayerPool | Tail, ...] = (pool,) if tail is None else (pool, tail)

    @property
    def offset(self) -> mx.array:
        return self.geometry.offsets

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """Write K and V ``[T, heads, 1, dim]`` to pool or tail, where attention reads them; give them back."""
        at = self.geometry.writes(self.pool.shape.num_heads, self.place.group)
        num_tokens = self.geometry.num_tokens
        self.places[-1].write(at, keys[:num_tokens], values[:num_tokens])
        return keys, values

    def keys_and_values(self) -> NoReturn:
        """What a model asks for whose layers share what one of them keeps."""
        raise NotImplementedError(SHARED)

    def make_mask(self, num_tokens: int, return_array: bool = False, window_size: int | None = None) -> Window | None:
        """What a model asks for before its layers and hands to attention in each that is alike. Its own word counts
        before that of its cache."""
        window = window_size or self.place.window
        return None if window is None else Window(window)

    def attend(
        self, queries: mx.array, scale: float, mask: Window | None = None, sinks: mx.array | None = None
    ) -> mx.array:
        """Attention of ``queries [T, query_heads, 1, key_dim]``; gives ``[T, query_heads, 1, value_dim]``. ``sinks
        [query_heads]`` as in ``causal_attention``."""
        geometry = self.geometry
        geometry.num_attended += 1
        if geometry.num_attended % BEGIN_EVERY == 0 and on_cpu():
            # It is computed while the graph of the next layers is built. A GPU is given whole steps ahead.
            mx.async_eval(queries)
        window = self.place.window if mask is None else mask.num_tokens
        if self.place.kept is not None and (window is None or window > self.place.kept):
            raise NotImplementedError("a layer looks further back than its own cache would")
        sight = geometry.sight(window, self.place.group)
        parts = [_attend_tiles(queries, self.places, tiles, scale, sinks) for tiles in sight.tiles]
        parts += [_attend_chunk(queries, self.pool, chunk, scale, sinks) for chunk in sight.chunks]
        if geometry.num_padding:
            parts.append(mx.zeros((geometry.num_padding, *parts[0].shape[1:]), parts[0].dtype))
        return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def _attend_tiles(
    queries: mx.array, places: Sequence[LayerPool | Tail], tiles: Tiles, scale: float, sinks: mx.array | None
) -> mx.array:
    """Block-table attention of queries in tiles, K and V read where they lie: two ``gather_mm`` over each place.

    Each pair gives partial scores and sums; queries are put together by their maximum and sum, as in flash attention
    (Dao et al., 2022), so rows of any lengths share the call without padding. Sums over a query's pairs are segments
    of a product with ones: no row's numbers ever meet another's.
    """
    heads = places[0].shape.num_heads
    keys, values = zip(*(place.tiles() for place in places), strict=True)
    index, rows = tiles.index(heads, queries.shape[1] // heads), tiles.pair_tiles
    # In powers of two: the factor goes into the queries, where it costs nothing.
    scaled = tiles.gather(queries * filled(scale * LOG2_E, queries.shape, queries.dtype), heads, index.height)
    scores = _joined(
        [mx.gather_mm(scaled, keys[part.place].swapaxes(-1, -2), part.queries, part.blocks) for part in index.parts]
    )
    scores = scores + index.bias
    sink = None if sinks is None else tiles.sinks(sinks.astype(scores.dtype) * LOG2_E, index)
    least = index.least if sink is None else mx.broadcast_to(sink, index.least.shape)
    peak = least.at[rows].maximum(scores.max(-1, keepdims=True))
    weights = mx.power(index.base, scores - peak[rows])
    flat = weights.astype(values[0].dtype)
    partial = _joined([mx.gather_mm(flat, values[part.place], part.pairs, part.blocks) for part in index.parts])
    total, summed = tiles.sum_pairs(weights.sum(-1, keepdims=True)), tiles.sum_pairs(partial)
    if sink is not None:
        total = total + tiles.by_query(mx.power(2.0, sink - peak))
    results = tiles.scatter((summed / total).astype(queries.dtype))
    return results.reshape(len(results), -1, 1, results.shape[-1])


def _joined(parts: Sequence[mx.array]) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts)


def _attend_chunk(queries: mx.array, pool: LayerPool, chunk: Chunk, scale: float, sinks: mx.array | None) -> mx.array:
    own = queries[chunk.first : chunk.first + chunk.num_tokens].transpose(2, 1, 0, 3)
    keys, values = pool.context(chunk.blocks, chunk.num_context)
    if on_cpu():
        out = causal_attention(own, keys, values, scale, chunk.window, sinks)
    else:
        out = mx.fast.scaled_dot_product_attention(own, keys, values, scale=scale, mask=chunk.mask, sinks=sinks)
    return out.transpose(2, 1, 0, 3)


def layer_caches(
    places: Sequence[Place], storage: PagedStorage, geometry: Geometry, tails: Tails | None = None
) -> list[LayerCache]:
    """A cache for each layer, as mlx-lm models take them. ``tails`` as in ``Geometry``."""
    pools = [(pool, None) for pool in storage.pools] if tails is None else zip(storage.pools, tails.pools, strict=True)
    found = list(pools)
    return [LayerCache(place, found[place.pool][0], geometry, found[place.pool][1]) for place in places]


def _seam(original: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def scaled_dot_product_attention(
        queries: mx.array, keys: mx.array, values: mx.array, cache: Any, scale: float, mask: Any, sinks: Any = None
    ) -> mx.array:
        if isinstance(cache, LayerCache):
            if not (mask is None or isinstance(mask, Window)):
                raise NotImplementedError("its attention mask has no block-table form here")
            return cache.attend(queries, scale, mask, sinks)
        if isinstance(mask, Window):
            raise NotImplementedError(SHARED)
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
