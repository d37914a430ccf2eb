"""Scheduler: what one tick holds, who is let in, who has to go, and what is told of it."""

from __future__ import annotations

import pytest

from app.errors import InvalidRequest
from app.kv.block_pool import BlockPool
from app.kv.block_table import BlockTables
from app.kv.prefix_cache import PrefixCache
from app.request import FinishReason, Request, State
from app.scheduler.plan import Admitted, Draw, Event, Finished, Plan, Result, Token
from app.scheduler.policy import SchedulerConfig
from app.scheduler.scheduler import Scheduler

DRAWN = 7


class Bench:
    """A scheduler, a clock that counts ticks, and an engine that always draws the same token."""

    def __init__(self, num_blocks: int = 64, block_size: int = 4, cached: bool = True, **config) -> None:
        pool = BlockPool(num_blocks)
        self.tables = BlockTables(pool, PrefixCache(pool, block_size, cached), block_size)
        self.scheduler = Scheduler(SchedulerConfig(**config), self.tables)
        self.now = 0.0
        self.num_added = 0

    def add(self, prompt: int | list[int], max_tokens: int = 8, **fields) -> Request:
        """A request with that prompt; a number stands for as many tokens that no other request has."""
        tokens = [100 * self.num_added + 50] * prompt if isinstance(prompt, int) else list(prompt)
        request = Request(self.num_added, tokens, len(tokens), max_tokens, **fields)
        self.num_added += 1
        self.scheduler.add(request)
        return request

    def tick(self, token: int = DRAWN, failing: tuple[int, ...] = ()) -> tuple[Plan, list[Event]]:
        self.now += 1.0
        plan = self.scheduler.plan(self.now)
        draws = {row.request_id: (Draw(token),) for row in plan.rows if row.draws and row.request_id not in failing}
        events = self.scheduler.apply(plan, Result(draws, dict.fromkeys(failing, "why")), self.now + 0.5)
        self.scheduler.check()
        return plan, events

    def until_idle(self) -> list[Event]:
        events: list[Event] = []
        while not self.scheduler.is_idle:
            events += self.tick()[1]
            assert self.now < 1000
        return events


def shape(plan: Plan) -> list[tuple[int, int, int, bool]]:
    return [(row.request_id, row.start, row.num_new, row.draws) for row in plan.rows]


def test_one_request_from_arrival_to_its_last_token():
    bench = Bench()
    request = bench.add(6, max_tokens=2)
    assert not bench.scheduler.is_idle
    plan, events = bench.tick()
    assert shape(plan) == [(0, 0, 6, True)]
    assert plan.rows[0].blocks == [0, 1]
    assert events == [Admitted(0, 0, 1.0), Token(0, Draw(DRAWN), 1.5)]
    assert request.state is State.DECODING
    plan, events = bench.tick()
    assert shape(plan) == [(0, 6, 1, True)]
    assert events == [Token(0, Draw(DRAWN), 2.5), Finished(0, FinishReason.LENGTH, 2, 2.5)]
    assert bench.scheduler.is_idle
    assert bench.tables.num_free == 64
    assert request.slot is None


def test_a_tick_without_work_is_empty():
    assert Bench().tick() == (Plan(), [])


def test_an_end_token_stops_and_counts():
    bench = Bench()
    bench.add(3, end_tokens=frozenset({9}))
    bench.tick()
    assert bench.tick(token=9)[1] == [Token(0, Draw(9), 2.5), Finished(0, FinishReason.STOP, 2, 2.5)]


def test_an_end_token_as_the_last_one_allowed_is_a_stop():
    bench = Bench()
    bench.add(3, max_tokens=1, end_tokens=frozenset({9}))
    assert bench.tick(token=9)[1][-1] == Finished(0, FinishReason.STOP, 1, 1.5)


def test_a_long_prompt_goes_in_chunks_and_draws_at_its_end():
    bench = Bench(prefill_chunk=4, max_batch_prefill_tokens=4)
    bench.add(10)
    plans = [bench.tick()[0] for _ in range(4)]
    assert [shape(plan)[0] for plan in plans] == [(0, 0, 4, False), (0, 4, 4, False), (0, 8, 2, True), (0, 10, 1, True)]


