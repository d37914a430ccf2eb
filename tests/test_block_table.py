"""BlockTables: what a request adopts, takes, leaves behind and gives back."""

from __future__ import annotations

import pytest

from app.kv.block_pool import BlockPool, Inconsistent, OutOfBlocks
from app.kv.block_table import Admission, BlockTables, Quote
from app.kv.prefix_cache import PrefixCache

TEXT = list(range(100, 200))


def build(num_blocks: int = 8, size: int = 4, **options) -> BlockTables:
    pool = BlockPool(num_blocks)
    return BlockTables(pool, PrefixCache(pool, size, **options), size)


def serve(tables: BlockTables, request_id: int, tokens: list[int], salt: str = "", use_cache: bool = True) -> Admission:
    """A request that is admitted, computed whole and released."""
    admission = tables.admit(request_id, tokens, salt, use_cache)
    tables.publish(request_id, tokens, len(tokens))
    tables.publish_tail(request_id, tokens, len(tokens))
    tables.release(request_id)
    tables.check()
    return admission


def test_a_prompt_is_reserved_whole():
    tables = build()
    assert tables.quote(TEXT[:9], "", True) == Quote(3, 0)
    assert tables.admit(1, TEXT[:9], "", True) == Admission(0)
    assert tables.blocks(1) == [0, 1, 2]
    assert tables.num_free == 5


def test_a_running_request_lends_its_full_blocks():
    tables = build()
    tables.admit(1, TEXT[:9], "", True)
    tables.publish(1, TEXT[:9], 9)
    assert tables.quote(TEXT[:10], "", True) == Quote(1, 8)
    assert tables.admit(2, TEXT[:10], "", True) == Admission(8)
    assert list(tables.blocks(2))[:2] == list(tables.blocks(1))[:2]
    assert tables.num_free == 4
    tables.check()


def test_nothing_is_lent_before_it_is_computed():
    tables = build()
    tables.admit(1, TEXT[:9], "", True)
    tables.publish(1, TEXT[:9], 7)
    assert tables.quote(TEXT[:9], "", True) == Quote(2, 4)


def test_a_partly_filled_last_block_is_copied_not_shared():
    tables = build()
    serve(tables, 1, TEXT[:7])
    admission = tables.admit(2, TEXT[:12], "", True)
    assert admission == Admission(7, ((1, 2),))
    assert tables.blocks(2) == [0, 2, 3]
    tables.check()


def test_an_adopted_free_block_is_charged():
    tables = build(num_blocks=3)
    serve(tables, 1, TEXT[:8])
    assert tables.num_free == 3
    assert tables.quote(TEXT[:12], "", True) == Quote(3, 8)
    with pytest.raises(OutOfBlocks):
        tables.admit(2, TEXT[:13], "", True)
    assert tables.num_free == 3
    tables.admit(2, TEXT[:12], "", True)
    assert tables.num_free == 0
    tables.check()


def test_a_copy_source_may_be_taken_by_the_same_admission():
    tables = build(num_blocks=2)
    serve(tables, 1, TEXT[:7])
    admission = tables.admit(2, [*TEXT[:6], 0, 0], "", True)
    assert admission.num_computed == 6
    assert admission.copies == ((1, 1),)
    tables.check()
    tables.publish(2, [*TEXT[:6], 0, 0], 8)
    assert tables.quote([*TEXT[:6], 0, 0, 0], "", True).num_cached == 8


def test_a_source_is_spared_while_other_blocks_are_free():
    tables = build(num_blocks=4)
    serve(tables, 1, TEXT[:3])
    serve(tables, 2, [7] * 4)
    tables.admit(3, [*TEXT[:2], *[0] * 9], "", True)
    assert tables.quote([*TEXT[:3], 1], "", True).num_cached == 3


def test_growth_takes_a_block_only_when_one_is_due_and_nothing_when_too_few_are_left():
    tables = build(num_blocks=3)
    tables.admit(1, TEXT[:4], "", True)
    tables.grow(1, 4)
    assert tables.num_free == 2
    tables.grow(1, 5)
    assert tables.num_free == 1
    with pytest.raises(OutOfBlocks):
        tables.grow(1, 17)
    assert tables.num_free == 1
    tables.check()


def test_the_end_of_a_prefix_is_evicted_before_its_start():
    tables = build(num_blocks=4)
    serve(tables, 1, TEXT[:16])
    tables.admit(2, [0] * 8, "", True)
    assert tables.quote(TEXT[:16], "", True).num_cached == 8


def build_evicted_key() -> BlockTables:
    """Request 2 computed what request 1 had keyed already, and the block with that key is gone since."""
    tables = build(num_blocks=6)
    tables.admit(1, TEXT[:6], "", True)
    tables.admit(2, TEXT[:6], "", True)
    tables.publish(1, TEXT[:6], 6)
    tables.publish(2, TEXT[:6], 6)
    tables.release(1)
    assert tables.quote(TEXT[:6], "", True).num_cached == 4
    tables.admit(3, [0] * 16, "", True)
    assert tables.prefix_cache.num_entries == 0
    return tables


def test_a_request_goes_on_publishing_after_the_key_it_built_on_was_evicted():
    tables = build_evicted_key()
    tables.publish(2, TEXT[:8], 8)
    tables.check()
    assert tables.quote(TEXT[:9], "", True).num_cached == 8


def test_a_tail_is_published_under_a_key_that_had_to_be_renewed():
    tables = build_evicted_key()
    tables.publish_tail(2, TEXT[:6], 6)
    tables.release(2)
    tables.check()
    assert tables.quote(TEXT[:9], "", True).num_cached == 6


def test_without_the_cache_nothing_is_adopted_or_left_behind():
    tables = build()
    serve(tables, 1, TEXT[:8], use_cache=False)
    assert tables.prefix_cache.num_entries == 0
    serve(tables, 2, TEXT[:8])
    assert serve(tables, 3, TEXT[:8], use_cache=False) == Admission(0)
    off = build(enabled=False)
    serve(off, 1, TEXT[:8])
    assert off.pool.num_cached == 0


def test_salts_keep_requests_apart():
    tables = build()
    serve(tables, 1, TEXT[:8], salt="one")
    assert serve(tables, 2, TEXT[:8], salt="two").num_computed == 0
    assert serve(tables, 3, TEXT[:8], salt="one").num_computed == 7


def test_blocks_held_by_several_are_freed_only_by_all_of_them():
    tables = build()
    tables.admit(1, TEXT[:9], "", True)
    tables.publish(1, TEXT[:9], 9)
    tables.admit(2, TEXT[:9], "", True)
    assert tables.num_freed_by([1]) == 1
    assert tables.num_freed_by([1, 2]) == 4


def test_a_request_has_one_table():
    tables = build()
    tables.admit(1, TEXT[:4], "", True)
    with pytest.raises(ValueError, match="request 1"):
        tables.admit(1, TEXT[:4], "", True)


def test_check_notices_a_block_that_leaked():
    tables = build()
    tables.admit(1, TEXT[:4], "", True)
    tables.pool.take()
    with pytest.raises(Inconsistent):
        tables.check()


def test_trimming_gives_back_what_is_not_needed():
    tables = build()
    tables.admit(1, TEXT[:6], "", True)
    tables.grow(1, 15)
    held, num_free = list(tables.blocks(1)), tables.num_free
    tables.trim(1, 9)
    assert tables.blocks(1) == held[: tables.blocks_for(9)]
    assert tables.num_free == num_free + tables.blocks_for(15) - tables.blocks_for(9)
    tables.trim(1, 9)
    assert tables.blocks(1) == held[: tables.blocks_for(9)]
    tables.check()
