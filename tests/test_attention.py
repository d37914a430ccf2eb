"""Attention of ragged rows through block tables, against a softmax over each token's own context."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

from app.engine.attention import BEGIN_EVERY, Geometry, LayerCache, Window, layer_caches
from app.engine.groups import one_group
from app.engine.kernels import on_cpu
from app.engine.storage import LayerShape, PagedStorage
from app.request import SamplingParams
from app.scheduler.plan import Row

HEADS, GROUP, KEY_DIM, VALUE_DIM = 2, 3, 8, 5
BLOCK_SIZE = 4
SCALE = 0.4
# One-token rows first: (start, number of new tokens)
SPANS = ((0, 1), (21, 1), (7, 1), (0, 6), (13, 9), (3, 2))


def attended(window: int | None, sinks: mx.array | None, width: int | None, by_mask: bool) -> tuple[mx.array, mx.array]:
    """What a layer gives for the new tokens of these rows, and what it should; the pool is full of their context."""
    rng = np.random.default_rng(7)
    shape = LayerShape(HEADS, KEY_DIM, VALUE_DIM, mx.float32, None if by_mask else window)
    storage = PagedStorage([shape], num_blocks=40, block_size=BLOCK_SIZE)
    (pool,) = storage.pools
    blocks = iter(rng.permutation(40).tolist())
    rows, queries, want = [], [], []
    for i, (start, num_new) in enumerate(SPANS):
        end = start + num_new
        table = [next(blocks) for _ in range(-(-end // BLOCK_SIZE))]
        rows.append(Row(i, [0] * end, start, num_new, table, True, end, SamplingParams()))
        keys, values = rng.normal(size=(HEADS, end, KEY_DIM)), rng.normal(size=(HEADS, end, VALUE_DIM))
        for position in range(end):
            head = np.arange(HEADS)
            at = (table[position // BLOCK_SIZE] * HEADS + head) * BLOCK_SIZE + position % BLOCK_SIZE
            pool.write(
                mx.array(at[None]), *(mx.array(part[None, :, position].astype(np.float32)) for part in (keys, values))
            )
        for position in range(start, end):
            query = rng.normal(size=(HEADS * GROUP, KEY_DIM))
            queries.append(query)
            seen = slice(0 if window is None else max(position - window + 1, 0), position + 1)
            want.append(
                [alone(query[h], keys[h // GROUP, seen], values[h // GROUP, seen], h, sinks) for h in range(len(query))]
            )
    (cache,) = layer_caches(
        one_group([pool.shape for pool in storage.pools]).places, storage, Geometry(rows, BLOCK_SIZE, width=width)
    )
    got = cache.attend(mx.array(np.array(queries, np.float32))[:, :, None], SCALE, mask(cache, window, by_mask), sinks)
    return got[:, :, 0], mx.array(np.array(want, np.float32))


def mask(cache: LayerCache, window: int | None, by_mask: bool) -> Window | None:
    """What a model asks for: with its window where it knows it, and else as for any layer."""
    return cache.make_mask(1, return_array=True, window_size=window) if by_mask else cache.make_mask(1)


def alone(query: np.ndarray, keys: np.ndarray, values: np.ndarray, head: int, sinks: mx.array | None) -> np.ndarray:
    weights = np.exp(keys @ query * SCALE)
    return weights @ values / (weights.sum() + (0.0 if sinks is None else math.exp(sinks[head].item())))


@pytest.mark.parametrize("by_mask", [False, True], ids=["a rotating cache", "a mask"])
@pytest.mark.parametrize("width", [None, 1, 2, 4])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 3, 4, 9, 22, 100])
def test_each_token_sees_its_window(window: int | None, with_sinks: bool, width: int | None, by_mask: bool) -> None:
    sinks = mx.array(np.linspace(-2.0, 3.0, HEADS * GROUP).astype(np.float32)) if with_sinks else None
    got, want = attended(window, sinks, width, by_mask)
    assert got.shape == want.shape
    assert mx.abs(got - want).max().item() < 1e-5


def test_a_window_that_a_model_asks_for_goes_before_its_caches() -> None:
    storage = PagedStorage([LayerShape(1, 1, 1, mx.float32, 3)], num_blocks=3, block_size=4)
    (pool,) = storage.pools
    pool.values[:] = mx.arange(12.0)[:, None]
    row = Row(0, [0] * 9, 8, 1, [0, 1, 2], True, 9, SamplingParams())
    (cache,) = layer_caches(one_group([pool.shape for pool in storage.pools]).places, storage, Geometry([row], 4))
    means = [cache.attend(mx.zeros((1, 1, 1, 1)), 1.0, cache.make_mask(1, False, size)).item() for size in (None, 2, 9)]
    assert means == pytest.approx([7.0, 7.5, 4.0])


def test_blocks_behind_a_window_are_not_looked_at() -> None:
    row = Row(0, [0] * 40, 39, 1, list(range(10)), True, 40, SamplingParams())
    (tiles,) = Geometry([row], 4).sight(5).tiles
    assert tiles.pair_tiles.size == 2
    (chunk,) = Geometry([row._replace(start=30, num_new=10)], 4).sight(5).chunks
    assert (chunk.blocks.tolist(), chunk.num_context) == ([6, 7, 8, 9], 16)


@pytest.mark.skipif(not on_cpu(), reason="a GPU is given whole steps ahead")
def test_a_step_begins_before_its_graph_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[mx.array] = []
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: begun.extend(arrays))
    shape = LayerShape(1, 1, 1, mx.float32)
    storage = PagedStorage([shape] * (2 * BEGIN_EVERY + 1), num_blocks=1, block_size=4)
    row = Row(0, [0], 0, 1, [0], True, 1, SamplingParams())
    for cache in layer_caches(one_group([pool.shape for pool in storage.pools]).places, storage, Geometry([row], 4)):
        cache.attend(mx.zeros((1, 1, 1, 1)), 1.0)
    assert len(begun) == 2