def test_prompts_share_one_chunk_beside_live_decode():
    bench = Bench(prefill_chunk=6)
    bench.add(3)
    bench.tick()
    bench.add(4)
    bench.add(9)
    assert shape(bench.tick()[0]) == [(0, 3, 1, True), (1, 0, 4, True), (2, 0, 2, False)]
    assert shape(bench.tick()[0]) == [(0, 4, 1, True), (1, 4, 1, True), (2, 2, 6, False)]


def test_prompts_alone_share_the_prefill_budget():
    bench = Bench(prefill_chunk=6, max_batch_prefill=3, max_batch_prefill_tokens=10, num_slots=8, max_batch_size=8)
    for _ in range(3):
        bench.add(8)
    assert shape(bench.tick()[0]) == [(0, 0, 6, False), (1, 0, 4, False)]
    wide = Bench(prefill_chunk=6, max_batch_prefill=3, max_batch_prefill_tokens=0, num_slots=8, max_batch_size=8)
    for _ in range(5):
        wide.add(8)
    assert [row.request_id for row in wide.tick()[0].rows] == [0, 1, 2]


def test_without_chunking_prompts_go_whole():
    bench = Bench(prefill_chunk=0, max_batch_prefill_tokens=10)
    bench.add(30)
    bench.add(4)
    assert shape(bench.tick()[0]) == [(0, 0, 30, True)]
    bench.add(8)
    assert shape(bench.tick()[0]) == [(0, 30, 1, True), (1, 0, 4, True)]
    assert shape(bench.tick()[0])[-1] == (2, 0, 8, True)


def test_rows_of_one_token_come_first_whoever_they_belong_to():
    bench = Bench()
    bench.add(5)
    bench.add(1)
    assert [row.num_new for row in bench.tick()[0].rows] == [1, 5]


def test_slots_are_taken_lowest_first_and_bounded_by_the_batch():
    bench = Bench(num_slots=4, max_batch_size=2, max_batch_prefill=4)
    requests = [bench.add(3) for _ in range(3)]
    bench.tick()
    assert [request.slot for request in requests] == [0, 1, None]
    bench.scheduler.cancel(0, bench.now)
    bench.tick()
    assert [request.slot for request in requests] == [None, 1, 0]


def test_the_lowest_free_slot_is_taken_again():
    bench = Bench()
    requests = [bench.add(3) for _ in range(3)]
    bench.tick()
    bench.scheduler.cancel(1, bench.now)
    requests.append(bench.add(3))
    bench.tick()
    assert [request.slot for request in requests] == [0, None, 2, 1]


def test_a_head_that_cannot_be_admitted_does_not_hold_up_a_parked_prompt():
    bench = Bench(num_slots=1, max_batch_size=1, prefill_chunk=4, max_batch_prefill_tokens=4)
    bench.add(10)
    bench.tick()
    bench.add(3, priority=1)
    assert shape(bench.tick()[0]) == [(0, 4, 4, False)]


def test_a_parked_prompt_waits_for_one_of_a_higher_priority():
    bench = Bench(prefill_chunk=4, max_batch_prefill_tokens=4)
    bench.add(10)
    bench.tick()
    bench.add(6, priority=1)
    assert shape(bench.tick()[0]) == [(1, 0, 4, False)]
    assert shape(bench.tick()[0]) == [(1, 4, 2, True), (0, 4, 2, False)]


def test_who_does_not_fit_waits_and_nobody_of_its_rank_overtakes():
    bench = Bench(num_blocks=8, watermark=0.0)
    bench.add(20, max_tokens=4)
    bench.tick()
    bench.add(16, max_tokens=1)
    small = bench.add(2, max_tokens=1)
    assert [row.request_id for row in bench.tick()[0].rows] == [0]
    assert small.state is State.QUEUED
    bench.add(2, max_tokens=1, priority=1)
    assert [row.request_id for row in bench.tick()[0].rows] == [0, 3]
    ended = [event.request_id for event in bench.until_idle() if isinstance(event, Finished)]
    assert sorted(ended) == [0, 1, 2]


