"""Which blocks belong to which request: admission, growth, publication and release of block tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from app.errors import InvalidRequest
from app.kv.block_pool import BlockPool, OutOfBlocks
from app.kv.layout import GONE, Layout
from app.kv.prefix_cache import Match, Node, PrefixCache


class Quote(NamedTuple):
    """What an admission would cost: ``num_blocks`` off the free list, with ``num_cached`` tokens adopted."""

    num_blocks: int
    num_cached: int


class Admission(NamedTuple):
    """``num_computed`` tokens need no computing. ``copies`` are (source block, target block); every source has to be
    read before anything is written, since a source may itself be taken again in the same tick."""

    num_computed: int
    copies: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class _Table:
    """``blocks`` in the order of ``Layout``. Of each group ``num_published`` leading blocks were offered to the prefix
    cache; ``node`` is the key of the last of them. ``num_gone`` leading ones are ``GONE`` where there is a window."""

    salt: str
    publishes: bool
    blocks: list[int]
    num_published: int = 0
    node: Node | None = None
    num_gone: int = 0


class BlockTables:
    """The block tables of all requests that hold blocks, over one pool and one prefix cache.

    Only blocks that are full and computed are ever shared, so no block is written while two tables hold it. A request
    that may not use the prefix cache neither adopts blocks nor leaves any behind.
    """

    def __init__(self, pool: BlockPool, prefix_cache: PrefixCache, block_size: int) -> None:
        self.pool = pool
        self.prefix_cache = prefix_cache
        self.block_size = block_size
        self._tables: dict[int, _Table] = {}

    @property
    def layout(self) -> Layout:
        return self.prefix_cache.layout

    @property
    def num_free(self) -> int:
        return self.pool.num_free

    @property
    def num_blocks(self) -> int:
        return self.pool.num_blocks

    def blocks(self, request_id: int) -> Sequence[int]:
        """The request's own list, which later growth extends."""
        return self._tables[request_id].blocks

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold ``num_tokens`` tokens, all groups of layers together."""
        return -(-num_tokens // self.block_size) * self.layout.num_groups

    def check_fits(self, num_prompt: int, max_tokens: int) -> None:
        """Raises:
        InvalidRequest: an empty pool could not hold a request of this size. The last token of an answer is drawn but
            never computed.
        """
        num_needed = self.blocks_for(num_prompt + max_tokens - 1)
        if num_needed > self.num_blocks:
            num_groups = self.layout.num_groups
            raise InvalidRequest(
                f"{num_prompt} prompt tokens and {max_tokens} to come need {num_needed // num_groups} blocks of"
                f" {self.block_size} tokens; the KV budget has {self.num_blocks // num_groups}"
            )

    def quote(self, tokens: Sequence[int], salt: str, use_cache: bool) -> Quote:
        """Price an admission without touching anything. A matched block that nobody holds leaves the free list too."""
        match = self.prefix_cache.match(tokens, salt, use_cache)
        return Quote(self._price(tokens, match), match.num_tokens)

    def admit(self, request_id: int, tokens: Sequence[int], salt: str, use_cache: bool) -> Admission:
        """Give the request a table that covers all of ``tokens``: adopted blocks first, then fresh ones.

        Raises:
            OutOfBlocks: the quote is above what is free; nothing was touched.
            ValueError: the request has a table already.
        """
        if request_id in self._tables:
            raise ValueError(f"request {request_id} has a block table already")
        match = self.prefix_cache.match(tokens, salt, use_cache)
        num_needed = self._price(tokens, match)
        if num_needed > self.num_free:
            raise OutOfBlocks(num_needed, self.num_free)
        self.prefix_cache.record(match)
        # Adopted blocks leave the free list before fresh ones are taken from it.
        blocks = list(match.blocks)
        for block in blocks:
            if block != GONE:
                self.pool.share(block)
        for source in match.sources:
            self.pool.touch(source)
        num_shared = len(blocks)
        self._take(self.blocks_for(len(tokens)) - num_shared, blocks)
        publishes = use_cache and self.prefix_cache.keys_blocks
        node = match.nodes[-1] if match.nodes else None
        num_gone = self.layout.num_behind(match.num_tokens, self.block_size)
        self._tables[request_id] = _Table(salt, publishes, blocks, len(match.nodes), node, num_gone)
        return Admission(match.num_tokens, tuple(zip(match.sources, blocks[num_shared:], strict=False)))

    def num_missing(self, request_id: int, num_tokens: int) -> int:
        """How many more blocks the request's table needs to cover ``num_tokens`` tokens."""
        return self.blocks_for(num_tokens) - len(self._tables[request_id].blocks)

    def grow(self, request_id: int, num_tokens: int) -> None:
        """Take blocks until the table covers ``num_tokens`` tokens.

        Raises:
            OutOfBlocks: not enough are free; nothing was taken.
        """
        num_missing = self.num_missing(request_id, num_tokens)
        if num_missing > self.pool.num_free:
            raise OutOfBlocks(num_missing, self.pool.num_free)
        self._take(num_missing, self._tables[request_id].blocks)

    def trim(self, request_id: int, num_tokens: int) -> None:
        """Give back the blocks beyond those that ``num_tokens`` tokens need. None of them may have been published."""
        blocks = self._tables[request_id].blocks
        while len(blocks) > self.blocks_for(num_tokens):
            self.pool.release(blocks.pop())

    def publish(self, request_id: int, tokens: Sequence[int], num_computed: int) -> None:
        """Key the blocks that the first ``num_computed`` tokens fill, and give back those behind a window. Call it once
        their K and V are in the pool, or will be before anybody reads them."""
        table = self._tables[request_id]
        if table.publishes and num_computed // self.block_size > table.num_published:
            self._publish(table, tokens, num_computed)
        self._give_back(table, self.layout.num_spare(num_computed, self.block_size))

    def publish_tail(self, request_id: int, tokens: Sequence[int], num_computed: int) -> None:
        """As ``publish``, and key the last, partly filled block too, as a source to copy from. Only for a table that
        will not grow any more."""
        table = self._tables[request_id]
        num_tail = num_computed % self.block_size
        if table.publishes and num_tail:
            self._publish(table, tokens, num_computed)
            tail = tuple(tokens[num_computed - num_tail : num_computed])
            self.prefix_cache.insert(table.salt, table.node, tail, self._of(table, num_computed // self.block_size))

    def withdraw(self, request_id: int) -> None:
        """Take the keys off the table's blocks, adopted ones too, and off all that follows them: the request failed,
        and any of them may be why, also those that it has given back."""
        table = self._tables[request_id]
        self.prefix_cache.withdraw(table.blocks, table.node if table.num_gone else None)

    def release(self, request_id: int) -> None:
        """Give the table's blocks back, last first, so that the start of a prefix outlives its end."""
        for block in reversed(self._tables.pop(request_id).blocks):
            if block != GONE:
                self.pool.release(block)

    def num_freed_by(self, request_ids: Iterable[int]) -> int:
        """How many blocks would become free if all these requests released theirs."""
        held = Counter(block for request_id in request_ids for block in self._tables[request_id].blocks)
        del held[GONE]
        return sum(1 for block, num_held in held.items() if num_held == self.pool.refs(block))

    def check(self) -> None:
        """Raises:
        Inconsistent: a block is neither free nor held, a count differs from the tables, or a key leads astray.
        """
        tables = [[block for block in table.blocks if block != GONE] for table in self._tables.values()]
        self.pool.check(tables, self.prefix_cache.keyed_blocks)
        self.prefix_cache.check()

    def _price(self, tokens: Sequence[int], match: Match) -> int:
        held = [block for block in match.blocks if block == GONE or self.pool.refs(block)]
        return self.blocks_for(len(tokens)) - len(held)

    def _take(self, num_blocks: int, blocks: list[int]) -> None:
        take, evict = self.pool.take, self.prefix_cache.evict
        for _ in range(num_blocks):
            block = take()
            evict(block)
            blocks.append(block)

    def _publish(self, table: _Table, tokens: Sequence[int], num_computed: int) -> None:
        if table.node is not None and not self.prefix_cache.knows(table.node):
            # That key belonged to another request's block, evicted since. Our own blocks hold the same content.
            table.node, table.num_published = None, 0
        num_full = num_computed // self.block_size
        for index in range(table.num_published, num_full):
            key = tuple(tokens[index * self.block_size : (index + 1) * self.block_size])
            table.node = self.prefix_cache.insert(table.salt, table.node, key, self._of(table, index))
        table.num_published = num_full

    def _of(self, table: _Table, index: int) -> Sequence[int]:
        """The blocks of the same tokens, one a group."""
        num_groups = self.layout.num_groups
        return table.blocks[index * num_groups : (index + 1) * num_groups]

    def _give_back(self, table: _Table, num_gone: int) -> None:
        windows = self.layout.windows
        for at in range(table.num_gone * len(windows), num_gone * len(windows)):
            if windows[at % len(windows)] is not None:
                self.pool.release(table.blocks[at])
                table.blocks[at] = GONE
        table.num_gone = max(table.num_gone, num_gone)
