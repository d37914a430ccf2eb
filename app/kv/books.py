"""The books of the block tables at one moment: taken in no time, and enough to set up tables that go on alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from app.kv.block_pool import BlockPool
from app.kv.block_table import BlockTables, _Table
from app.kv.layout import GONE, Layout
from app.kv.prefix_cache import Node, PrefixCache

NO_NODE = -1
LOST_NODE = -2  # the key belonged to a block that was evicted since


class Keyed(NamedTuple):
    """Keyed blocks of the same tokens; ``parent`` is the place of their parent among all of these, or ``NO_NODE``."""

    blocks: tuple[int, ...]
    parent: int
    salt: str
    tokens: tuple[int, ...]


class Held(NamedTuple):
    """One block table; ``node`` is the place of its last key among the keyed ones, ``NO_NODE`` or ``LOST_NODE``."""

    request_id: int
    salt: str
    publishes: bool
    blocks: tuple[int, ...]
    num_published: int
    num_gone: int
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
    windows: tuple[int | None, ...] = (None,)


def capture(tables: BlockTables) -> Books:
    """Write the books down. Tokens are not copied: keys are immutable."""
    cache, pool = tables.prefix_cache, tables.pool
    keyed: list[Keyed] = []
    places: dict[int, int] = {}
    waiting = [(NO_NODE, root) for root in cache._roots.values()]
    for parent, node in waiting:
        for child in node.children.values():
            places[id(child)] = len(keyed)
            waiting.append((len(keyed), child))
            keyed.append(Keyed(tuple(child.blocks), parent, child.salt, child.tokens))
    held = [
        Held(
            request_id,
            table.salt,
            table.publishes,
            tuple(table.blocks),
            table.num_published,
            table.num_gone,
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
        tables.layout.windows,
    )


def restore(books: Books) -> BlockTables:
    """Tables with the same blocks in the same order everywhere. Counters start at zero.

    Raises:
        Inconsistent: the books do not add up.
    """
    pool = BlockPool(books.num_blocks)
    layout = Layout(books.windows)
    cache = PrefixCache(pool, books.block_size, books.prefix_cache, books.min_prefix, books.ttl_s, layout=layout)
    nodes: list[Node] = []
    for keyed, parent, salt, tokens in books.keyed:
        nodes.append(cache.insert(salt, None if parent == NO_NODE else nodes[parent], tokens, keyed))
    cache.inserts = 0
    tables = BlockTables(pool, cache, books.block_size)
    for request_id, salt, publishes, blocks, num_published, num_gone, place in books.held:
        node = None if place == NO_NODE else Node(salt) if place == LOST_NODE else nodes[place]
        tables._tables[request_id] = _Table(salt, publishes, list(blocks), num_published, node, num_gone)
        for block in blocks:
            if block != GONE:
                pool._refs[block] += 1
    pool._blank = dict.fromkeys(books.blank)
    pool._cached.clear()
    pool._cached.update(books.cached)
    tables.check()
    return tables
