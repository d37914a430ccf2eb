"""Which block already holds the K and V of these tokens: exact keys, never a bare hash."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from app.kv.block_pool import BlockPool, Inconsistent


@dataclass(slots=True, eq=False)
class Node:
    """One keyed block. Its key is its place in the tree: the salt, the tokens of all blocks before it, and its own.

    ``tokens`` has ``block_size`` entries, or fewer for the last block of a request that ended; such a block is only
    ever copied, so it has no children. The root of a salt has no block, no tokens and no parent.
    ``openings`` are the children by first token, and there by block: many may follow on one beginning, and few of them
    begin alike. None: nobody has asked for them yet, and most nodes only ever have one child.
    """

    salt: str
    parent: Node | None = None
    tokens: tuple[int, ...] = ()
    block: int | None = None
    children: dict[tuple[int, ...], Node] = field(default_factory=dict)
    openings: dict[int, dict[int, Node]] | None = None

    def alike(self, first: int) -> Iterable[Node]:
        """The children whose tokens begin with ``first``, in the order in which they were keyed."""
        if self.openings is None:
            self.openings = {}
            for child in self.children.values():
                self.note_opening(child)
        return self.openings.get(first, {}).values()

    def note_opening(self, child: Node) -> None:
        assert self.openings is not None
        assert child.block is not None
        self.openings.setdefault(child.tokens[0], {})[child.block] = child


class Match(NamedTuple):
    """What can be adopted: ``num_tokens`` in all, ``nodes`` to be shared, then the start of ``source`` to be copied."""

    nodes: tuple[Node, ...] = ()
    source: int | None = None
    num_tokens: int = 0
    miss: str | None = "cold"

    @property
    def blocks(self) -> list[int]:
        """The blocks to share, in order; a list of the caller's own."""
        return [node.block for node in self.nodes if node.block is not None]


class PrefixCache:
    """A tree of keyed blocks. Whoever publishes a content first keys it; an equal block published later stays unkeyed.

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
    ) -> None:
        self.enabled = enabled
        self.keys_blocks = enabled and not whole_states
        self.epoch = 0
        self.hits = 0
        self.inserts = 0
        self.evictions_lru = 0
        self.evictions_ttl = 0
        self.tokens_reused = 0
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
        size, limit = self._block_size, len(tokens) - 1
        nodes: list[Node] = []
        start = 0
        while start + size <= limit and (child := node.children.get(tuple(tokens[start : start + size]))):
            nodes.append(child)
            node = child
            start += size
        source, num_copied = _closest(node, tokens[start : min(start + size, limit)])
        num_tokens = start + num_copied
        if num_tokens == 0 or num_tokens < self._min_tokens:
            return Match(miss="short" if num_tokens else "cold")
        return Match(tuple(nodes), source, num_tokens, None)

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
        return node.block is not None and self._nodes.get(node.block) is node

    def insert(self, salt: str, parent: Node | None, tokens: tuple[int, ...], block: int) -> Node:
        """Key ``block``, which holds ``tokens`` after those of ``parent`` (None: at the start), unless an equal one is
        keyed already. Returns the node with that key. ``parent`` must still have its own key.
        """
        if parent is None:
            parent = self._roots.get(salt)
            if parent is None:
                parent = self._roots[salt] = Node(salt)
        new = Node(salt, parent, tokens, block)
        node = parent.children.setdefault(tokens, new)
        if node is not new:
            return node
        self._nodes[block] = node
        if parent.openings is not None:
            parent.note_opening(node)
        self._pool.keep(block)
        self.inserts += 1
        return node

    def evict(self, block: int) -> None:
        """The block was taken for other content: it and all that follows it lose their keys. Unkeyed: no effect."""
        node = self._nodes.get(block)
        if node is not None:
            self.evictions_lru += self._drop(node)

    def expire(self, now: float) -> None:
        """It is ``now``: what has gone unused for too long loses its keys."""
        self._pool.now_s = now
        if self._ttl_s is not None:
            for block in self._pool.unused_since(now - self._ttl_s):
                if block in self._nodes:  # not when it followed one that has just expired
                    self.evictions_ttl += self._drop(self._nodes[block])

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
                if child.parent is not node or child.tokens != tokens or not self.knows(child):
                    raise Inconsistent(f"the key of block {child.block} does not lead to it")
                if child.children and len(tokens) != self._block_size:
                    raise Inconsistent(f"block {child.block} is not full, yet another follows it")
            num_reached += len(node.children)
            stack.extend(node.children.values())
        if num_reached != len(self._nodes):
            raise Inconsistent("a keyed block cannot be reached from any root")

    def _drop(self, node: Node) -> int:
        """Take the node and its subtree out of the tree; returns how many keys that cost."""
        parent, block = node.parent, node.block
        assert parent is not None
        assert block is not None
        del parent.children[node.tokens]
        if parent.openings is not None:
            alike = parent.openings[node.tokens[0]]
            del alike[block]
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
            assert node.block is not None
            del self._nodes[node.block]
            self._pool.forget(node.block)
            num_dropped += 1
        return num_dropped


def _closest(node: Node, rest: Sequence[int]) -> tuple[int | None, int]:
    """The child that shares most tokens with the start of ``rest``: (block, shared tokens), or (None, 0)."""
    best, best_shared = None, 0
    for child in node.alike(rest[0]) if rest else ():
        num_shared = 0
        for theirs, ours in zip(child.tokens, rest, strict=False):
            if theirs != ours:
                break
            num_shared += 1
        if num_shared > best_shared:
            best, best_shared = child.block, num_shared
    return best, best_shared
