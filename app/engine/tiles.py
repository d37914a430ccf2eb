"""Which blocks each query looks at, as arrays that all layers share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from app.scheduler.plan import Row


@dataclass(frozen=True, slots=True)
class TileIndex:
    """What ``gather_mm`` multiplies, for layers with ``num_heads`` KV heads: M products a pair, each of ``height``
    queries with one head of one block. ``parts`` are the pairs by where their blocks lie, one after the other."""

    height: int
    parts: tuple[TilePart, ...]


@dataclass(frozen=True, slots=True)
class TilePart:
    """Some pairs, all with blocks of ``place``: 0 is the pool, 1 are the tails."""

    place: int
    queries: mx.array  # [P, M] tile * M + product
    blocks: mx.array  # [P, M] block * num_heads + head
    pairs: mx.array  # [P, M] counts up: one matrix of probabilities a pair and product


class Tiles:
    """The queries of some rows, ``width`` to a tile: neighbouring positions of one request that see the same blocks.

    A tile begins at a multiple of ``width``, which divides the block size, so a query's place in its tile and the
    blocks of the tile follow from its position alone. A place whose token is not in this step repeats another query,
    whose result is dropped. A pair is one (tile, block) the tile looks at; there are P of them over N tiles.
    """

    def __init__(
        self,
        rows: Sequence[Row],
        first: int,
        width: int,
        block_size: int,
        apart: bool = False,
        num_pooled: Sequence[int] | None = None,
        window: int | None = None,
    ) -> None:
        """``first`` is where the rows' tokens begin among those of the step; they lie one after the other. ``apart``:
        each query is multiplied for itself, not together with those that share its KV head; for a width of one.
        ``num_pooled``: how many of each row's blocks lie in the pool, the others in tails; for rows of one token.
        ``window``: a query sees the last so many tokens up to its own; None: all. Blocks behind it make no pair."""
        self.width = width
        self._apart = apart
        spans = [range(row.start // width, (row.start + row.num_new - 1) // width + 1) for row in rows]
        numbers = np.concatenate([np.asarray(span) for span in spans])
        behind = np.zeros_like(numbers) if window is None else np.maximum(numbers * width - window + 1, 0) // block_size
        counts = numbers * width // block_size + 1 - behind
        self.num_tiles = len(numbers)
        self._set_places(rows, spans, first)
        owned = [np.asarray(row.blocks) for row, span in zip(rows, spans, strict=True) for _ in span]
        self._pair_tiles = np.repeat(np.arange(self.num_tiles), counts)
        self._pair_blocks = np.concatenate(
            [blocks[begin : begin + count] for blocks, begin, count in zip(owned, behind, counts, strict=True)]
        )
        ends = np.cumsum(counts)
        numbers_in_row = np.arange(ends[-1]) - np.repeat(ends - counts - behind, counts)
        self._num_pooled = int(ends[-1])
        self._row_order: mx.array | None = None
        if num_pooled is not None:
            in_tail = numbers_in_row >= np.repeat(num_pooled, counts)
            order = np.argsort(in_tail, kind="stable")
            self._num_pooled -= int(in_tail.sum())
            self._row_order = mx.array(np.argsort(order))
            self._pair_tiles, self._pair_blocks = self._pair_tiles[order], self._pair_blocks[order]
            numbers_in_row = numbers_in_row[order]
        seen = numbers_in_row[:, None] * block_size + np.arange(block_size)
        positions = (numbers[:, None] * width + np.arange(width))[self._pair_tiles][:, :, None]
        hidden = seen[:, None, :] > positions
        if window is not None:
            hidden |= seen[:, None, :] <= positions - window
        self.pair_tiles = mx.array(self._pair_tiles)
        self._hidden = mx.array(np.where(hidden, -np.inf, 0.0).astype(np.float32))[:, None, :, None, :]
        segments = np.stack([ends - counts, ends], axis=1) + (np.arange(width) * ends[-1])[:, None, None]
        self._segments = mx.array(segments.reshape(-1, 2).astype(np.uint32))
        self._ones = mx.ones((1, width * int(ends[-1])))
        self._index: dict[tuple[int, int], TileIndex] = {}
        self._bias: dict[tuple[int, int], mx.array] = {}
        self._least: dict[tuple[int, int], mx.array] = {}

    def _set_places(self, rows: Sequence[Row], spans: Sequence[range], first: int) -> None:
        if self.width == 1:
            self._tokens: slice | mx.array = slice(first, first + self.num_tiles)
            self._places: mx.array | None = None
            return
        begins = np.cumsum([0] + [len(span) for span in spans])
        positions = np.concatenate([np.arange(row.start, row.start + row.num_new) for row in rows])
        shifts = np.repeat(begins[:-1] - [span.start for span in spans], [row.num_new for row in rows])
        tile, place = positions // self.width + shifts, positions % self.width
        tokens = np.full((self.num_tiles, self.width), first)
        tokens[tile, place] = first + np.arange(len(positions))
        self._tokens, self._places = mx.array(tokens), mx.array(place * self.num_tiles + tile)

    def index(self, num_heads: int, group: int) -> TileIndex:
        """For ``num_heads`` KV heads, each shared by ``group`` query heads."""
        if (num_heads, group) not in self._index:
            products = np.arange(num_heads * group if self._apart else num_heads)
            heads = products * num_heads // len(products)
            queries = (self._pair_tiles[:, None] * len(products) + products).astype(np.uint32)
            blocks = (self._pair_blocks[:, None] * num_heads + heads).astype(np.uint32)
            pairs = np.arange(queries.size, dtype=np.uint32).reshape(queries.shape)
            spans = (slice(0, self._num_pooled), slice(self._num_pooled, len(queries)))
            self._index[num_heads, group] = TileIndex(
                1 if self._apart else self.width * group,
                tuple(
                    TilePart(place, mx.array(queries[span]), mx.array(blocks[span]), mx.array(pairs[span]))
                    for place, span in enumerate(spans)
                    if span.start < span.stop
                ),
            )
        return self._index[num_heads, group]

    def bias(self, num_heads: int, group: int) -> mx.array:
        """What is added to the scores ``[P, num_heads, width, group, block_size]``: what is not to be seen is lost."""
        if (num_heads, group) not in self._bias:
            pairs, _, width, _, size = self._hidden.shape
            self._bias[num_heads, group] = mx.broadcast_to(self._hidden, (pairs, num_heads, width, group, size))
        return self._bias[num_heads, group]

    def least(self, num_heads: int, group: int, sink: mx.array | None) -> mx.array:
        """The least that the maximum of a query's scores can be, ``[N, num_heads, width, group, 1]``: what the ``sink``
        of its head is, if there is one."""
        shape = (self.num_tiles, num_heads, self.width, group, 1)
        if sink is not None:
            return mx.broadcast_to(sink, shape)
        if (num_heads, group) not in self._least:
            self._least[num_heads, group] = mx.full(shape, -mx.inf)
        return self._least[num_heads, group]

    def gather(self, queries: mx.array, num_heads: int, height: int) -> mx.array:
        """The step's ``queries [T, query_heads, 1, dim]`` as ``[N * M, height, dim]``; see ``TileIndex``."""
        own = queries[self._tokens]
        if self.width > 1:
            own = own.reshape(self.num_tiles, self.width, num_heads, -1, queries.shape[-1]).swapaxes(1, 2)
        return own.reshape(-1, height, queries.shape[-1])

    def sum_pairs(self, parts: mx.array, heads: int, group: int) -> mx.array:
        """Add up what the pairs of each query hold: ``[P, heads, width, group, dim]``, or as ``gather_mm`` gives it, to
        ``[width * N, heads, group, dim]``.

        One product with ones for each query: its shape depends on how many blocks the query sees, on nothing else.
        """
        width, dim = self.width, parts.shape[-1]
        if width > 1 or self._row_order is not None:
            parts = parts.reshape(-1, heads, width, group, dim)
        if self._row_order is not None:
            parts = parts[self._row_order]
        if width > 1:
            parts = parts.transpose(2, 0, 1, 3, 4)
        flat = parts.reshape(-1, heads * group * dim).astype(mx.float32)
        return mx.segmented_mm(self._ones, flat, self._segments).reshape(-1, heads, group, dim)

    def by_query(self, values: mx.array) -> mx.array:
        """What each query has, ``[N, heads, width, group, dim]``, in the order of ``sum_pairs``."""
        _, heads, _, group, dim = values.shape
        return values.transpose(2, 0, 1, 3, 4).reshape(-1, heads, group, dim)

    def scatter(self, results: mx.array) -> mx.array:
        """Results ``[width * N, ...]`` in the order of the rows' tokens."""
        return results if self._places is None else results[self._places]
