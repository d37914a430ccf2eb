"""The block pool on the device: what cleaning a block changes, and that growing changes nothing."""

from __future__ import annotations

import math

import mlx.core as mx

from app.engine.storage import LayerShape, PagedStorage


def test_cleaning_puts_zeros_for_what_is_no_number_in_these_blocks_only() -> None:
    storage = PagedStorage([LayerShape(2, 3, 3, mx.float32)] * 2, num_blocks=4, block_size=2)
    for layer in storage.pools:
        layer.keys = mx.ones_like(layer.keys)
        layer.keys[5] = math.nan  # vectors 4 to 7 are block 1
        layer.keys[13] = math.nan  # block 3
        layer.values[6] = math.inf
    storage.clean([1, 2])
    for layer in storage.pools:
        assert layer.keys[5].tolist() == [0.0] * 3
        assert layer.keys[4].tolist() == [1.0] * 3
        assert layer.values[6].tolist() == [0.0] * 3
        assert all(math.isnan(number) for number in layer.keys[13].tolist())


def test_a_pool_that_grows_keeps_what_it_holds() -> None:
    storage = PagedStorage([LayerShape(2, 3, 5, mx.float32)], num_blocks=2, block_size=4)
    (layer,) = storage.pools
    layer.write(mx.array([[0, 9]]), mx.full((1, 2, 3), 7.0), mx.full((1, 2, 5), 8.0))
    before = [array.tolist() for array in storage.arrays()]
    layer.extend(5)
    assert [array.shape for array in storage.arrays()] == [(40, 3), (40, 5)]
    assert [array[:16].tolist() for array in storage.arrays()] == before
    assert not any(array[16:].any().item() for array in storage.arrays())
