"""Which block is free, and which free block goes next: integers only."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

from app.errors import MlxcelError


class OutOfBlocks(MlxcelError):
    """More blocks were asked for than are free. Nothing was taken."""

    def __init__(self, num_needed: int, num_free: int) -> None:
        super().__init__(f"{num_needed} blocks needed, {num_free} free")


class Inconsistent(MlxcelError):
    """The books of the pool do not add up: a fault in this program, never of a request."""


class BlockPool:
    """Reference counts of ``num_blocks`` blocks, and the order in which free ones are taken.

    A block may be *kept*: its content can be adopted again, also while nobody holds it. Free blocks that are not kept
    are worth nothing and go first; kept ones follow, the longest unused first. So the free list is the eviction order.
    Every operation takes constant time, but for ``extend`` and ``unused_since``.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._refs = [0] * num_blocks
        self._kept: set[int] = set()
        self._blank = dict.fromkeys(reversed(range(num_blocks)))
        self._cached: OrderedDict[int, float] = OrderedDict()  # and since when nobody uses it
        self.now_s = 0.0  # the caller's clock, as it last told it

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds, kept or not."""
        return len(self._blank) + len(self._cached)

    @property
    def num_live(self) -> int:
        """Blocks that somebody holds."""
        return self.num_blocks - self.num_free

    @property
    def num_blank(self) -> int:
        """Free blocks whose content nobody can adopt."""
        return len(self._blank)

    @property
    def num_cached(self) -> int:
        """Free blocks whose content can still be adopted."""
        return len(self._cached)

    def refs(self, block: int) -> int:
        return self._refs[block]

    def take(self) -> int:
        """Hand out the coldest free block with one reference. It is no longer kept.

        Raises:
            OutOfBlocks: no block is free.
        """
        if self._blank:
            block, _ = self._blank.popitem()
        elif self._cached:
            block, _ = self._cached.popitem(last=False)
            self._kept.discard(block)
        else:
            raise OutOfBlocks(1, 0)
        self._refs[block] = 1
        return block

    def share(self, block: int) -> None:
        """Add a reference to a block that is held or kept.

        Raises:
            Inconsistent: the block is free and its content is gone.
        """
        if self._refs[block] == 0:
            if block not in self._kept:
                raise Inconsistent(f"block {block} holds nothing that could be shared")
            del self._cached[block]
        self._refs[block] += 1

    def release(self, block: int) -> None:
        """Give one reference back. The last one frees the block: a kept block becomes the warmest of the free ones.

        Raises:
            Inconsistent: nobody holds the block.
        """
        if self._refs[block] == 0:
            raise Inconsistent(f"block {block} is released more often than it was taken")
        self._refs[block] -= 1
        if self._refs[block] == 0:
            self._list_free(block)

    def touch(self, block: int) -> None:
        """Make a free kept block the warmest one; no effect on any other block."""
        if block in self._cached:
            self._cached[block] = self.now_s
            self._cached.move_to_end(block)

    def keep(self, block: int) -> None:
        """From now on the block's content can be adopted."""
        self._kept.add(block)
        if block in self._blank:
            del self._blank[block]
            self._list_free(block)

    def forget(self, block: int) -> None:
        """The block's content can no longer be adopted. Forgetting a block that is not kept has no effect."""
        self._kept.discard(block)
        if block in self._cached:
            del self._cached[block]
            self._list_free(block)

    def unused_since(self, before_s: float) -> list[int]:
        """The free kept blocks that nobody has used since ``before_s``, the longest unused first."""
        unused = []
        for block, since_s in self._cached.items():
            if since_s >= before_s:
                break
            unused.append(block)
        return unused

    def extend(self, num_blocks: int) -> None:
        """Add blank blocks until there are ``num_blocks``."""
        added = range(self.num_blocks, num_blocks)
        self._refs += [0] * len(added)
        self._blank = dict.fromkeys(reversed(added)) | self._blank
        self.num_blocks += len(added)

    def check(self, tables: Iterable[Iterable[int]], keyed: Iterable[int]) -> None:
        """Compare the books with the block tables that exist and the blocks that have a prefix key.

        Raises:
            Inconsistent: a block is neither free nor held, or both; a count differs; or kept and keyed differ.
        """
        held = Counter(block for table in tables for block in table)
        if held != {block: refs for block, refs in enumerate(self._refs) if refs}:
            raise Inconsistent("the reference counts differ from what the tables hold")
        if self._blank.keys() | self._cached.keys() != set(range(self.num_blocks)) - held.keys():
            raise Inconsistent("a block is both free and held, or neither")
        if self._kept != set(keyed):
            raise Inconsistent("the kept blocks differ from the ones with a prefix key")
        if self._kept & self._blank.keys() or not self._cached.keys() <= self._kept:
            raise Inconsistent("a free block stands in the wrong list")

    def _list_free(self, block: int) -> None:
        if block in self._kept:
            self._cached[block] = self.now_s
        else:
            self._blank[block] = None
