"""Who is computed in the next tick, and what its outcome means. Decides, never computes: ids and integers only."""

from __future__ import annotations

import math
from collections.abc import Iterable

from app.kv.block_pool import OutOfBlocks
from app.kv.block_table import BlockTables
from app.request import FinishReason, Request, State
from app.scheduler import lookahead, policy
from app.scheduler.pace import Pace
from app.scheduler.plan import Admitted, Event, Finished, Plan, Result, Row, Token
from app.scheduler.policy import SchedulerConfig
from app.scheduler.queue import RequestQueue
from app.scheduler.seats import Seats
from app.scheduler.snapshot import Counters, Snapshot, observe
from app.scheduler.speculation import Drafter, Speculation, right


class Scheduler:
    """Requests from arrival to end. A tick is ``plan``, a forward by the engine, ``apply``; nothing but ``ahead`` comes
    between. ``add``, ``cancel``, ``finish`` and ``reset_prefix_cache`` are for the time between two ticks.

    Requests are known by id; once one has finished its id means nothing here. Times are seconds of the caller's clock.
    """

    def __init__(self, config: SchedulerConfig, tables: BlockTables, drafter: Drafter | None = None) -> None:
        self._config = config
        self._tables = tables
        self._queue = RequestQueue()
        self._requests: dict[int, Request] = {}
        self._seats = Seats(config.num_slots, config.max_batch_size, tables)
        self._unannounced: dict[int, None] = {}  # an ordered set: no Admitted was sent yet
        self._pace = Pace(config.itl_budget_s, config.grant_interval)
        self._speculation = Speculation(drafter, config.prompt_lookup_max_batch, tables)
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
        if not self._config.grows:
            self._tables.check_fits(request.num_prompt, request.max_tokens)
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
        """Forget every prefix; returns how many keys there were."""
        return self._tables.prefix_cache.clear()

    def plan(self, now: float) -> Plan:
        """Choose the rows of the next tick, with their blocks in place: all that decode, then prefill as far as due.

        A pool that grows is asked for first, in a plan of its own, which has no rows (see ``resized``).
        """
        self._planned_s = now
        self._tables.prefix_cache.expire(now)
        if self._may_grow and (num_blocks := self._grown_pool()) > self._tables.num_blocks:
            return Plan(num_blocks=num_blocks)
        any_reclaimed = self._grow_decoding(self._seats.decoding)
        if any_reclaimed and not self._seats.running:
            return self.plan(now)  # the only row has pushed itself out: it needs a larger pool
        chunks, copies = self._choose_chunks(may_admit=not any_reclaimed)
        drafts, blocks = self._speculation.drafts(self._seats.decoding), self._tables.blocks
        rows = [Row.of(request, 1, blocks(request.id), draft) for request, draft in drafts]
        rows += [Row.of(request, share, blocks(request.id)) for request, share in chunks]
        rows.sort(key=lambda row: row.num_new > 1)  # one token of a prompt is a row like those that decode
        gone, epoch = self._seats.changes() if rows else ((), 0)
        return Plan(tuple(rows), tuple(copies), gone=gone, epoch=epoch)

    def ahead(self, plan: Plan) -> Plan | None:
        """The step to submit while ``plan`` is in flight, to be applied right after it; None where one ends a run of
        such steps, as where anybody new may be due (see ``lookahead``)."""
        may_join = len(self._queue) > 0 and (not self._seats.is_full or self._config.enable_preemption)
        if not self._config.lookahead or may_join or self._speculation.may_propose(self._seats.decoding):
            return None
        return lookahead.ahead(plan, self._seats, self._tables)

    def apply(self, plan: Plan, result: Result, now: float) -> list[Event]:
        """Enter what the forward brought: computed tokens, drawn tokens, ends. Events come in the order of the rows."""
        rows = lookahead.wanted(plan, result, self._seats)
        if plan.num_ahead:
            self._grow_decoding([self._seats[row.request_id] for row in rows])  # by the blocks that were promised
        events: list[Event] = []
        num_prefill = num_decode = num_chunks = 0
        draws, failures, block_size = result.draws, result.failures, self._tables.block_size
        self._seats.reuse(result.reused, self._unannounced)
        for row in rows:
            request, drawn = self._seats[row.request_id], draws.get(row.request_id, ())
            if row.draft:
                drawn = right(row.draft, drawn)
            if request.id in failures or (row.draws and not drawn):
                events.append(self._finish(request, policy.failure_reason(request), request.num_output, now))
                continue
            if request.id in self._unannounced:
                events.append(self._announce(request))
            reason = None
            for draw in drawn:
                request.tokens.append(draw.token)
                events.append(Token(request.id, draw, now))
                if reason := policy.end_reason(request):
                    break
            request.num_computed = len(request.tokens) - 1 if row.draws else row.start + row.num_new
            if row.draft:
                self._counters.count_draft(len(row.draft), len(drawn) - 1)
                self._speculation.learn(request, row.draft, len(drawn) - 1)
            may_fill_block = row.num_new > 1 or request.num_computed % block_size == 0
            if may_fill_block and not self._seats.publish(request):
                events.append(self._finish(request, FinishReason.ERROR, request.num_output, now))
                continue
            if request.state is State.DECODING:
                num_decode += request.num_computed - row.start
            else:
                num_prefill += row.num_new - request.num_passed_over(row.start, row.num_new)
                num_chunks += 1
                if row.draws:
                    request.move(State.DECODING)
            if reason is not None:
                events.append(self._finish(request, reason, request.num_output, now))
        self._counters.count_tick(num_decode, num_chunks, num_prefill, plan.num_ahead > 0)
        self._pace.observe(num_decode, num_prefill, now - self._planned_s)
        self._planned_s = now  # when the turn of a step that is ahead begins
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
        for request in [self._seats[row.request_id] for row in plan.rows if row.request_id in self._seats]:
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
        num_blocks, num_wanted = self._tables.num_blocks, self._seats.num_wanted(self._queue.peek())
        return policy.doubled_pool(num_blocks, num_blocks - self._tables.num_free + num_wanted)

    def _grow_decoding(self, decoding: Iterable[Request]) -> bool:
        """Give each of these the block for its next token, at the cost of the least progressed rows where needed. Says
        whether anybody lost its blocks: if so nobody is admitted in this tick, or blocks would go to and fro."""
        any_reclaimed, block_size, cache = False, self._tables.block_size, self._tables.prefix_cache
        num_evicted = cache.evictions_lru
        # A row that decodes has blocks for all its tokens but the newest, which may be the first of the next block.
        for request in [each for each in decoding if (len(each.tokens) - 1) % block_size == 0]:
            while request.state is State.DECODING:
                try:
                    self._tables.grow(request.id, len(request.tokens))
                    break
                except OutOfBlocks:
                    self._requeue(policy.reclaim_victim(self._seats.running), "reclaim")
                    any_reclaimed = True
        self._counters.count_reclaim(any_reclaimed or cache.evictions_lru > num_evicted)
        return any_reclaimed

    def _choose_chunks(self, may_admit: bool) -> tuple[list[tuple[Request, int]], list[tuple[int, int]]]:
        """Deal the tick's prefill tokens out to parked and queued requests, in one order of priority and arrival.

        A request is admitted only into a tick that computes some of it. So its blocks are not held in advance, and the
        copy it needs is made by a forward whose failure it would share. Gives the number of tokens by request, and the
        copies (source block, target block) of the new admissions."""
        config, num_decoding = self._config, len(self._seats.decoding)
        num_parked = len(self._seats.running) - num_decoding
        if not num_parked and not self._queue:
            self._pace.hold_back(False)
            return [], []
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
            if num_parked or admitted:  # who is alone in line gets some of it for certain
                served = {request.id for request, _ in self._deal(chunk, room, head)}
                if head.id not in served or not admitted.keys() <= served:
                    break
            if not self._make_way(head):
                break
            admitted[self._queue.pop().id] = None
            copies.extend(self._seats.take(head))
            if head.id in self._unannounced:
                head.num_cached = head.num_computed
        return self._deal(chunk, room) if num_parked or admitted else [], copies

    def _deal(self, chunk: int, room: int | None, *heads: Request) -> list[tuple[Request, int]]:
        """Whose prompts are computed in a tick, and how many tokens: the parked ones and ``heads``."""
        line = sorted([*self._seats.parked, *heads], key=policy.place)[: self._config.max_batch_prefill]
        lefts = [len(request.tokens) - self._seats.num_computed(request) for request in line]
        shares = policy.deal(lefts, [request.priority for request in line], chunk, room)
        return [(request, share) for request, share in zip(line, shares, strict=True) if share]

    def _make_way(self, request: Request) -> bool:
        """Whether the next request in line has a slot and its blocks. Where that is allowed and of use, rows of a lower
        priority are pushed out for it; otherwise it waits, and all who stand behind it."""
        config, tables = self._config, self._tables
        while True:
            victims = policy.preemptible(self._seats.running, request) if config.enable_preemption else []
            if self._seats.is_full and not victims:
                return False
            num_needed = self._seats.quote(request).num_blocks
            rest = tables.num_blocks, config.watermark, len(self._seats.decoding)
            if not self._seats.is_full and policy.may_admit(num_needed, tables.num_free, *rest):
                return True
            num_free = tables.num_free + tables.num_freed_by(victim.id for victim in victims)
            if not victims or not policy.may_admit(num_needed, num_free, *rest):
                return False
            self._requeue(policy.preemption_victim(victims, config.preemption_policy), "priority")

    def _announce(self, request: Request) -> Admitted:
        del self._unannounced[request.id]
        self._counters.count_start(request.num_prompt)
        return Admitted(request.id, request.num_cached, self._planned_s)

    def _requeue(self, request: Request, cause: str) -> None:
        """Take a running request's slot and blocks away. It keeps its tokens and its place in line."""
        self._may_grow = self._config.grows
        self._seats.leave(request)
        request.move(State.QUEUED)
        request.num_computed = 0
        self._queue.push(request)
        self._counters.count_requeue(cause)

    def _finish(self, request: Request, reason: FinishReason, num_output: int, now: float) -> Finished:
        self._may_grow = self._config.grows
        if request.state is State.QUEUED:
            self._queue.remove(request.id)
        elif not self._seats.leave(request, is_sound=reason is not FinishReason.ERROR):
            reason = FinishReason.ERROR
        request.move(State.FINISHED, reason)
        del self._requests[request.id]
        self._unannounced.pop(request.id, None)
        self._speculation.forget(request.id)
        self._counters.count_end(reason.value, num_output)
        return Finished(request.id, reason, num_output, now)