def test_the_watermark_holds_back_beside_live_decode_only():
    bench = Bench(num_blocks=8, watermark=0.5)
    bench.add(8, max_tokens=20)
    bench.tick()
    bench.add(12, max_tokens=1)
    assert len(bench.tick()[0].rows) == 1
    bench.scheduler.cancel(0, bench.now)
    assert shape(bench.tick()[0]) == [(1, 0, 12, True)]
    full = Bench(num_blocks=8, watermark=0.5)
    full.add(32, max_tokens=1)
    assert shape(full.tick()[0]) == [(0, 0, 32, True)]


def test_a_request_above_the_whole_budget_is_refused_with_the_sum():
    bench = Bench(num_blocks=4)
    bench.add(10, max_tokens=7)
    with pytest.raises(InvalidRequest, match="10 prompt tokens and 8 to come need 5 blocks of 4"):
        bench.add(10, max_tokens=8)


def test_an_id_is_used_by_one_request():
    bench = Bench()
    request = bench.add(3)
    with pytest.raises(ValueError, match="exists already"):
        bench.scheduler.add(request)


def test_reclaim_requeues_the_least_progressed_row_which_then_resumes():
    bench = Bench(num_blocks=4, watermark=0.0)
    old, young = bench.add(7, max_tokens=8), bench.add(6, max_tokens=4)
    bench.tick()
    bench.tick()
    plan, _ = bench.tick()
    assert [row.request_id for row in plan.rows] == [0]
    assert (young.state, young.num_output, young.num_computed, young.slot) == (State.QUEUED, 2, 0, None)
    assert bench.scheduler.snapshot().counters.preemptions == {"reclaim": 1}
    events = bench.until_idle()
    assert not any(isinstance(event, Admitted) for event in events)
    assert [event.num_output for event in events if isinstance(event, Finished)] == [8, 4]
    assert (old.num_output, young.num_output) == (8, 4)


def test_a_resumed_request_computes_its_output_again_and_draws_at_the_end():
    bench = Bench(num_blocks=4, watermark=0.0, cached=False)
    bench.add(7, max_tokens=8)
    bench.add(6, max_tokens=4)
    rows = []
    while not bench.scheduler.is_idle:
        rows += [row for row in shape(bench.tick()[0]) if row[0] == 1]
    assert rows == [(1, 0, 6, True), (1, 6, 1, True), (1, 0, 8, True), (1, 8, 1, True)]


def test_nobody_is_admitted_in_a_tick_that_reclaims():
    bench = Bench(num_blocks=4, watermark=0.0)
    bench.add(7, max_tokens=8)
    bench.add(6, max_tokens=4)
    bench.tick()
    bench.tick()
    bench.add(1, priority=5)
    assert [row.request_id for row in bench.tick()[0].rows] == [0]
    assert [row.request_id for row in bench.tick()[0].rows] == [0, 2]


def test_a_shared_prefix_is_adopted_and_reported():
    bench = Bench()
    text = list(range(20))
    bench.add(text, max_tokens=1)
    bench.tick()
    bench.add([*text[:10], 99, 98], max_tokens=1)
    plan, events = bench.tick()
    assert shape(plan) == [(1, 10, 2, True)]
    assert len(plan.copies) == 1
    assert plan.rows[0].blocks[:2] == [0, 1]
    assert plan.copies[0] == (2, plan.rows[0].blocks[2])
    assert events[0] == Admitted(1, 10, 2.0)
    assert bench.scheduler.snapshot().prefix.tokens_reused == 10


def test_a_request_that_opts_out_adopts_nothing():
    bench = Bench()
    bench.add(list(range(20)), max_tokens=1)
    bench.tick()
    bench.add(list(range(20)), max_tokens=1, use_prefix_cache=False)
    assert shape(bench.tick()[0]) == [(1, 0, 20, True)]


def test_the_prefix_cache_can_be_reset():
    bench = Bench()
    bench.add(list(range(20)), max_tokens=1)
    bench.tick()
    assert bench.scheduler.reset_prefix_cache() == 5
    bench.add(list(range(20)), max_tokens=1)
    assert shape(bench.tick()[0]) == [(1, 0, 20, True)]


