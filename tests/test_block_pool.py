"""BlockPool: the free list is the eviction order, and the books notice every fault."""

from __future__ import annotations

import pytest

from app.kv.block_pool import BlockPool, Inconsistent, OutOfBlocks


def test_blocks_are_taken_once_and_run_out():
    pool = BlockPool(3)
    assert [pool.take() for _ in range(3)] == [0, 1, 2]
    assert (pool.num_free, pool.num_live) == (0, 3)
    with pytest.raises(OutOfBlocks):
        pool.take()


def test_a_block_is_free_when_its_last_holder_released_it():
    pool = BlockPool(1)
    block = pool.take()
    pool.share(block)
    pool.release(block)
    assert pool.refs(block) == 1
    assert pool.num_free == 0
    pool.release(block)
    assert pool.num_free == 1
    with pytest.raises(Inconsistent):
        pool.release(block)


def test_kept_blocks_go_last_and_the_longest_unused_of_them_first():
    pool = BlockPool(4)
    blocks = [pool.take() for _ in range(4)]
    pool.keep(2)
    pool.keep(0)
    for block in (2, 1, 0, 3):
        pool.release(block)
    assert pool.num_cached == 2
    assert sorted([pool.take(), pool.take()]) == [1, 3]
    assert [pool.take(), pool.take()] == [2, 0]
    assert sorted(blocks) == [0, 1, 2, 3]


def test_a_kept_block_is_adopted_off_the_free_list_and_comes_back_warm():
    pool = BlockPool(2)
    for block in (pool.take(), pool.take()):
        pool.keep(block)
        pool.release(block)
    pool.share(0)
    assert (pool.num_free, pool.num_cached, pool.refs(0)) == (1, 1, 1)
    pool.release(0)
    assert [pool.take(), pool.take()] == [1, 0]


def test_touch_warms_a_free_kept_block_and_nothing_else():
    pool = BlockPool(3)
    for block in (pool.take(), pool.take()):
        pool.keep(block)
        pool.release(block)
    pool.touch(0)
    pool.touch(2)
    assert [pool.take() for _ in range(3)] == [2, 1, 0]


def test_a_forgotten_block_goes_first_again_and_cannot_be_shared():
    pool = BlockPool(2)
    for block in (pool.take(), pool.take()):
        pool.keep(block)
        pool.release(block)
    pool.forget(1)
    with pytest.raises(Inconsistent):
        pool.share(1)
    assert pool.num_cached == 1
    assert pool.take() == 1


def test_a_taken_block_is_no_longer_kept():
    pool = BlockPool(1)
    pool.keep(pool.take())
    pool.release(0)
    pool.take()
    pool.release(0)
    assert pool.num_cached == 0


def test_a_free_block_can_be_kept_later():
    pool = BlockPool(2)
    pool.keep(0)
    assert pool.num_cached == 1
    assert [pool.take(), pool.take()] == [1, 0]


@pytest.mark.parametrize(
    ("tables", "keyed"),
    [([[0]], [0]), ([[0, 1], [1]], [0]), ([], [0]), ([[0], [1]], []), ([[0], [1]], [0, 1])],
)
def test_check_notices_tables_and_keys_that_differ_from_the_books(tables, keyed):
    pool = BlockPool(3)
    pool.take()
    pool.take()
    pool.keep(0)
    pool.check([[0], [1]], [0])
    with pytest.raises(Inconsistent):
        pool.check(tables, keyed)


def test_what_is_unused_is_told_by_the_clock_of_the_last_use():
    pool = BlockPool(3)
    blocks = [pool.take() for _ in range(3)]
    for now_s, block in enumerate(blocks):
        pool.keep(block)
        pool.now_s = float(now_s)
        pool.release(block)
    assert pool.unused_since(0.0) == []
    assert pool.unused_since(1.5) == blocks[:2]
    pool.now_s = 9.0
    pool.touch(blocks[0])
    assert pool.unused_since(5.0) == blocks[1:]
    pool.share(blocks[1])
    assert pool.unused_since(99.0) == [blocks[2], blocks[0]]


def test_a_pool_grows_by_blank_blocks():
    pool = BlockPool(1)
    first = pool.take()
    pool.extend(3)
    pool.extend(2)
    assert (pool.num_blocks, pool.num_free) == (3, 2)
    assert {pool.take(), pool.take()} == {1, 2}
    pool.check([[first], [1], [2]], [])
