"""The books of the block tables at one moment: taken in no time, and enough to set up tables that go on alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from app.kv.block_pool import BlockPool
from app.kv.block_table import BlockTables, _Table
from app.kv.prefix_cache import Node, PrefixCache

NO_NODE = -1
LOST_NODE = -2  # the key belonged to a block that was evicted since


class Keyed(NamedTuple):
    """One keyed block; ``parent`` is the place of its parent among the keyed blocks, or ``NO_NODE``."""

    block: int
    parent: int
    salt: str
    tokens: tuple[int, ...]


class Held(NamedTuple):
    """One block table; ``node`` is the place of its last key among the keyed blocks, ``NO_NODE`` or ``LOST_NODE``."""

    request_id: int
    salt: str
    publishes: bool
    blocks: tuple[int, ...]
    num_published: int
    node: int


@dataclass(frozen=True, slots=True)
class Books:
    """``keyed`` has parents before children and siblings in the order in which they were keyed; ``blank`` and
    ``cached`` are the free blocks in the order of the pool, the latter with since when nobody uses them."""

    num_blocks: int
    block_size: int
    prefix_cache: bool
    min_prefix: int
    ttl_s: float | None
    keyed: tuple[Keyed, ...]
    held: tuple[Held, ...]
    blank: tuple[int, ...]
    cached: tuple[tuple[int, float], ...]


def capture(tables: BlockTables) -> Books:
    """Write the books down. Tokens are not copied: keys are immutable."""
    cache, pool = tables.prefix_cache, tables.pool
    keyed: list[Keyed] = []
    places: dict[int, int] = {}
    waiting = [(NO_NODE, root) for root in cache._roots.values()]
    for parent, node in waiting:
        for child in node.children.values():
            assert child.block is not None
            places[id(child)] = len(keyed)
            waiting.append((len(keyed), child))
            keyed.append(Keyed(child.block, parent, child.salt, child.tokens))
    held = [
        Held(
            request_id,
            table.salt,
            table.publishes,
            tuple(table.blocks),
            table.num_published,
            NO_NODE if table.node is None else places.get(id(table.node), LOST_NODE),
        )
        for request_id, table in tables._tables.items()
    ]
    return Books(
        pool.num_blocks,
        tables.block_size,
        cache.keys_blocks,
        cache._min_tokens,
        cache._ttl_s,
        tuple(keyed),
        tuple(held),
        tuple(pool._blank),
        tuple(pool._cached.items()),
    )


def restore(books: Books) -> BlockTables:
    """Tables with the same blocks in the same order everywhere. Counters start at zero.

    Raises:
        Inconsistent: the books do not add up.
    """
    pool = BlockPool(books.num_blocks)
    cache = PrefixCache(pool, books.block_size, books.prefix_cache, books.min_prefix, books.ttl_s)
    nodes: list[Node] = []
    for block, parent, salt, tokens in books.keyed:
        nodes.append(cache.insert(salt, None if parent == NO_NODE else nodes[parent], tokens, block))
    cache.inserts = 0
    tables = BlockTables(pool, cache, books.block_size)
    for request_id, salt, publishes, blocks, num_published, place in books.held:
        node = None if place == NO_NODE else Node(salt) if place == LOST_NODE else nodes[place]
        tables._tables[request_id] = _Table(salt, publishes, list(blocks), num_published, node)
        for block in blocks:
            pool._refs[block] += 1
    pool._blank = dict.fromkeys(books.blank)
    pool._cached.clear()
    pool._cached.update(books.cached)
    tables.check()
    return tables
