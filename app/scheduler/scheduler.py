"""Who is computed in the next tick, and what its outcome means. Decides, never computes: ids and integers only."""

from __future__ import annotations

import logging
import math

from app.errors import InvalidRequest, kind_and_place
from app.kv.block_pool import OutOfBlocks
from app.kv.block_table import BlockTables
from app.request import FinishReason, Request, State
from app.scheduler import policy
from app.scheduler.pace import Pace
from app.scheduler.plan import Admitted, Event, Finished, Plan, Result, Row, Token
from app.scheduler.policy import SchedulerConfig
from app.scheduler.queue import RequestQueue
from app.scheduler.seats import Seats
from app.scheduler.snapshot import Counters, Snapshot, observe

log = logging.getLogger("mlxcel.scheduler")


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
        self._seats = Seats(config.num_slots, config.max_batch_size, tables)
        self._unannounced: dict[int, None] = {}  # an ordered set: no Admitted was sent yet
        self._pace = Pace(config.itl_budget_s, config.grant_interval)
        self._may_grow = config.grows
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
        if num_needed > self._tables.num_blocks and not self._config.grows:
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
        waiting = [self._requests[request_id] for request_id in self._unannounced if request_id not in self._seats]
        return [request for request in waiting if request.arrival_s < arrived_before_s]

    def reset_prefix_cache(self) -> int:
        """Forget every prefix; returns how many blocks had a key."""
        return self._tables.prefix_cache.clear()

    def plan(self, now: float) -> Plan:
        """Choose the rows of the next tick, with their blocks in place: all that decode, then prefill as far as due.

        A pool that grows is asked for first, in a plan of its own, which has no rows (see ``resized``).
        """
        self._planned_s = now
        self._tables.prefix_cache.expire(now)
        if self._may_grow and (num_blocks := self._grown_pool()) > self._tables.num_blocks:
            return Plan(num_blocks=num_blocks)
        any_reclaimed = self._grow_decoding()
        if any_reclaimed and not self._seats.running:
            return self.plan(now)  # the only row has pushed itself out: it needs a larger pool
        chunks, copies = self._choose_chunks(may_admit=not any_reclaimed)
        blocks = self._tables.blocks
        rows = [Row.of(request, 1, blocks(request.id)) for request in self._seats.decoding]
        chunks.sort(key=lambda chunk: chunk[1] > 1)  # one token is a row like those that decode
        rows += [Row.of(request, share, blocks(request.id)) for request, share in chunks]
        return Plan(tuple(rows), tuple(copies))

    def apply(self, plan: Plan, result: Result, now: float) -> list[Event]:
        """Enter what the forward brought: computed tokens, drawn tokens, ends. Events come in the order of the rows."""
        events: list[Event] = []
        num_prefill = num_decode = num_chunks = 0
        draws, failures, block_size = result.draws, result.failures, self._tables.block_size
        for row in plan.rows:
            request = self._seats[row.request_id]
            draw = draws.get(request.id)
            if request.id in failures or (row.draws and draw is None):
                events.append(self._finish(request, FinishReason.ERROR, request.num_output, now))
                continue
            if request.id in self._unannounced:
                events.append(self._announce(request))
            request.num_computed += row.num_new
            try:
                if row.num_new > 1 or request.num_computed % block_size == 0:  # a block may have become full
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
        self._pace.observe(num_decode, num_prefill, now - self._planned_s)
        return events

    def resized(self, num_blocks: int, now: float) -> list[Event]:
        """What came of a plan that asked for a larger pool: its size now. Where memory was short, that is asked again
        when somebody has left, and a request that even the whole pool cannot hold ends."""
        if num_blocks > self._tables.num_blocks:
            self._tables.pool.extend(num_blocks)
            return []
        self._may_grow = False
        if self._seats.running or (head := self._queue.peek()) is None:
            return []
        return [self._finish(head, FinishReason.NO_MEMORY, head.num_output, now)]

    def lose_pool(self, plan: Plan, now: float) -> list[Event]:
        """In place of ``apply``, when the forward failed and took all K and V with it: whoever held blocks is requeued
        with its tokens, but a row that was in such a step before ends with an error: it may be the cause."""
        events: list[Event] = []
        for row in plan.rows:
            request = self._seats[row.request_id]
            request.num_faults += 1
            if request.num_faults > policy.MAX_FAULTS:
                events.append(self._finish(request, FinishReason.ERROR, request.num_output, now))
        for request in list(self._seats.running):
            self._requeue(request, "fault")
        self._tables.prefix_cache.clear()
        return events

    def snapshot(self) -> Snapshot:
        """What HTTP may see: a value of its own that later ticks do not change."""
        return observe(self._seats.views(), len(self._seats.running), len(self._queue), self._counters, self._tables)

    def check(self) -> None:
        """Raises Inconsistent where the books of blocks and prefix keys do not add up."""
        self._tables.check()

    def _grown_pool(self) -> int:
        """How many blocks the pool should have for the next token of all who decode, and for the next in line."""
        tables = self._tables
        num_needed = sum(tables.num_missing(request.id, len(request.tokens)) for request in self._seats.decoding)
        head = self._queue.peek()
        if head is not None and not self._seats.is_full:
            num_needed += tables.quote(head.tokens, head.cache_salt, head.use_prefix_cache).num_blocks
        return policy.doubled_pool(tables.num_blocks, tables.num_blocks - tables.num_free + num_needed)

    def _grow_decoding(self) -> bool:
        """Give each decoding row the block for its next token, at the cost of the least progressed rows where needed.

        Says whether anybody lost its blocks: if so nobody is admitted in this tick, or blocks would go to and fro.
        """
        any_reclaimed, block_size, cache = False, self._tables.block_size, self._tables.prefix_cache
        num_evicted = cache.evictions_lru
        # A row that decodes has blocks for all its tokens but the newest, which may be the first of the next block.
        for request in [each for each in self._seats.decoding if (len(each.tokens) - 1) % block_size == 0]:
            while request.state is State.DECODING:
                try:
                    self._tables.grow(request.id, len(request.tokens))
                    break
                except OutOfBlocks:
                    self._requeue(policy.reclaim_victim(self._seats.running), "reclaim")
                    any_reclaimed = True
        self._counters = self._counters.with_reclaim(any_reclaimed or cache.evictions_lru > num_evicted)
        return any_reclaimed

    def _choose_chunks(self, may_admit: bool) -> tuple[list[tuple[Request, int]], list[tuple[int, int]]]:
        """Deal the tick's prefill tokens out to parked and queued requests, in one order of priority and arrival.

        A request is admitted only into a tick that computes some of it. So its blocks are not held in advance, and the
        copy it needs is made by a forward whose failure it would share. Gives the number of tokens by request, and the
        copies (source block, target block) of the new admissions.
        """
        config, num_decoding = self._config, len(self._seats.decoding)
        num_parked = len(self._seats.running) - num_decoding
        num_prompts = num_parked + (0 if self._seats.is_full else len(self._queue))
        chunk = policy.chunk_tokens(config, num_decoding, num_prompts)
        cap = policy.max_prefill_tokens(config.max_batch_prefill_tokens, config.max_batch_prefill, config.prefill_chunk)
        if num_decoding and chunk:
            due = self._pace.chunk(chunk)
            self._pace.hold_back(not due and num_parked + len(self._queue) > 0)
            if not due:
                return [], []
            chunk = due
        elif config.prefill_chunk is None:
            chunk, cap = policy.brief(chunk, self._pace.alone_s), policy.brief(cap, self._pace.alone_s)
        room = policy.prefill_room(chunk, cap, num_decoding)
        admitted: dict[int, None] = {}
        copies: list[tuple[int, int]] = []
        while may_admit and (head := self._queue.peek()) is not None:
            if self._seats.is_full and not config.enable_preemption:
                break
            served = {request.id for request, _ in self._deal(chunk, room, head)}
            if head.id not in served or not admitted.keys() <= served or not self._make_way(head):
                break
            admitted[self._queue.pop().id] = None
            copies.extend(self._seats.take(head))
            if head.id in self._unannounced:
                head.num_cached = head.num_computed
        return self._deal(chunk, room) if num_parked or admitted else [], copies

    def _deal(self, chunk: int, room: int | None, *heads: Request) -> list[tuple[Request, int]]:
        """Whose prompts are computed in a tick, and how many tokens: the parked ones and ``heads``."""
        line = sorted([*self._seats.parked, *heads], key=policy.place)[: self._config.max_batch_prefill]
        lefts = [len(request.tokens) - self._num_computed(request) for request in line]
        shares = policy.deal(lefts, [request.priority for request in line], chunk, room)
        return [(request, share) for request, share in zip(line, shares, strict=True) if share]

    def _num_computed(self, request: Request) -> int:
        if request.state is not State.QUEUED:
            return request.num_computed
        return self._tables.quote(request.tokens, request.cache_salt, request.use_prefix_cache).num_cached

    def _make_way(self, request: Request) -> bool:
        """Whether the next request in line has a slot and its blocks. Where that is allowed and of use, rows of a lower
        priority are pushed out for it; otherwise it waits, and all who stand behind it."""
        config, tables = self._config, self._tables
        while True:
            victims = policy.preemptible(self._seats.running, request) if config.enable_preemption else []
            if self._seats.is_full and not victims:
                return False
            num_needed = tables.quote(request.tokens, request.cache_salt, request.use_prefix_cache).num_blocks
            num_decoding, num_freed = len(self._seats.decoding), tables.num_freed_by(victim.id for victim in victims)
            fits, would_fit = (
                policy.may_admit(num_needed, num_free, tables.num_blocks, config.watermark, num_decoding)
                for num_free in (tables.num_free, tables.num_free + num_freed)
            )
            if fits and not self._seats.is_full:
                return True
            if not victims or not would_fit:
                return False
            self._requeue(policy.preemption_victim(victims, config.preemption_policy), "priority")

    def _announce(self, request: Request) -> Admitted:
        del self._unannounced[request.id]
        self._counters = self._counters.with_start(request.num_prompt)
        return Admitted(request.id, request.num_cached, self._planned_s)

    def _requeue(self, request: Request, cause: str) -> None:
        """Take a running request's slot and blocks away. It keeps its tokens and its place in line."""
        self._may_grow = self._config.grows
        self._seats.leave(request)
        request.move(State.QUEUED)
        request.num_computed = 0
        self._queue.push(request)
        self._counters = self._counters.with_requeue(cause)

    def _finish(self, request: Request, reason: FinishReason, num_output: int, now: float) -> Finished:
        self._may_grow = self._config.grows
        if request.state is State.QUEUED:
            self._queue.remove(request.id)
        elif not self._seats.leave(request, is_sound=reason is not FinishReason.ERROR):
            reason = FinishReason.ERROR
        request.move(State.FINISHED, reason)
        del self._requests[request.id]
        self._unannounced.pop(request.id, None)
        self._counters = self._counters.with_end(reason.value, num_output)
        return Finished(request.id, reason, num_output, now)
