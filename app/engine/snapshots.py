"""Whole states of conversations, for those that go on: what engines without blocks have in place of shared prefixes."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from app.engine.caches import copied
from app.engine.states import Caches, arrays
from app.scheduler.plan import Row


@dataclass(slots=True)
class Snapshot:
    """What some request's caches held after these tokens. ``users`` are that request and those that began from it."""

    salt: str
    tokens: tuple[int, ...]
    caches: Caches
    used_s: float
    users: set[int] = field(default_factory=set)

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in arrays(self.caches))

    def begins(self, row: Row) -> bool:
        """Whether the request of ``row`` begins with these tokens, and has more of them."""
        num_tokens = len(self.tokens)
        return row.salt == self.salt and num_tokens < len(row.tokens) and tuple(row.tokens[:num_tokens]) == self.tokens


class Snapshots:
    """Bounded by bytes, those used longest ago go first, and by age. A state can only be taken up where it was left: so
    one is kept where a chat's history ends, which is where the prompt of its next turn begins to differ."""

    def __init__(
        self,
        max_bytes: int,
        control_tokens: Collection[int],
        min_tokens: int = 1,
        ttl_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``control_tokens`` are those by which a template marks turns; ``min_tokens`` the least that is worth it;
        ``ttl_s`` after how many seconds without use one goes, None: never."""
        self._max_bytes = max_bytes
        self._control = frozenset(control_tokens)
        self._min_tokens = max(min_tokens, 1)
        self._ttl_s = ttl_s
        self._clock = clock
        self._kept: list[Snapshot] = []  # those used longest ago first

    @classmethod
    def none(cls) -> Snapshots:
        """What keeps nothing."""
        return cls(0, ())

    @property
    def is_on(self) -> bool:
        return self._max_bytes > 0

    def __len__(self) -> int:
        return len(self._kept)

    @property
    def num_bytes(self) -> int:
        return sum(snapshot.num_bytes for snapshot in self._kept)

    def boundary(self, row: Row) -> int:
        """How many tokens of the prompt are the history of its chat: all before its last control token, with which the
        template begins the answer. 0: none, or too few, or nothing of this request may be kept."""
        if row.salt is None:
            return 0
        places = range(row.num_prompt - 1, self._min_tokens - 1, -1)
        return next((place for place in places if row.tokens[place] in self._control), 0)

    def find(self, row: Row) -> tuple[int, Caches]:
        """How many of a request's tokens the longest state covers, and a copy of it; 0 and nothing: there is none."""
        self._expire()
        found = max((each for each in self._kept if each.begins(row)), key=lambda each: len(each.tokens), default=None)
        if found is None:
            return 0, []
        self._use(found, row)
        return len(found.tokens), copied(found.caches)

    def keep(self, row: Row, num_tokens: int, caches: Caches) -> None:
        """Keep a copy of what the caches of a request hold after its first ``num_tokens``."""
        assert row.salt is not None
        self._expire()
        tokens = tuple(row.tokens[:num_tokens])
        for snapshot in self._kept:
            if (snapshot.salt, snapshot.tokens) == (row.salt, tokens):
                self._use(snapshot, row)
                return
        fresh = Snapshot(row.salt, tokens, copied(caches), self._clock(), {row.request_id})
        if fresh.num_bytes > self._max_bytes:
            return
        self._kept.append(fresh)
        while self.num_bytes > self._max_bytes:
            self._kept.pop(0)

    def withdraw(self, request_id: int) -> None:
        """Forget what a request has left or begun from: it failed, and that may be why."""
        self._kept = [snapshot for snapshot in self._kept if request_id not in snapshot.users]

    def clear(self) -> None:
        self._kept.clear()

    def _use(self, snapshot: Snapshot, row: Row) -> None:
        snapshot.used_s = self._clock()
        snapshot.users.add(row.request_id)
        self._kept.remove(snapshot)
        self._kept.append(snapshot)

    def _expire(self) -> None:
        if self._ttl_s is not None:
            oldest_s = self._clock() - self._ttl_s
            self._kept = [snapshot for snapshot in self._kept if snapshot.used_s >= oldest_s]
