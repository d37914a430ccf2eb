"""Who sits in which slot, and who sat there last."""

from __future__ import annotations

import heapq
import logging
from collections.abc import Container, Mapping, ValuesView

from app.errors import kind_and_place
from app.kv.block_table import BlockTables, Quote
from app.request import Request, State
from app.scheduler.snapshot import SlotView, seat

log = logging.getLogger("mlxcel.scheduler")


class Seats:
    """The running requests, each with a slot and a block table from its admission until it leaves."""

    def __init__(self, num_slots: int, max_batch_size: int, tables: BlockTables) -> None:
        """``max_batch_size`` bounds the requests that sit, ``num_slots`` the slots that are shown."""
        self._views = {slot: SlotView(slot) for slot in range(num_slots)}  # as they were left
        self._free = list(range(min(num_slots, max_batch_size)))
        self._tables = tables
        self._running: dict[int, Request] = {}
        self._gone: list[int] = []

    def __getitem__(self, request_id: int) -> Request:
        return self._running[request_id]

    def __contains__(self, request_id: int) -> bool:
        return request_id in self._running

    @property
    def running(self) -> ValuesView[Request]:
        """In the order of their admission."""
        return self._running.values()

    @property
    def decoding(self) -> list[Request]:
        return [request for request in self._running.values() if request.state is State.DECODING]

    @property
    def parked(self) -> list[Request]:
        """Those whose prompt is not computed to its end."""
        return [request for request in self._running.values() if request.state is State.PREFILLING]

    @property
    def is_full(self) -> bool:
        return not self._free

    def quote(self, request: Request) -> Quote:
        """What the admission of a queued request would cost."""
        return self._tables.quote(request.tokens, request.cache_salt, request.use_prefix_cache)

    def num_computed(self, request: Request) -> int:
        """How many tokens of a request need no computing any more; of a queued one, if it were admitted now."""
        return self.quote(request).num_cached if request.state is State.QUEUED else request.num_computed

    def num_wanted(self, head: Request | None) -> int:
        """How many blocks more are needed for the next token of all who decode, and for ``head`` if a slot is free."""
        num_wanted = sum(self._tables.num_missing(request.id, len(request.tokens)) for request in self.decoding)
        return num_wanted + (self.quote(head).num_blocks if head is not None and not self.is_full else 0)

    def take(self, request: Request) -> tuple[tuple[int, int], ...]:
        """Give a queued request the lowest free slot and blocks for its tokens; returns the copies its table asks for.

        Raises:
            IndexError: no slot is free.
            OutOfBlocks: there are not enough blocks.
        """
        admission = self._tables.admit(request.id, request.tokens, request.cache_salt, request.use_prefix_cache)
        request.move(State.PREFILLING)
        request.slot = heapq.heappop(self._free)
        request.num_computed = admission.num_computed
        self._running[request.id] = request
        return admission.copies

    def publish(self, request: Request) -> bool:
        """Leave the blocks that are full to the prefix cache as well. Says whether it could be done."""
        try:
            self._tables.publish(request.id, request.tokens, request.num_computed)
        except Exception as error:
            log.error("request %d failed when its blocks were published: %s", request.id, kind_and_place(error))
            return False
        return True

    def leave(self, request: Request, is_sound: bool = True) -> bool:
        """Take slot and blocks away, and leave to the prefix cache what can be trusted. Says whether it all can."""
        assert request.slot is not None
        if is_sound:
            try:
                self._tables.publish_tail(request.id, request.tokens, request.num_computed)
            except Exception as error:
                is_sound = False
                log.error("request %d: its last block was not published: %s", request.id, kind_and_place(error))
        if not is_sound:
            self._tables.withdraw(request.id)
        self._tables.release(request.id)
        self._views[request.slot] = seat(request, request.slot, is_busy=False)
        heapq.heappush(self._free, request.slot)
        request.slot = None
        del self._running[request.id]
        self._gone.append(request.id)
        return is_sound

    def reuse(self, reused: Mapping[int, int], fresh: Container[int]) -> None:
        """Enter how many tokens of these requests the engine has found by itself; a client is told of what was found
        for a ``fresh`` one."""
        for request_id, num_tokens in reused.items():
            self._tables.prefix_cache.count(num_tokens)
            self._running[request_id].num_known = num_tokens
            if request_id in fresh:
                self._running[request_id].num_cached = num_tokens

    def changes(self) -> tuple[tuple[int, ...], int]:
        """Who has left since this was asked before, and how often all prefixes were forgotten."""
        gone, self._gone = tuple(self._gone), []
        return gone, self._tables.prefix_cache.epoch

    def views(self) -> tuple[SlotView, ...]:
        """Every slot as it is now."""
        taken = {request.slot: seat(request, request.slot) for request in self.running if request.slot is not None}
        return tuple((self._views | taken).values())
