"""Which block already holds the K and V of these tokens: exact keys, never a bare hash."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple

from app.kv.block_pool import BlockPool, Inconsistent
from app.kv.layout import GONE, ONE_GROUP, Layout


@dataclass(slots=True, eq=False)
class Node:
    """The keyed blocks of some tokens, one a group of layers. Their key is their place in the tree: the salt, the
    tokens of all blocks before them, and their own.

    ``tokens`` has ``block_size`` entries, or fewer for the last block of a request that ended; such a block is only
    ever copied, so it has no children. The root of a salt has no blocks, no tokens and no parent.
    ``openings`` are the children by first token, and there by all of them: many may follow on one beginning, and few of
    them begin alike. None: nobody has asked for them yet, and most nodes only ever have one child.
    A block is ``GONE`` where its group has a window, and those that follow can do without it.
    """

    salt: str
    parent: Node | None = None
    tokens: tuple[int, ...] = ()
    blocks: list[int] = field(default_factory=list)
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    openings: dict[int, dict[tuple[int, ...], Node]] | None = None

    @property
    def is_whole(self) -> bool:
        return GONE not in self.blocks

    def alike(self, first: int) -> Iterable[Node]:
        """The children whose tokens begin with ``first``, in the order in which they were keyed."""
        if self.openings is None:
            self.openings = {}
            for child in self.children.values():
                self.note_opening(child)
        return self.openings.get(first, {}).values()

    def note_opening(self, child: Node) -> None:
        assert self.openings is not None
        self.openings.setdefault(child.tokens[0], {})[child.tokens] = child


class Match(NamedTuple):
    """What can be adopted: ``num_tokens`` in all, those of ``nodes`` by sharing ``blocks``, in the order of a table,
    then the start of ``sources``, one a group, to be copied."""

    nodes: tuple[Node, ...] = ()
    blocks: tuple[int, ...] = ()
    sources: tuple[int, ...] = ()
    num_tokens: int = 0
    miss: str | None = "cold"


class PrefixCache:
    """A tree of keyed blocks. Whoever publishes a content first keys it; an equal block published later stays unkeyed,
    unless it takes the place of one that is gone.

    A tree of nodes, because a key spelt out as nested tuples costs the whole context for every hash. Counters:
    ``lookups`` is ``hits`` plus the misses "cold" (nothing known) and "short" (under ``min_tokens``); a miss "off" is
    an admission that was not allowed to look. ``evictions_lru`` counts keys lost because a block was needed,
    ``evictions_ttl`` those lost because nobody had used them for ``ttl_s`` seconds (None: never). ``epoch`` counts how
    often it was cleared.

    With ``whole_states`` there is nothing in it: the engine has what can be reused, and says what it found (``count``).
    """

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        enabled: bool = True,
        min_tokens: int = 0,
        ttl_s: float | None = None,
        whole_states: bool = False,
        layout: Layout = ONE_GROUP,
    ) -> None:
        self.layout = layout
        self.enabled = enabled
        self.keys_blocks = enabled and not whole_states
        self.epoch = 0
        self.hits = self.inserts = self.tokens_reused = 0
        self.evictions_lru = self.evictions_ttl = 0
        self.misses = {"cold": 0, "short": 0, "off": 0}
        self._pool = pool
        self._block_size = block_size
        self._min_tokens = min_tokens
        self._ttl_s = ttl_s
        self._roots: dict[str, Node] = {}
        self._nodes: dict[int, Node] = {}

    @property
    def num_entries(self) -> int:
        """Keyed blocks."""
        return len(self._nodes)

    @property
    def keyed_blocks(self) -> Collection[int]:
        return self._nodes.keys()

    @property
    def lookups(self) -> int:
        return self.hits + self.misses["cold"] + self.misses["short"]

    def match(self, tokens: Sequence[int], salt: str, allowed: bool = True) -> Match:
        """Find the longest known prefix of ``tokens``, short of the last one: at least one token is left to compute.

        Changes nothing; ``record`` counts the match that is acted on.
        """
        if not (self.keys_blocks and allowed):
            return Match(miss="untold" if self.enabled and allowed else "off")
        node = self._roots.get(salt)
        if node is None:
            return Match()
        size, limit, num_behind = self._block_size, len(tokens) - 1, self.layout.num_behind
        nodes: list[Node] = []
        start = num_usable = whole_from = 0  # from that node on all have their blocks
        while start + size <= limit and (child := node.children.get(tuple(tokens[start : start + size]))):
            nodes.append(child)
            node = child
            start += size
            if not child.is_whole:
                whole_from = len(nodes)
            if whole_from <= num_behind(start, size):
                num_usable = len(nodes)
        source, num_copied = _closest(node, tokens[start : min(start + size, limit)])
        if source is None or whole_from > num_behind(start + num_copied, size):
            source, num_copied, start = None, 0, num_usable * size
        num_tokens = start + num_copied
        if num_tokens == 0 or num_tokens < self._min_tokens:
            return Match(miss="short" if num_tokens else "cold")
        adopted, seen_from = tuple(nodes[: start // size]), num_behind(num_tokens, size)
        blocks = [self._adopted(node, place < seen_from) for place, node in enumerate(adopted)]
        sources = () if source is None else tuple(source.blocks)
        return Match(adopted, tuple(chain.from_iterable(blocks)), sources, num_tokens, None)

    def _adopted(self, node: Node, is_behind: bool) -> list[int]:
        """The blocks of a node to share: none behind the window of its group."""
        lost = [is_behind and window is not None for window in self.layout.windows]
        return [GONE if gone else block for block, gone in zip(node.blocks, lost, strict=True)]

    def record(self, match: Match) -> None:
        """Count a match that an admission acted on."""
        if match.miss is None:
            self.hits += 1
            self.tokens_reused += match.num_tokens
        elif match.miss != "untold":
            self.misses[match.miss] += 1

    def count(self, num_tokens: int) -> None:
        """Count what the engine has found for an admission, 0 tokens: nothing."""
        self.record(Match(num_tokens=num_tokens, miss=None if num_tokens else "cold"))

    def knows(self, node: Node) -> bool:
        """Whether the node still has its key: it may have lost it to an eviction."""
        return node.parent is not None

    def insert(self, salt: str, parent: Node | None, tokens: tuple[int, ...], blocks: Sequence[int]) -> Node:
        """Key ``blocks``, one a group, which hold ``tokens`` after those of ``parent`` (None: at the start), unless an
        equal one is keyed already. Returns the node with that key. ``parent`` must still have its own key.
        """
        if parent is None:
            parent = self._roots.setdefault(salt, Node(salt))
        new = Node(salt, parent, tokens, [GONE] * len(blocks))
        node = parent.children.setdefault(tokens, new)
        if node is new:
            self.inserts += 1
            if parent.openings is not None:
                parent.note_opening(node)
        for place, block in enumerate(blocks):
            if node.blocks[place] == GONE != block:
                node.blocks[place] = block
                self._nodes[block] = node
                self._pool.keep(block)
        return node

    def evict(self, block: int) -> None:
        """The block was taken for other content: it loses its key, and what cannot do without it. Unkeyed: nothing."""
        if block in self._nodes:
            self.evictions_lru += self._lose(block)

    def withdraw(self, blocks: Iterable[int], node: Node | None = None) -> None:
        """No key stays of ``blocks``, nor of what ``node`` goes on from, nor of what follows: none can be trusted."""
        while node is not None and node.parent is not None and node.parent.parent is not None:
            node = node.parent
        doubtful = [node] if node is not None else []
        for each in (*doubtful, *(self._nodes[block] for block in blocks if block in self._nodes)):
            if (parent := each.parent) is not None:  # not when it followed another
                self.evictions_lru += self._drop(each) + self._prune(parent)

    def expire(self, now: float) -> None:
        """It is ``now``: what has gone unused for too long loses its keys."""
        self._pool.now_s = now
        if self._ttl_s is not None:
            for block in self._pool.unused_since(now - self._ttl_s):
                if block in self._nodes:  # not when it followed one that has just expired
                    self.evictions_ttl += self._lose(block)

    def clear(self) -> int:
        """Forget every key and return how many there were. Blocks that somebody holds stay with their holders."""
        self.epoch += 1
        return sum(self._drop(node) for root in list(self._roots.values()) for node in list(root.children.values()))

    def check(self) -> None:
        """Raises:
        Inconsistent: a node cannot be reached by its key, or a root without nodes was left behind.
        """
        num_reached = 0
        stack = list(self._roots.values())
        if not all(root.children for root in stack):
            raise Inconsistent("a salt without entries has a root")
        while stack:
            node = stack.pop()
            for tokens, child in node.children.items():
                held = [block for block in child.blocks if block != GONE]
                if (
                    child.parent is not node
                    or child.tokens != tokens
                    or any(self._nodes.get(b) is not child for b in held)
                ):
                    raise Inconsistent(f"the key of blocks {child.blocks} does not lead to them")
                if child.children and len(tokens) != self._block_size:
                    raise Inconsistent(f"blocks {child.blocks} are not full, yet others follow them")
                if not child.children and not held:
                    raise Inconsistent("a key without blocks leads nowhere")
                num_reached += len(held)
            stack.extend(node.children.values())
        if num_reached != len(self._nodes):
            raise Inconsistent("a keyed block cannot be reached from any root")

    def _lose(self, block: int) -> int:
        """A keyed block is of no use any more; returns how many keys that cost."""
        node = self._nodes[block]
        if self.layout.windows[node.blocks.index(block)] is None:
            return self._drop(node)
        self._forget(node, [place for place, window in enumerate(self.layout.windows) if window is not None])
        return self._prune(node)

    def _prune(self, node: Node) -> int:
        """Drop a key without blocks that leads nowhere, and those that it came from; returns how many."""
        num_dropped = 0
        while (parent := node.parent) is not None and not node.children and set(node.blocks) == {GONE}:
            num_dropped += self._drop(node)
            node = parent
        return num_dropped

    def _forget(self, node: Node, places: Iterable[int]) -> None:
        for place in places:
            if (block := node.blocks[place]) != GONE:
                node.blocks[place] = GONE
                del self._nodes[block]
                self._pool.forget(block)

    def _drop(self, node: Node) -> int:
        """Take the node and its subtree out of the tree; returns how many keys that cost."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens]
        if parent.openings is not None:
            alike = parent.openings[node.tokens[0]]
            del alike[node.tokens]
            if not alike:
                del parent.openings[node.tokens[0]]
        if parent.parent is None and not parent.children:
            del self._roots[parent.salt]
        num_dropped = 0
        stack = [node]
        while stack:
            node = stack.pop()
            # Without their links the nodes are freed at once and one by one, not as a deep chain of cycles.
            if node.children:
                stack.extend(node.children.values())
                node.children.clear()
                node.openings = None
            node.parent = None
            self._forget(node, range(len(node.blocks)))
            num_dropped += 1
        return num_dropped


def _closest(node: Node, rest: Sequence[int]) -> tuple[Node | None, int]:
    """The whole child that shares most tokens with the start of ``rest``, and how many; or (None, 0)."""
    best, best_shared = None, 0
    for child in node.alike(rest[0]) if rest else ():
        num_shared = 0
        for theirs, ours in zip(child.tokens, rest, strict=False):
            if theirs != ours:
                break
            num_shared += 1
        if num_shared > best_shared and child.is_whole:
            best, best_shared = child, num_shared
    return best, best_shared
