"""Which blocks each query looks at, as arrays that all layers share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from app.scheduler.plan import Row


@dataclass(frozen=True, slots=True)
class TileIndex:
    """What ``gather_mm`` multiplies: M products a pair, each of ``height`` queries with one head of one block.
    ``parts`` are the pairs by where their blocks lie, one after the other."""

    height: int
    parts: tuple[TilePart, ...]
    bias: mx.array  # [P, M, height, block_size], added to the scores: what is not to be seen is lost
    base: mx.array  # 2 in the shape of the scores, which are powers of it
    least: mx.array  # [N, M, height, 1], the least that the maximum of a query's scores can be


@dataclass(frozen=True, slots=True)
class TilePart:
    """Some pairs, all with blocks of ``place``: 0 is the pool, 1 are the tails."""

    place: int
    queries: mx.array  # [P, M] tile * M + product
    blocks: mx.array  # [P, M] block * num_heads + head
    pairs: mx.array  # [P, M] counts up: one matrix of weights a pair and product


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
        self._hidden = np.where(hidden, -np.inf, 0.0).astype(np.float32)  # [P, width, block_size]
        segments = np.stack([ends - counts, ends], axis=1) + (np.arange(width) * ends[-1])[:, None, None]
        self._segments = mx.array(segments.reshape(-1, 2).astype(np.uint32))
        self._ones = mx.ones((1, width * int(ends[-1])))
        self._index: dict[tuple[int, int], TileIndex] = {}

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
            num_products = num_heads * group if self._apart else num_heads
            height = self.width * num_heads * group // num_products
            products = np.arange(num_products)
            heads = products * num_heads // num_products
            queries = (self._pair_tiles[:, None] * num_products + products).astype(np.uint32)
            blocks = (self._pair_blocks[:, None] * num_heads + heads).astype(np.uint32)
            pairs = np.arange(queries.size, dtype=np.uint32).reshape(queries.shape)
            spans = (slice(0, self._num_pooled), slice(self._num_pooled, len(queries)))
            hidden = mx.array(np.repeat(self._hidden, height // self.width, axis=1)[:, None])
            shape = (len(queries), num_products, *hidden.shape[2:])
            self._index[num_heads, group] = TileIndex(
                height,
                tuple(
                    TilePart(place, mx.array(queries[span]), mx.array(blocks[span]), mx.array(pairs[span]))
                    for place, span in enumerate(spans)
                    if span.start < span.stop
                ),
                mx.broadcast_to(hidden, shape),
                mx.broadcast_to(mx.array(2.0), shape),
                mx.full((self.num_tiles, num_products, height, 1), -mx.inf),
            )
        return self._index[num_heads, group]

    def gather(self, queries: mx.array, num_heads: int, height: int) -> mx.array:
        """The step's ``queries [T, query_heads, 1, dim]`` as ``[N, M, height, dim]``; see ``TileIndex``."""
        own = queries[self._tokens]
        if self.width > 1:
            own = own.reshape(self.num_tiles, self.width, num_heads, -1, queries.shape[-1]).swapaxes(1, 2)
        return own.reshape(self.num_tiles, -1, height, queries.shape[-1])

    def sinks(self, sinks: mx.array, index: TileIndex) -> mx.array:
        """What is kept of each query head, ``[query_heads]``, as ``[M, height, 1]``."""
        by_product = sinks.reshape(index.least.shape[1], 1, -1, 1)
        shape = (len(by_product), self.width, by_product.shape[2], 1)
        return mx.broadcast_to(by_product, shape).reshape(-1, index.height, 1)

    def sum_pairs(self, parts: mx.array) -> mx.array:
        """Add up what the pairs of each query hold: ``[P, M, height, dim]`` to what ``by_query`` gives.

        One product with ones for each query: its shape depends on how many blocks the query sees, on nothing else.
        """
        if self._row_order is not None:
            parts = parts[self._row_order]
        parts = self.by_query(parts)
        flat = parts.reshape(len(parts), -1).astype(mx.float32)
        return mx.segmented_mm(self._ones, flat, self._segments).reshape(-1, *parts.shape[1:])

    def by_query(self, values: mx.array) -> mx.array:
        """What the queries of tiles, or of pairs, have, ``[n, M, height, dim]``, as ``[width * n, M, height / width,
        dim]``: first those of each tile's first place."""
        if self.width == 1:
            return values
        num_tiles, num_products, _, dim = values.shape
        apart = values.reshape(num_tiles, num_products, self.width, -1, dim).transpose(2, 0, 1, 3, 4)
        return apart.reshape(-1, num_products, *apart.shape[3:])

    def scatter(self, results: mx.array) -> mx.array:
        """Results ``[width * N, ...]`` in the order of the rows' tokens."""
        return results if self._places is None else results[self._places]