@pytest.mark.parametrize("num_ticks", [0, 1, 2])
def test_cancel_frees_slot_and_blocks_at_once(num_ticks):
    bench = Bench(prefill_chunk=4)
    request = bench.add(6)
    for _ in range(num_ticks):
        bench.tick()
    assert bench.scheduler.cancel(0, 9.0) == [Finished(0, FinishReason.CANCELLED, request.num_output, 9.0)]
    assert bench.scheduler.is_idle
    assert bench.scheduler.waiting() == []
    assert bench.tables.num_free == 64
    assert bench.scheduler.cancel(0, 9.0) == []
    assert bench.tick() == (Plan(), [])


def test_tokens_after_a_stop_string_are_not_counted():
    bench = Bench()
    bench.add(6)
    for _ in range(3):
        bench.tick()
    assert bench.scheduler.finish(0, FinishReason.STOP, 2, 9.0) == [Finished(0, FinishReason.STOP, 2, 9.0)]
    assert bench.scheduler.finish(0, FinishReason.STOP, 2, 9.0) == []
    counters = bench.scheduler.snapshot().counters
    assert (counters.completion_tokens, counters.completed) == (2, {"stop": 1})


def test_a_stop_reaches_a_request_that_was_requeued():
    bench = Bench(num_blocks=4, watermark=0.0)
    bench.add(7, max_tokens=8)
    bench.add(6, max_tokens=4)
    for _ in range(3):
        bench.tick()
    assert bench.scheduler.finish(1, FinishReason.STOP, 1, 9.0) == [Finished(1, FinishReason.STOP, 1, 9.0)]
    assert [event.request_id for event in bench.until_idle() if isinstance(event, Finished)] == [0]


def test_a_failed_row_ends_and_the_others_go_on():
    bench = Bench()
    bench.add(5)
    bench.add(5)
    bench.tick()
    _, events = bench.tick(failing=(0,))
    assert events == [Finished(0, FinishReason.ERROR, 1, 2.5), Token(1, Draw(DRAWN), 2.5)]


def test_a_request_that_fails_in_its_first_tick_was_never_admitted():
    bench = Bench()
    bench.add(5)
    assert bench.tick(failing=(0,))[1] == [Finished(0, FinishReason.ERROR, 0, 1.5)]
    assert bench.tables.pool.num_cached == 0


def test_a_copy_that_may_not_have_been_made_is_not_published():
    bench = Bench()
    text = list(range(10))
    bench.add(text, max_tokens=1)
    bench.tick()
    bench.add([*text[:9], 99, 98], max_tokens=1)
    bench.tick(failing=(1,))
    assert bench.tables.prefix_cache.match([*text[:9], 99, 98, 97], "").num_tokens == 0


def test_a_row_without_its_draw_has_failed():
    bench = Bench()
    bench.add(5)
    plan = bench.scheduler.plan(1.0)
    assert bench.scheduler.apply(plan, Result(), 2.0) == [Finished(0, FinishReason.ERROR, 0, 2.0)]


def test_a_failed_request_leaves_no_key_on_any_block_it_held():
    bench = Bench(prefill_chunk=4)
    bench.add(list(range(6)), max_tokens=1)
    other = bench.add([9] * 6, max_tokens=1)
    bench.until_idle()
    bench.add([*range(4), 90, 91, 92, 93, 94, 95, 96])
    bench.tick()
    bench.tick(failing=(2,))
    cache = bench.tables.prefix_cache
    assert cache.match(list(range(6)), "").num_tokens == 0, "what it adopted may be the cause"
    assert cache.match([*range(4), 90, 91, 92, 93, 94], "").num_tokens == 0
    assert cache.match(other.tokens, "").num_tokens == 6


@pytest.mark.parametrize(("enabled", "running"), [(False, [0, 1]), (True, [1, 2])])
def test_a_higher_priority_takes_a_slot_only_where_preemption_is_on(enabled, running):
    bench = Bench(num_slots=2, max_batch_size=2, enable_preemption=enabled)
    victim = bench.add(4)
    bench.tick()
    bench.add(5)
    bench.tick()
    bench.add(6, priority=1)
    assert sorted(row.request_id for row in bench.tick()[0].rows) == running
    assert victim.num_output == (2 if enabled else 3)
    assert len([event for event in bench.until_idle() if isinstance(event, Finished)]) == 3


def test_an_equal_priority_preempts_nobody():
    bench = Bench(num_slots=1, max_batch_size=1, enable_preemption=True)
    bench.add(4, priority=1)
    bench.tick()
    bench.add(4, priority=1)
    assert [row.request_id for row in bench.tick()[0].rows] == [0]


