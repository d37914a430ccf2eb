"""Who is computed in the next tick, and what its outcome means. Decides, never computes: ids and integers only."""

from __future__ import annotations

import heapq
import logging
import math
from dataclasses import replace

from app.errors import InvalidRequest, kind_and_place
from app.kv.block_pool import OutOfBlocks
from app.kv.block_table import BlockTables
from app.request import FinishReason, Request, State
from app.scheduler import policy
from app.scheduler.plan import Admitted, Event, Finished, Plan, Result, Row, Token
from app.scheduler.policy import SchedulerConfig
from app.scheduler.queue import RequestQueue
from app.scheduler.snapshot import Counters, SlotView, Snapshot, observe, seat

log = logging.getLogger("mlxcel.scheduler")

# How often a request may be in a step that fails as a whole, and still be tried again.
MAX_FAULTS = 1


class Scheduler:
    """Requests from arrival to end. A tick is ``plan``, a forward by the engine, ``apply``; nothing comes between.

    ``add``, ``cancel``, ``finish`` and ``reset_prefix_cache`` are for the time between ``apply`` and the next ``plan``.
    Requests are known by id; once one has finished its id means nothing here. All times are in seconds of the caller's
    clock.
    """

    def __init__(self, config: SchedulerConfig, tables: BlockTables) -> None:
        self._config = config
        self._tables = tables
        self._queue = RequestQueue()
        self._requests: dict[int, Request] = {}
        self._running: dict[int, Request] = {}
        self._unannounced: dict[int, None] = {}  # an ordered set: no Admitted was sent yet
        self._free_slots = list(range(min(config.num_slots, config.max_batch_size)))
        self._left: dict[int, SlotView] = {}
        self._num_arrived = 0
        self._planned_s = 0.0
        self._counters = Counters()

    @property
    def is_idle(self) -> bool:
        """Whether no request is queued or running."""
        return not self._requests

    def add(self, request: Request) -> None:
        """Queue a request.

        Raises:
            InvalidRequest: it could not be held even by an empty pool.
            ValueError: its id is in use.
        """
        if request.id in self._requests:
            raise ValueError(f"request {request.id} exists already")
        # The last token of an answer is drawn but never computed.
        num_needed = self._tables.blocks_for(request.num_prompt + request.max_tokens - 1)
        if num_needed > self._tables.num_blocks:
            raise InvalidRequest(
                f"{request.num_prompt} prompt tokens and {request.max_tokens} to come need {num_needed} blocks of"
                f" {self._tables.block_size} tokens; the KV budget has {self._tables.num_blocks}"
            )
        request.arrival = self._num_arrived
        self._num_arrived += 1
        self._requests[request.id] = request
        self._unannounced[request.id] = None
        self._queue.push(request)

    def cancel(self, request_id: int, now: float) -> list[Event]:
        """End a request at once, slot and blocks included. An unknown id brings no event: it has ended by itself."""
        request = self._requests.get(request_id)
        return [] if request is None else [self._finish(request, FinishReason.CANCELLED, request.num_output, now)]

    def finish(self, request_id: int, reason: FinishReason, num_output: int, now: float) -> list[Event]:
        """As ``cancel``, for a request whose answer was complete after ``num_output`` tokens (a stop string)."""
        request = self._requests.get(request_id)
        return [] if request is None else [self._finish(request, reason, num_output, now)]

    def waiting(self, arrived_before_s: float = math.inf) -> list[Request]:
        """The requests of which nothing was computed yet and which hold no slot, as far as they came before then."""
        waiting = [self._requests[request_id] for request_id in self._unannounced if request_id not in self._running]
        return [request for request in waiting if request.arrival_s < arrived_before_s]

    def reset_prefix_cache(self) -> int:
        """Forget every prefix; returns how many blocks had a key."""
        return self._tables.prefix_cache.clear()

    def plan(self, now: float) -> Plan:
        """Choose the rows of the next tick, with their blocks in place: all that decode, then prefill as far as due."""
        self._planned_s = now
        any_reclaimed = self._grow_decoding()
        chunks, copies = self._choose_chunks(may_admit=not any_reclaimed)
        shares = {request.id: 1 for request in self._running.values() if request.state is State.DECODING} | chunks
        rows = [Row.of(self._running[i], num_new, self._tables.blocks(i)) for i, num_new in shares.items()]
        rows.sort(key=lambda row: row.num_new > 1)
        return Plan(tuple(rows), tuple(copies))

    def apply(self, plan: Plan, result: Result, now: float) -> list[Event]:
        """Enter what the forward brought: computed tokens, drawn tokens, ends. Events come in the order of the rows."""
        events: list[Event] = []
        num_prefill = num_decode = num_chunks = 0
        draws, failures = result.draws, result.failures
        for row in plan.rows:
            request = self._running[row.request_id]
            draw = draws.get(request.id)
            if request.id in failures or (row.draws and draw is None):
                events.append(self._finish(request, FinishReason.ERROR, request.num_output, now))
                continue
            if request.id in self._unannounced:
                events.append(self._announce(request))
            request.num_computed += row.num_new
            try:
                self._tables.publish(request.id, request.tokens, request.num_computed)
            except Exception as error:
                log.error("request %d failed when its blocks were published: %s", request.id, kind_and_place(error))
                events.append(self._finish(request, FinishReason.ERROR, request.num_output, now))
                continue
            if request.state is State.DECODING:
                num_decode += 1
            else:
                num_prefill += row.num_new
                num_chunks += 1
                if row.draws:
                    request.move(State.DECODING)
            if row.draws and draw is not None:
                request.tokens.append(draw.token)
                events.append(Token(request.id, draw, now))
                if draw.token in request.end_tokens:
                    events.append(self._finish(request, FinishReason.STOP, request.num_output, now))
                elif request.num_output >= request.max_tokens:
                    events.append(self._finish(request, FinishReason.LENGTH, request.num_output, now))
        self._counters = self._counters.with_tick(num_decode, num_chunks, num_prefill)
        return events

    def lose_pool(self, plan: Plan, now: float) -> list[Event]:
        """In place of ``apply``, when the forward failed and took all K and V with it: whoever held blocks is requeued
        with its tokens, but a row that was in such a step before ends with an error, since it may be the cause. Nothing
        is left to adopt."""
        events: list[Event] = []
        for row in plan.rows:
            request = self._running[row.request_id]
            request.num_faults += 1
            if request.num_faults > MAX_FAULTS:
                events.append(self._finish(request, FinishReason.ERROR, request.num_output, now))
        for request in list(self._running.values()):
            self._requeue(request, "fault")
        self._tables.prefix_cache.clear()
        return events

    def snapshot(self) -> Snapshot:
        """What HTTP may see: a value of its own that later ticks do not change."""
        num_slots, running, num_queued = self._config.num_slots, self._running.values(), len(self._queue)
        return observe(num_slots, running, self._left, num_queued, self._counters, self._tables)

    def check(self) -> None:
        """Raises:
        Inconsistent: the books of blocks and prefix keys do not add up.
        """
        self._tables.check()

    @property
    def _num_decoding(self) -> int:
        return sum(1 for request in self._running.values() if request.state is State.DECODING)

    def _grow_decoding(self) -> bool:
        """Give each decoding row the block for its next token, at the cost of the least progressed rows where needed.

        Says whether anybody lost its blocks: if so nobody is admitted in this tick, or blocks would go to and fro.
        """
        any_reclaimed = False
        for request in list(self._running.values()):
            while request.state is State.DECODING:
                try:
                    self._tables.grow(request.id, len(request.tokens))
                    break
                except OutOfBlocks:
                    self._requeue(policy.reclaim_victim(self._running.values()), "reclaim")
                    any_reclaimed = True
        return any_reclaimed

    def _choose_chunks(self, may_admit: bool) -> tuple[dict[int, int], list[tuple[int, int]]]:
        """Deal the tick's prefill tokens out to parked and queued requests, in one order of priority and arrival.

        A request is admitted only into a tick that computes some of it. So its blocks are not held in advance, and the
        copy it needs is made by a forward whose failure it would share.

        Returns:
            Number of tokens by request id, and the copies (source block, target block) of the new admissions.
        """
        config, num_decoding = self._config, self._num_decoding
        chunk = policy.chunk_tokens(config.prefill_chunk, num_decoding)
        cap = policy.max_prefill_tokens(config.max_batch_prefill_tokens, config.max_batch_prefill, config.prefill_chunk)
        room = policy.prefill_room(chunk, cap, num_decoding)
        chunks: dict[int, int] = {}
        copies: list[tuple[int, int]] = []
        while len(chunks) < config.max_batch_prefill:
            waiting = [r for r in self._running.values() if r.state is State.PREFILLING and r.id not in chunks]
            head = self._queue.peek() if may_admit else None
            if head is not None:
                waiting.append(head)
            if not waiting:
                break
            request = min(waiting, key=policy.place)
            if not policy.prefill_share(_num_left(request), chunk, room, not chunks):
                break
            if request is head:
                may_admit = self._make_way(request)
                if not may_admit:
                    continue
                copies.extend(self._admit(request))
            chunks[request.id] = policy.prefill_share(_num_left(request), chunk, room, not chunks)
            if room is not None:
                room = max(room - chunks[request.id], 0)
        return chunks, copies

    def _make_way(self, request: Request) -> bool:
        """Whether the next request in line has a slot and its blocks. Where that is allowed and of use, rows of a lower
        priority are pushed out for it; otherwise it waits, and all who stand behind it.
        """
        while True:
            victims: list[Request] = []
            if self._config.enable_preemption:
                victims = policy.preemptible(self._running.values(), request.priority)
            if not self._free_slots and not victims:
                return False
            num_needed = self._tables.quote(request.tokens, request.cache_salt, request.use_prefix_cache).num_blocks
            if self._free_slots and self._may_admit(num_needed, self._tables.num_free):
                return True
            num_freed = self._tables.num_freed_by(victim.id for victim in victims)
            if not victims or not self._may_admit(num_needed, self._tables.num_free + num_freed):
                return False
            self._requeue(policy.preemption_victim(victims, self._config.preemption_policy), "priority")

    def _may_admit(self, num_needed: int, num_free: int) -> bool:
        watermark, num_blocks = self._config.watermark, self._tables.num_blocks
        return policy.may_admit(num_needed, num_free, num_blocks, watermark, self._num_decoding)

    def _admit(self, request: Request) -> tuple[tuple[int, int], ...]:
        """Seat the head of the queue; returns the copies its table asks for."""
        self._queue.pop()
        admission = self._tables.admit(request.id, request.tokens, request.cache_salt, request.use_prefix_cache)
        request.move(State.PREFILLING)
        request.slot = heapq.heappop(self._free_slots)
        request.num_computed = admission.num_computed
        if request.id in self._unannounced:
            request.num_cached = admission.num_computed
        self._running[request.id] = request
        return admission.copies

    def _announce(self, request: Request) -> Admitted:
        del self._unannounced[request.id]
        self._counters = self._counters.with_start(request.num_prompt)
        return Admitted(request.id, request.num_cached, self._planned_s)

    def _requeue(self, request: Request, cause: str) -> None:
        """Take a running request's slot and blocks away. It keeps its tokens and its place in line."""
        self._leave(request)
        request.move(State.QUEUED)
        request.num_computed = 0
        self._queue.push(request)
        self._counters = self._counters.with_requeue(cause)

    def _finish(self, request: Request, reason: FinishReason, num_output: int, now: float) -> Finished:
        if request.state is State.QUEUED:
            self._queue.remove(request.id)
        elif not self._leave(request, is_sound=reason is not FinishReason.ERROR):
            reason = FinishReason.ERROR
        request.move(State.FINISHED, reason)
        del self._requests[request.id]
        self._unannounced.pop(request.id, None)
        self._counters = self._counters.with_end(reason.value, num_output)
        return Finished(request.id, reason, num_output, now)

    def _leave(self, request: Request, is_sound: bool = True) -> bool:
        """Give slot and blocks back, and leave to the prefix cache what can be trusted. Says whether it all can."""
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
        self._left[request.slot] = replace(seat(request, request.slot), request_id=None)
        heapq.heappush(self._free_slots, request.slot)
        request.slot = None
        del self._running[request.id]
        return is_sound


def _num_left(request: Request) -> int:
    return len(request.tokens) - request.num_computed
