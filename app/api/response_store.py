"""Responses that are kept in memory for later: bounded in number, bytes and age, and apart for each API key."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import orjson

from app.errors import ResponseNotFound

MAX_RESPONSES = 4096
MAX_AGE_S = 24 * 3600.0

_Name = tuple[bytes, str]  # a key and an id


@dataclass(frozen=True, slots=True)
class Kept:
    """A response as it was sent, the items that its request gave, and all items of the conversation before it."""

    response: dict[str, Any]
    given: list[dict[str, Any]]
    past: list[dict[str, Any]]

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """What a next response goes on from."""
        return [*self.past, *self.given, *self.response["output"]]


class ResponseStore:
    """Each response holds its whole conversation, so that none depends on another that may be gone. Everything is kept
    as JSON, whose length is what counts. The one used longest ago goes first; an age is counted from the last use.
    """

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        """With ``max_bytes`` 0 nothing is ever kept."""
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._clock = clock
        self._entries: OrderedDict[_Name, tuple[float, bytes]] = OrderedDict()  # in order of their last use, in s

    def put(self, key: bytes, kept: Kept) -> None:
        """Keep a response of ``key`` under its own id. One that alone is larger than the store is not kept."""
        self._forget_old()
        data = orjson.dumps(kept)
        if len(data) > self.max_bytes:
            return
        self._entries[key, kept.response["id"]] = (self._clock(), data)
        self.num_bytes += len(data)
        while len(self._entries) > MAX_RESPONSES or self.num_bytes > self.max_bytes:
            self._forget(next(iter(self._entries)))

    def get(self, key: bytes, response_id: str) -> Kept:
        """Raises ResponseNotFound where ``key`` has no such response, whoever else may have one."""
        self._forget_old()
        name = key, response_id
        if name not in self._entries:
            raise ResponseNotFound(response_id)
        _, data = self._entries[name]
        self._entries[name] = (self._clock(), data)
        self._entries.move_to_end(name)
        return Kept(**orjson.loads(data))

    def drop(self, key: bytes, response_id: str) -> None:
        """Raises ResponseNotFound as ``get`` does."""
        self._forget_old()
        if (key, response_id) not in self._entries:
            raise ResponseNotFound(response_id)
        self._forget((key, response_id))

    def __len__(self) -> int:
        return len(self._entries)

    def _forget_old(self) -> None:
        oldest_s = self._clock() - MAX_AGE_S
        while self._entries and next(iter(self._entries.values()))[0] < oldest_s:
            self._forget(next(iter(self._entries)))

    def _forget(self, name: _Name) -> None:
        _, data = self._entries.pop(name)
        self.num_bytes -= len(data)