def test_preemption_makes_room_for_blocks_and_keeps_what_was_drawn():
    bench = Bench(num_blocks=8, watermark=0.0, enable_preemption=True)
    low = bench.add(16, max_tokens=8)
    bench.tick()
    bench.add(20, max_tokens=2, priority=1)
    assert [row.request_id for row in bench.tick()[0].rows] == [1]
    assert (low.state, low.num_output) == (State.QUEUED, 1)
    assert bench.scheduler.snapshot().counters.preemptions == {"priority": 1}
    bench.until_idle()
    assert low.num_output == 8


def test_nobody_is_preempted_in_vain():
    bench = Bench(num_blocks=8, watermark=0.0, enable_preemption=True)
    bench.add(20, max_tokens=8, priority=1)
    low = bench.add(4, max_tokens=4)
    bench.tick()
    bench.add(16, max_tokens=2, priority=1)
    assert [row.request_id for row in bench.tick()[0].rows] == [0, 1]
    assert low.state is State.DECODING


def test_the_snapshot_shows_slots_queue_and_totals():
    bench = Bench(num_slots=2, max_batch_size=2, prefill_chunk=4)
    for _ in range(3):
        bench.add(6, max_tokens=4)
    bench.tick()
    snapshot = bench.scheduler.snapshot()
    assert (snapshot.num_active, snapshot.num_queued, snapshot.total_completed) == (2, 1, 0)
    assert [(view.id, view.request_id, view.num_prompt_computed) for view in snapshot.slots] == [(0, 0, 4), (1, 1, 4)]
    assert (snapshot.pool.live, snapshot.pool.free) == (4, 60)
    bench.until_idle()
    assert snapshot.num_active == 2
    counters = bench.scheduler.snapshot().counters
    assert (counters.started, counters.completed) == (3, {"length": 3})
    assert (counters.prompt_tokens, counters.completion_tokens) == (18, 12)
    assert (counters.prefill_tokens, counters.decode_tokens) == (18, 9)
    assert counters.prefill_chunks == 6
    assert not any(view.is_busy for view in bench.scheduler.snapshot().slots)


def test_mixed_ticks_and_decode_steps_are_counted():
    bench = Bench()
    bench.add(6, max_tokens=3)
    bench.tick()
    bench.add(6, max_tokens=2)
    bench.until_idle()
    counters = bench.scheduler.snapshot().counters
    assert (counters.decode_steps, counters.mixed_steps) == (2, 1)


def test_a_lost_pool_requeues_everybody_with_what_they_have():
    bench = Bench(prefill_chunk=6, max_batch_prefill=1, max_batch_prefill_tokens=6)
    first = bench.add(4)
    bench.tick()
    parked = bench.add(20, max_tokens=2)
    bench.tick()
    urgent = bench.add(6, priority=1)
    plan = bench.scheduler.plan(9.0)
    assert [row.request_id for row in plan.rows] == [0, 2]
    events = bench.scheduler.lose_pool(plan, 9.5)
    assert events == []
    assert [request.state for request in (first, parked, urgent)] == [State.QUEUED] * 3
    assert [request.num_computed for request in (first, parked, urgent)] == [0, 0, 0]
    assert [request.num_output for request in (first, parked, urgent)] == [2, 0, 0]
    bench.scheduler.check()
    assert bench.tables.num_free == 64
    assert bench.tables.prefix_cache.num_entries == 0
    assert bench.scheduler.snapshot().counters.preemptions == {"fault": 3}
    ends = [event for event in bench.until_idle() if isinstance(event, Finished)]
    assert {(event.request_id, event.reason) for event in ends} == {(i, FinishReason.LENGTH) for i in range(3)}


def test_a_row_is_tried_again_once_after_a_lost_pool():
    bench = Bench()
    twice = bench.add(4)
    bench.scheduler.lose_pool(bench.scheduler.plan(1.0), 1.5)
    bench.tick()
    once = bench.add(4)
    plan = bench.scheduler.plan(3.0)
    assert [row.request_id for row in plan.rows] == [0, 1]
    assert bench.scheduler.lose_pool(plan, 3.5) == [Finished(0, FinishReason.ERROR, 1, 3.5)]
    assert (twice.state, once.state) == (State.FINISHED, State.QUEUED)
    assert bench.until_idle()[-1] == Finished(1, FinishReason.LENGTH, once.max_tokens, bench.now + 0.5)


