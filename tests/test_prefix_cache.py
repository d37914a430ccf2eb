"""PrefixCache: the longest exact prefix, never a wrong one, and no key outlives what it stands on."""

from __future__ import annotations

import pytest

from app.kv.block_pool import BlockPool
from app.kv.block_table import BlockTables
from app.kv.layout import Layout
from app.kv.prefix_cache import PrefixCache


@pytest.fixture
def pool() -> BlockPool:
    return BlockPool(16)


def filled(pool: BlockPool, texts: list[list[int]], size: int = 4, salt: str = "", **options) -> PrefixCache:
    """A cache of the given texts, each published from its start, the partly filled end included; blocks stay held."""
    cache = PrefixCache(pool, size, **options)
    for text in texts:
        node = None
        for start in range(0, len(text), size):
            node = cache.insert(salt, node, tuple(text[start : start + size]), [pool.take()])
    return cache


@pytest.mark.parametrize(
    ("tokens", "blocks", "source", "num_tokens"),
    [
        ([9, 9, 9], [], None, 0),
        ([1, 2, 3, 4, 9], [0], None, 4),
        ([1, 2, 3, 4, 5, 6, 7, 8, 9], [0, 1], None, 8),
        ([1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12], [0, 1], 2, 10),
        ([1, 2, 3, 4, 5, 6, 7, 8, 10, 11], [0, 1], 2, 9),
        ([1, 2, 3, 4, 5, 6, 7, 8], [0], 1, 7),
        ([1, 2, 3, 4, 5, 6, 9, 9, 9], [0], 1, 6),
        ([1, 2, 3, 4], [], 0, 3),
        ([1, 2], [], 0, 1),
        ([1], [], None, 0),
        ([2, 3, 4, 5], [], None, 0),
    ],
)
def test_the_longest_prefix_short_of_the_last_token_is_found(pool, tokens, blocks, source, num_tokens):
    cache = filled(pool, [[1, 2, 3, 4, 5, 6, 7, 8, 10, 11]])
    match = cache.match(tokens, "")
    sources = () if source is None else (source,)
    assert (list(match.blocks), match.sources, match.num_tokens) == (blocks, sources, num_tokens)


def test_the_closest_child_is_the_source(pool):
    cache = filled(pool, [[1, 2, 9, 9], [1, 2, 3, 9], [1, 8, 8, 8]])
    match = cache.match([1, 2, 3, 4, 5], "")
    assert (match.sources, match.num_tokens) == ((1,), 3)


def test_salts_do_not_see_each_other(pool):
    cache = filled(pool, [[1, 2, 3, 4]], salt="one")
    assert cache.match([1, 2, 3, 4, 5], "two").num_tokens == 0
    assert cache.match([1, 2, 3, 4, 5], "one").num_tokens == 4


def test_equal_tokens_after_different_ones_are_another_prefix(pool):
    cache = filled(pool, [[1, 1, 1, 1, 5, 5, 5, 5], [2, 2, 2, 2]])
    assert cache.match([2, 2, 2, 2, 5, 5, 5, 5, 0], "").blocks == (2,)


def test_the_first_publisher_wins(pool):
    cache = filled(pool, [[1, 2, 3, 4], [1, 2, 3, 4, 5, 6, 7, 8]])
    assert cache.match([1, 2, 3, 4, 5, 6, 7, 8, 9], "").blocks == (0, 2)
    assert cache.num_entries == cache.inserts == 2
    cache.check()


def test_a_taken_block_takes_its_subtree_with_it(pool):
    cache = filled(pool, [[1, 2, 3, 4, 5, 6, 7, 8, 9], [1, 2, 3, 4, 6], [7, 7, 7, 7]])
    cache.evict(0)
    cache.check()
    assert cache.match([1, 2, 3, 4, 5, 6, 7, 8, 9, 9], "").num_tokens == 0
    assert cache.match([7, 7, 7, 7, 7], "").num_tokens == 4
    assert cache.num_entries == 1
    assert cache.evictions_lru == cache.inserts - 1
    cache.evict(0)
    assert cache.evictions_lru == cache.inserts - 1