@pytest.mark.parametrize("when", ["publish", "publish_tail"])
def test_a_fault_while_publishing_ends_that_request_only(when, monkeypatch, caplog):
    bench = Bench()
    bad, good = bench.add(6, max_tokens=4), bench.add(7, max_tokens=4)
    publish = getattr(bench.tables, when)

    def failing(request_id, *args):
        if request_id == bad.id:
            raise ValueError("tokens: 1, 2, 3")
        publish(request_id, *args)

    monkeypatch.setattr(bench.tables, when, failing)
    ends = {event.request_id: event for event in bench.until_idle() if isinstance(event, Finished)}
    assert ends[bad.id].reason is FinishReason.ERROR
    assert ends[good.id].reason is FinishReason.LENGTH
    assert ends[good.id].num_output == 4
    bench.scheduler.check()
    assert bench.tables.num_free == 64
    assert f"request {bad.id}" in caplog.text
    assert "tokens" not in caplog.text


def test_waiting_can_be_asked_by_arrival():
    bench = Bench(num_slots=1, max_batch_size=1)
    bench.add(4).arrival_s = 1.0
    bench.tick()
    for arrival_s in (2.0, 3.0):
        bench.add(4).arrival_s = arrival_s
    assert [request.id for request in bench.scheduler.waiting(3.0)] == [1]
    assert [request.id for request in bench.scheduler.waiting()] == [1, 2]


def test_only_requests_without_any_computed_token_are_waiting():
    bench = Bench(num_blocks=4, watermark=0.0)
    bench.add(7, max_tokens=8)
    bench.add(6, max_tokens=4)
    for _ in range(3):
        bench.tick()
    bench.add(16, max_tokens=1)
    bench.add(1)
    assert bench.scheduler.snapshot().num_queued == 3
    assert [request.id for request in bench.scheduler.waiting()] == [2, 3]


def test_a_short_prompt_behind_a_long_one_is_not_held_up_beside_live_decode():
    bench = Bench(num_blocks=4000, num_slots=4)
    bench.add(4, max_tokens=500)
    bench.tick()
    long, short = bench.add(8000), bench.add(20)
    plan, events = bench.tick()
    assert shape(plan) == [(0, 4, 1, True), (long.id, 0, 492, False), (short.id, 0, 20, True)]
    assert Token(short.id, Draw(DRAWN), bench.now + 0.5) in events


def test_a_long_prompt_is_not_starved_by_short_ones():
    bench = Bench(num_blocks=4000, num_slots=8, max_batch_size=8, cached=False)
    bench.add(4, max_tokens=500)
    bench.tick()
    long = bench.add(3000)
    num_ticks = 0
    while long.num_output == 0:
        for _ in range(3):
            if bench.scheduler.snapshot().num_active + bench.scheduler.snapshot().num_queued < 8:
                bench.add(500, max_tokens=1)
        bench.tick()
        num_ticks += 1
    assert num_ticks <= 3000 // 384 + 1


def test_nobody_is_admitted_into_a_tick_that_computes_nothing_of_it():
    bench = Bench(num_blocks=4000, num_slots=6, max_batch_size=6, prefill_chunk=8)
    bench.add(4, max_tokens=500)
    bench.tick()
    for num_prompt in (100, 90, 2, 2):
        bench.add(num_prompt)
    for _ in range(60):
        plan, _ = bench.tick()
        assert {row.request_id for row in plan.rows} >= {
            request_id for request_id, num_computed in running(bench) if num_computed == 0
        }


def running(bench: Bench) -> list[tuple[int, int]]:
    return [(view.request_id, view.num_prompt_computed) for view in bench.scheduler.snapshot().slots if view.is_busy]


def test_a_chunk_is_held_back_and_granted_in_the_end():
    # A tick takes half a second here, whatever it holds: no chunk fits beside decode.
    bench = Bench(num_blocks=4000, itl_budget_s=0.4, grant_interval=5)
    bench.add(20, max_tokens=500)
    bench.tick()
    bench.tick()
    bench.add(30)
    lengths = [len(bench.tick()[0].rows) for _ in range(7)]
    assert lengths == [1] * 5 + [2, 2]