def test_a_node_knows_that_it_lost_its_key(pool):
    cache = PrefixCache(pool, 1)
    parent = cache.insert("", None, (1,), [pool.take()])
    child = cache.insert("", parent, (2,), [pool.take()])
    assert cache.knows(child)
    cache.evict(0)
    assert not cache.knows(child)
    again = cache.insert("", None, (1,), [0])
    assert cache.knows(again)
    assert not cache.knows(parent)


def test_a_salt_without_entries_leaves_nothing_behind(pool):
    cache = filled(pool, [[1, 2, 3, 4, 5]], salt="one")
    assert cache._roots
    assert cache.clear() == 2
    assert not cache._roots
    assert not cache.keyed_blocks
    assert cache.evictions_lru == 0
    cache.check()


def test_a_very_long_prefix_is_dropped_without_recursion():
    pool = BlockPool(50_000)
    cache = filled(pool, [[1] * 50_000], size=1)
    assert len(cache.match([1] * 50_001, "").nodes) == 50_000
    cache.evict(0)
    assert cache.num_entries == 0


def test_hits_and_misses_are_counted_by_reason(pool):
    cache = filled(pool, [[1, 2, 3, 4]], min_tokens=4)
    for tokens, allowed in (([1, 2, 3, 4, 5], True), ([1, 2, 3, 9, 9], True), ([9, 9], True), ([1, 2, 3, 4, 5], False)):
        cache.record(cache.match(tokens, "", allowed))
    assert (cache.hits, cache.lookups, cache.tokens_reused) == (1, 3, 4)
    assert cache.misses == {"short": 1, "cold": 1, "off": 1}


def test_a_match_under_the_minimum_adopts_nothing(pool):
    cache = filled(pool, [[1, 2, 3, 4]], min_tokens=4)
    match = cache.match([1, 2, 3, 9], "")
    assert (match.blocks, match.sources, match.num_tokens) == ((), (), 0)


def test_a_cache_that_is_off_finds_nothing(pool):
    cache = filled(pool, [[1, 2, 3, 4]], enabled=False)
    assert cache.match([1, 2, 3, 4, 5], "").miss == "off"


@pytest.mark.parametrize("windows", [(None,), (None, 5), (5,), (None, 9)])
def test_what_follows_on_a_failed_request_loses_its_keys(windows: tuple[int | None, ...]) -> None:
    """Also where layers with a window could do without its blocks: what they hold may come of them."""
    pool = BlockPool(40)
    cache = PrefixCache(pool, 4, layout=Layout(windows))
    tables = BlockTables(pool, cache, 4)
    failed, other = [*range(4), 99], [*range(16), 54]
    tables.admit(1, failed, "", use_cache=True)
    tables.publish(1, failed, 4)
    tables.admit(2, other, "", use_cache=True)
    tables.publish(2, other, 16)
    assert cache.match(other, "").num_tokens == 16
    tables.withdraw(1)
    tables.check()
    assert cache.match(other, "").num_tokens == 0
    assert cache.evictions_lru == cache.inserts


@pytest.mark.parametrize("windows", [(None, 5), (5,), (None, 5, 5)])
def test_no_more_keys_are_lost_than_there_were(windows: tuple[int | None, ...]) -> None:
    pool = BlockPool(12 * len(windows))
    cache = PrefixCache(pool, 4, layout=Layout(windows))
    tables = BlockTables(pool, cache, 4)
    for number in range(30):
        tokens = [number, *range(40)]
        tables.admit(number, tokens, "", use_cache=True)
        tables.publish(number, tokens, 40)
        tables.release(number)
        tables.check()
    left = cache.inserts - cache.evictions_lru
    assert left > 0
    assert cache.clear() == left