def test_the_chunk_shrinks_into_the_budget():
    bench = Bench(num_blocks=4000, itl_budget_s=0.8)
    bench.scheduler.add(Request(900, [1] * 16, 16, 500))

    def tick() -> int:
        bench.now += 100.0
        plan = bench.scheduler.plan(bench.now)
        took_s = 0.1 + 0.002 * (plan.num_tokens - 1)
        draws = {row.request_id: (Draw(DRAWN),) for row in plan.rows if row.draws}
        bench.scheduler.apply(plan, Result(draws), bench.now + took_s)
        return plan.num_tokens - 1

    tick()
    tick()
    bench.add(3000)
    sizes = [tick() for _ in range(6)]
    assert sizes[-1] <= 350
    assert all(300 <= size <= 350 for size in sizes[2:])


def test_a_pool_without_bound_grows_before_anybody_loses_blocks():
    bench = Bench(num_blocks=4, grows=True)
    first = bench.add(8, max_tokens=100)
    bench.tick()
    big = bench.add(40, max_tokens=4)
    bench.now += 1.0
    plan = bench.scheduler.plan(bench.now)
    assert (plan.rows, plan.num_blocks) == ((), 16)
    assert bench.scheduler.resized(16, bench.now) == []
    assert {row.request_id for row in bench.tick()[0].rows} == {first.id, big.id}
    while not bench.scheduler.is_idle:
        plan = bench.scheduler.plan(bench.now)
        if plan.num_blocks:
            bench.scheduler.resized(plan.num_blocks, bench.now)
        else:
            draws = {row.request_id: (Draw(DRAWN),) for row in plan.rows if row.draws}
            bench.scheduler.apply(plan, Result(draws), bench.now)
    assert bench.tables.num_blocks == 32
    assert bench.scheduler.snapshot().counters.preemptions == {}


def test_where_memory_is_short_the_pool_stays_and_is_asked_for_again_when_somebody_left():
    bench = Bench(num_blocks=4, grows=True)
    first = bench.add(8, max_tokens=2)
    bench.tick()
    big = bench.add(40, max_tokens=4)
    assert bench.scheduler.plan(bench.now).num_blocks == 16
    assert bench.scheduler.resized(4, bench.now) == []
    plan, events = bench.tick()
    assert [row.request_id for row in plan.rows] == [first.id]
    assert isinstance(events[-1], Finished)
    assert bench.scheduler.plan(bench.now).num_blocks == 16
    (end,) = bench.scheduler.resized(4, bench.now)
    assert end == Finished(big.id, FinishReason.NO_MEMORY, 0, bench.now)
    assert bench.scheduler.is_idle


def test_a_lone_row_that_cannot_grow_ends_when_memory_is_short():
    bench = Bench(num_blocks=2, grows=True)
    request = bench.add(7, max_tokens=20)
    bench.tick()
    bench.tick()
    assert bench.scheduler.plan(bench.now).num_blocks == 4
    bench.scheduler.resized(2, bench.now)
    assert bench.scheduler.plan(bench.now).num_blocks == 4
    (end,) = bench.scheduler.resized(2, bench.now)
    assert end == Finished(request.id, FinishReason.NO_MEMORY, 2, bench.now)


def test_prefixes_that_nobody_uses_expire():
    bench = Bench()
    bench.tables.prefix_cache._ttl_s = 10.0
    prompt = list(range(12))
    bench.add(prompt, max_tokens=1)
    bench.until_idle()
    bench.now += 8.0
    used = bench.add([*prompt, 1], max_tokens=1)
    bench.until_idle()
    assert used.num_cached == 12
    bench.now += 8.0
    again = bench.add([*prompt, 2], max_tokens=1)
    bench.until_idle()
    assert again.num_cached == 12
    bench.now += 11.0
    late = bench.add([*prompt, 3], max_tokens=1)
    bench.tick()
    assert late.num_cached == 0
    prefix = bench.scheduler.snapshot().prefix
    assert prefix.evictions_ttl >= 3
    assert prefix.misses["cold"] == 2
