"""The worker's thread: who is told what and when, above all when something goes wrong."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Coroutine, Iterable
from typing import Any

import pytest

from app import worker as worker_module
from app.errands import Refused
from app.errors import BackendError, EngineFault, InvalidRequest, MlxcelError, Overloaded, StartError, Unavailable
from app.request import FinishReason, Request
from app.scheduler.plan import Admitted, Draw, Finished, Plan, Result, Token
from app.worker import Worker
from tests import played
from tests.driving import build_scheduler, greedy_request
from tests.played import MANY, PATIENCE_S, Mailbox, PlayedEngine, until, working


def go(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 3 * PATIENCE_S))


def ask(request_id: int, max_tokens: int = 3, num_prompt: int = 5, **fields: Any) -> Request:
    return greedy_request(request_id, range(num_prompt), max_tokens, **fields)


def ended(mail: Mailbox, *ids: int) -> bool:
    return all(mail.of(request_id) and isinstance(mail.of(request_id)[-1], Finished | Refused) for request_id in ids)


@pytest.fixture(params=[False, True], ids=["step by step", "lookahead"], autouse=True)
def lookahead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setitem(played.CONFIG, "lookahead", request.param)
    return bool(request.param)


@pytest.fixture
def watchful(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "WATCH_INTERVAL_S", 0.01)


def test_a_failed_load_is_raised_by_start() -> None:
    def load() -> Any:
        raise StartError("no model there")

    async def body() -> None:
        worker = Worker(load, 1, 600.0, lambda kind, seconds: None)
        with pytest.raises(StartError, match="no model there"):
            await worker.start()
        await worker.stop(PATIENCE_S)

    go(body())


def test_loading_refuses_and_does_not_block_the_loop() -> None:
    async def body() -> None:
        engine, loading = PlayedEngine(), threading.Event()

        def load() -> Any:
            assert loading.wait(PATIENCE_S)
            return engine, build_scheduler(8, 4)

        worker = Worker(load, 4, 600.0, lambda kind, seconds: None)
        start = asyncio.ensure_future(worker.start())
        await asyncio.sleep(0)
        with pytest.raises(Unavailable, match="Loading model"):
            worker.submit([ask(1)], Mailbox())
        with pytest.raises(Unavailable, match="Loading model"):
            await worker.reset_prefix_cache()
        loading.set()
        await start
        assert worker.status == "ready"
        await worker.stop(PATIENCE_S)

    go(body())


def test_a_drain_while_loading_is_not_forgotten_when_loaded() -> None:
    async def body() -> None:
        engine, loading = PlayedEngine(), threading.Event()

        def load() -> Any:
            assert loading.wait(PATIENCE_S)
            return engine, build_scheduler(8, 4)

        worker = Worker(load, 4, 600.0, lambda kind, seconds: None)
        start = asyncio.ensure_future(worker.start())
        await asyncio.sleep(0)
        await worker.drain(PATIENCE_S)
        loading.set()
        await start
        assert worker.status == "draining"
        await worker.stop(PATIENCE_S)
        assert engine.closed.is_set()

    go(body())


def test_news_come_in_order() -> None:
    async def body() -> None:
        ticks: list[tuple[str, float]] = []
        async with working(PlayedEngine(), ticks=ticks) as worker:
            mail = Mailbox()
            worker.submit([ask(1), ask(2, max_tokens=1)], mail)
            await until(lambda: ended(mail, 1, 2))
            assert [type(news) for news in mail.of(1)] == [Admitted, Token, Token, Token, Finished]
            assert [news.draw.token for news in mail.of(1)[1:4]] == [0, 1, 2]
            assert mail.of(1)[-1].reason is FinishReason.LENGTH
            assert mail.of(1)[-1].num_output == 3
            assert [type(news) for news in mail.of(2)] == [Admitted, Token, Finished]
            times = [news.at_s for news in mail.of(1)]
            assert times == sorted(times)
        assert [kind for kind, _ in ticks] == ["prefill", "decode", "decode"]
        assert all(seconds >= 0 for _, seconds in ticks)

    go(body())


def test_a_chunk_beside_decode_is_a_mixed_tick() -> None:
    async def body() -> None:
        ticks: list[tuple[str, float]] = []
        engine = PlayedEngine(num_steps=1)
        async with working(engine, ticks=ticks) as worker:
            mail = Mailbox()
            worker.submit([ask(1, max_tokens=5)], mail)
            await until(lambda: mail.of(1))
            worker.submit([ask(2)], mail)
            engine.allow()
            await until(lambda: ended(mail, 1, 2))
        assert "mixed" in [kind for kind, _ in ticks]

    go(body())


def test_capacity_is_all_or_none_and_refused_at_once() -> None:
    async def body() -> None:
        engine = PlayedEngine(num_steps=0)
        async with working(engine, capacity=4, num_slots=2, max_batch_size=2) as worker:
            mail, refused = Mailbox(), Mailbox()
            with pytest.raises(InvalidRequest, match=r"^n: 5 .* 4$"):
                worker.submit([ask(i) for i in range(5)], refused)
            worker.submit([ask(1), ask(2), ask(3)], mail)
            with pytest.raises(Overloaded):
                worker.submit([ask(4), ask(5)], refused)
            worker.submit([ask(6)], mail)
            with pytest.raises(Overloaded):
                worker.submit([ask(7)], refused)
            engine.allow()
            await until(lambda: ended(mail, 1, 2, 3, 6))
            worker.submit([ask(8), ask(9), ask(10), ask(11)], mail)
            await until(lambda: ended(mail, 8, 9, 10, 11))
            assert refused == []
            assert {row.request_id for plan in engine.plans for row in plan.rows} == {1, 2, 3, 6, 8, 9, 10, 11}

    go(body())


def test_a_request_the_scheduler_refuses_is_told_why() -> None:
    async def body() -> None:
        async with working(PlayedEngine(), num_blocks=4) as worker:
            mail = Mailbox()
            worker.submit([ask(1, max_tokens=100), ask(2)], mail)
            await until(lambda: ended(mail, 1, 2))
            (refusal,) = mail.of(1)
            assert isinstance(refusal.error, InvalidRequest)
            assert isinstance(mail.of(2)[-1], Finished)

    go(body())


def test_cancel_frees_slot_and_blocks_by_the_next_tick_and_no_news_follow(lookahead: bool) -> None:
    async def body() -> None:
        engine = PlayedEngine(num_steps=2)
        async with working(engine, capacity=2, num_slots=1, max_batch_size=1) as worker:
            mail = Mailbox()
            worker.submit([ask(1, max_tokens=50), ask(2, max_tokens=50)], mail)
            await until(lambda: len(mail.of(1)) == 3 and len(engine.plans) == 3)
            assert worker.snapshot.num_active == worker.snapshot.num_queued == 1
            worker.cancel([1, 2, 99])
            num_news = len(mail)
            worker.submit([ask(3, max_tokens=1), ask(4, max_tokens=1)], mail)  # its place is free at once
            engine.plans.clear()
            engine.allow(1 + lookahead)  # a step that is in flight runs out
            await until(lambda: len(engine.plans) == 1 + lookahead)
            assert [row.request_id for row in engine.plans[-1].rows] == [3]
            engine.allow()
            await until(lambda: ended(mail, 3, 4) and worker.snapshot.num_active == 0)
            assert mail[num_news:] == mail.of(3) + mail.of(4)
            assert worker.snapshot.pool.live == 0
            assert worker.snapshot.counters.completed == {"cancelled": 2, "length": 2}
            worker.cancel([1, 3])

    go(body())


def test_finish_counts_the_tokens_of_the_answer_only() -> None:
    async def body() -> None:
        engine = PlayedEngine(num_steps=3)
        async with working(engine) as worker:
            mail = Mailbox()
            worker.submit([ask(1, max_tokens=50)], mail)
            await until(lambda: len(mail) == 4)
            worker.finish(1, 2)
            worker.finish(1, 2)
            engine.allow()
            await until(lambda: worker.snapshot.total_completed)
            counters = worker.snapshot.counters
            assert counters.completed == {"stop": 1}
            assert counters.completion_tokens == 2
            assert len(mail) == 4

    go(body())


def test_the_next_step_is_submitted_before_the_tokens_of_the_last_are_read(lookahead: bool) -> None:
    async def body() -> None:
        engine = PlayedEngine(num_steps=2)
        async with working(engine) as worker:
            mail = Mailbox()
            worker.submit([ask(1, max_tokens=8)], mail)
            await until(lambda: len(engine.plans) == 3)
            assert len(mail) == 3, "admitted, and two tokens"
            await until(lambda: len(engine.submitted) == 3 + lookahead)
            engine.allow()
            await until(lambda: ended(mail, 1))
            assert [news.draw.token for news in mail[1:-1]] == list(range(8))
            assert (worker.snapshot.counters.lookahead_steps > 0) == lookahead

    go(body())


def test_first_tokens_and_ends_are_told_before_another_step_is_submitted() -> None:
    class Held(PlayedEngine):
        held = threading.Semaphore(0)

        def submit(self, plan: Plan) -> Plan:
            assert self.held.acquire(timeout=PATIENCE_S), "nobody let the step be submitted"
            return super().submit(plan)

    async def body() -> None:
        engine = Held()
        async with working(engine, lookahead=False) as worker:
            mail = Mailbox()
            worker.submit([ask(1, max_tokens=8), ask(2, max_tokens=2)], mail)
            engine.held.release()
            await until(lambda: all(any(isinstance(news, Token) for news in mail.of(each)) for each in (1, 2)))
            engine.held.release()
            await until(lambda: ended(mail, 2))
            assert len(engine.submitted) == 2
            assert not ended(mail, 1)
            engine.held.release(MANY)
            await until(lambda: ended(mail, 1))

    go(body())


def test_nobody_waits_on_a_step_in_flight_that_is_not_wanted() -> None:
    """All have left while it was in flight: it is waited for, the engine idles, and serves whoever comes."""

    async def body() -> None:
        engine = PlayedEngine(num_steps=2)
        async with working(engine) as worker:
            mail = Mailbox()
            worker.submit([ask(1, max_tokens=50), ask(2, max_tokens=50)], mail)
            await until(lambda: len(engine.plans) == 3)
            worker.cancel([1, 2])
            engine.allow()
            await until(lambda: worker.tick_age_s() == 0.0)
            assert worker.snapshot.num_active == worker.snapshot.pool.live == 0
            worker.submit([ask(3)], mail)
            await until(lambda: ended(mail, 3))
            assert mail.of(3)[-1].reason is FinishReason.LENGTH

    go(body())


@pytest.mark.parametrize("may_grow", [True, False])
def test_a_pool_without_bound_grows_or_the_request_ends(may_grow: bool) -> None:
    async def body() -> None:
        engine = PlayedEngine()
        engine.may_grow = may_grow
        async with working(engine, num_blocks=2, block_size=4, grows=True) as worker:
            mail = Mailbox()
            worker.submit([ask(1, num_prompt=20)], mail)
            await until(lambda: ended(mail, 1))
            assert mail.of(1)[-1].reason is (FinishReason.LENGTH if may_grow else FinishReason.NO_MEMORY)
            assert worker.snapshot.pool.num_blocks == (8 if may_grow else 2)
            worker.submit([ask(2)], mail)
            await until(lambda: ended(mail, 2))
            assert mail.of(2)[-1].reason is FinishReason.LENGTH

    go(body())


def test_a_failed_step_costs_nobody_anything() -> None:
    async def body() -> None:
        engine = PlayedEngine(num_steps=0)
        async with working(engine, num_slots=2, max_batch_size=2) as worker:
            mail = Mailbox()
            worker.submit([ask(1), ask(2), ask(3)], mail)
            engine.allow(2)
            await until(lambda: len(mail.of(1)) == 3 and len(mail.of(2)) == 3)
            engine.failures.append(EngineFault("out of memory"))
            engine.allow()
            await until(lambda: ended(mail, 1, 2, 3))
            for request_id in (1, 2, 3):
                assert [type(news) for news in mail.of(request_id)] == [Admitted, Token, Token, Token, Finished]
                assert [news.draw.token for news in mail.of(request_id)[1:4]] == [0, 1, 2]
            assert worker.snapshot.counters.preemptions == {"fault": 2}
            assert worker.status == "ready"

    go(body())


def test_a_second_failed_step_ends_its_rows_and_later_requests_are_served() -> None:
    async def body() -> None:
        engine = PlayedEngine(num_steps=0)
        async with working(engine, num_slots=2, max_batch_size=2) as worker:
            mail = Mailbox()
            worker.submit([ask(1), ask(2), ask(3)], mail)
            engine.failures += [EngineFault("out of memory"), EngineFault("out of memory")]
            engine.allow()
            await until(lambda: ended(mail, 1, 2, 3))
            for lost in (1, 2):
                (finished,) = mail.of(lost)
                assert finished.reason is FinishReason.ERROR
            assert mail.of(3)[-1].reason is FinishReason.LENGTH
            assert worker.status == "ready"

    go(body())


def test_a_sink_that_raises_costs_the_others_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        engine = PlayedEngine(num_steps=1)
        async with working(engine) as worker:
            mail = Mailbox()

            def broken(news: Any) -> None:
                raise ValueError("secret text")

            worker.submit([ask(1, max_tokens=50)], broken)
            worker.submit([ask(2)], mail)
            engine.allow(1)
            await until(lambda: mail.of(2))
            engine.allow()
            await until(lambda: ended(mail, 2) and worker.snapshot.num_active == 0)
            assert mail.of(2)[-1].reason is FinishReason.LENGTH
            assert worker.snapshot.counters.completed == {"cancelled": 1, "length": 1}
            assert worker.status == "ready"

    go(body())
    assert "request 1 failed" in caplog.text
    assert "secret" not in caplog.text


def test_who_is_refused_is_told_when_those_who_wait_will_have_a_slot() -> None:
    async def body() -> None:
        engine = PlayedEngine(num_steps=0)
        async with working(engine, capacity=4, num_slots=1, max_batch_size=1) as worker:
            mail = Mailbox()
            worker.submit([ask(i) for i in range(4)], mail)
            await until(lambda: worker.snapshot.num_queued == 3)
            waits = []
            # Nobody has ended yet; one every two seconds; one every minute, or long ago; all at once.
            for ended_s in ([], range(0, -20, -2), [-59, -1], [-61], [0] * 9):
                worker._ended_s.clear()
                worker._ended_s.extend(sorted(time.monotonic() + at_s for at_s in ended_s))
                with pytest.raises(Overloaded) as refused:
                    worker.submit([ask(9)], mail)
                waits.append(refused.value.retry_after_s)
            assert waits == [1.0, pytest.approx(5.4, abs=0.2), 30.0, 1.0, 1.0]
            engine.allow()
            await until(lambda: ended(mail, 0, 1, 2, 3))
            assert len(worker._ended_s) == 9 + 4

    go(body())


def test_a_request_that_waits_too_long_for_its_slot_is_refused() -> None:
    async def body() -> None:
        engine = PlayedEngine(num_steps=0)
        async with working(engine, num_slots=1, max_batch_size=1, queue_timeout_s=0.2) as worker:
            mail = Mailbox()
            began_s = time.monotonic()
            worker.submit([ask(1, max_tokens=8, arrival_s=began_s), ask(2, arrival_s=began_s)], mail)
            await asyncio.sleep(0.25)
            worker.submit([ask(3, arrival_s=time.monotonic())], mail)
            engine.allow(2)
            await until(lambda: ended(mail, 2))
            (refusal,) = mail.of(2)
            assert isinstance(refusal.error, Overloaded)
            assert str(refusal.error) == "The request waited 0 s to be admitted. Retry later."
            assert worker.snapshot.num_queued == 1
            engine.allow()
            await until(lambda: ended(mail, 1, 3))
            assert mail.of(1)[-1].num_output == 8, "a request that has its slot does not time out"
            assert isinstance(mail.of(3)[-1], Finished)

    go(body())


def test_a_failed_row_leaves_the_others_alone() -> None:
    async def body() -> None:
        engine = PlayedEngine()
        engine.results.append(Result({2: (Draw(7),)}, {1: "not a number"}))
        async with working(engine) as worker:
            mail = Mailbox()
            worker.submit([ask(1), ask(2)], mail)
            await until(lambda: ended(mail, 1, 2))
            assert mail.of(1)[-1].reason is FinishReason.ERROR
            assert mail.of(2)[-1].reason is FinishReason.LENGTH

    go(body())


@pytest.mark.parametrize("failure", [RuntimeError("broken"), SystemExit(3)])
def test_a_dead_loop_answers_every_waiter(failure: BaseException) -> None:
    async def body() -> None:
        engine = PlayedEngine(num_steps=0)
        async with working(engine, num_slots=1, max_batch_size=1) as worker:
            mail = Mailbox()
            worker.submit([ask(1), ask(2), ask(3)], mail)
            await until(engine.entered.is_set)
            reset = asyncio.ensure_future(worker.reset_prefix_cache())
            await asyncio.sleep(0)
            engine.failures.append(failure)
            engine.allow()
            async with asyncio.timeout(PATIENCE_S):
                await worker.failed.wait()
                with pytest.raises(BackendError):
                    await reset
            assert worker.status == "dead"
            assert mail.refusals() == dict.fromkeys((1, 2, 3), "inference backend error")
            assert len(mail) == 3
            assert await asyncio.to_thread(engine.closed.wait, PATIENCE_S)
            with pytest.raises(BackendError):
                worker.submit([ask(4)], mail)
            with pytest.raises(BackendError):
                await worker.reset_prefix_cache()
            await worker.drain(PATIENCE_S)
            assert worker.status == "dead"

    go(body())


def test_drain_lets_running_requests_end_and_refuses_the_rest() -> None:
    async def body() -> None:
        engine = PlayedEngine(num_steps=1)
        async with working(engine, num_slots=1, max_batch_size=1) as worker:
            mail = Mailbox()
            worker.submit([ask(1), ask(2)], mail)
            await until(lambda: mail.of(1))
            drain = asyncio.ensure_future(worker.drain(PATIENCE_S))
            await asyncio.sleep(0)
            with pytest.raises(Unavailable, match="Draining"):
                worker.submit([ask(3)], mail)
            engine.allow()
            await drain
            assert mail.refusals() == {2: "Draining"}
            assert isinstance(mail.of(2)[0].error, Unavailable)
            assert mail.of(1)[-1].reason is FinishReason.LENGTH

    go(body())


def test_drain_refuses_what_still_runs_at_the_timeout() -> None:
    async def body() -> None:
        engine = PlayedEngine(num_steps=1)
        async with working(engine) as worker:
            mail = Mailbox()
            worker.submit([ask(1, max_tokens=50)], mail)
            await until(lambda: mail.of(1))
            await worker.drain(0.02)
            assert mail.refusals() == {1: "Draining"}
            engine.allow()
            await until(lambda: worker.snapshot.num_active == 0)
            assert worker.snapshot.counters.completed == {"cancelled": 1}

    go(body())


def test_drain_of_an_idle_worker_returns_at_once() -> None:
    async def body() -> None:
        async with working(PlayedEngine()) as worker:
            await worker.drain(10 * PATIENCE_S)

    go(body())


def test_stop_refuses_ends_the_thread_and_closes_the_engine() -> None:
    async def body() -> None:
        engine = PlayedEngine(num_steps=1)
        async with working(engine) as worker:
            mail = Mailbox()
            worker.submit([ask(1, max_tokens=50)], mail)
            await until(lambda: mail.of(1))
            stop = asyncio.ensure_future(worker.stop(PATIENCE_S))
            await asyncio.sleep(0)
            assert isinstance(mail[-1].error, Unavailable)
            engine.allow()
            await stop
            assert engine.closed.is_set()
            assert "engine" not in [thread.name for thread in threading.enumerate()]

    go(body())


def test_stop_leaves_a_stuck_tick_behind() -> None:
    async def body() -> None:
        engine = PlayedEngine(num_steps=0)
        async with working(engine) as worker:
            mail = Mailbox()
            worker.submit([ask(1)], mail)
            await until(engine.entered.is_set)
            await worker.stop(0.02)
            assert not engine.closed.is_set()
            assert len(mail.refusals()) == 1

    go(body())


def test_stop_before_start_is_harmless() -> None:
    async def body() -> None:
        await Worker(lambda: pytest.fail("loaded"), 1, 600.0, lambda kind, seconds: None).stop(PATIENCE_S)

    go(body())


def test_tick_age_grows_in_a_step_and_is_0_while_idle() -> None:
    async def body() -> None:
        engine = PlayedEngine(num_steps=0)
        async with working(engine) as worker:
            assert worker.tick_age_s() == 0.0
            mail = Mailbox()
            worker.submit([ask(1)], mail)
            await until(engine.entered.is_set)
            ages = []
            for _ in range(3):
                ages.append(worker.tick_age_s())
                await asyncio.sleep(0.01)
            assert 0.0 <= ages[0] < ages[1] < ages[2]
            engine.allow()
            await until(lambda: ended(mail, 1))
            await until(lambda: worker.tick_age_s() == 0.0)

    go(body())


@pytest.mark.usefixtures("watchful")
def test_a_stuck_tick_fails_and_answers_while_it_is_still_stuck() -> None:
    async def body() -> None:
        engine = PlayedEngine(num_steps=0)
        async with working(engine, tick_timeout_s=0.05) as worker:
            mail = Mailbox()
            worker.submit([ask(1), ask(2)], mail)
            async with asyncio.timeout(PATIENCE_S):
                await worker.failed.wait()
            assert worker.status == "dead"
            assert mail.refusals() == dict.fromkeys((1, 2), "inference backend error")
            assert worker.tick_age_s() > 0.05
            with pytest.raises(BackendError):
                worker.submit([ask(3)], mail)
            engine.allow()
            await until(lambda: worker.snapshot.total_completed == 2)  # cancelled once the thread is back
            assert worker.snapshot.pool.live == 0
            assert len(mail) == 2

    go(body())


@pytest.mark.usefixtures("watchful")
def test_an_idle_worker_never_times_out() -> None:
    async def body() -> None:
        async with working(PlayedEngine(), tick_timeout_s=0.001) as worker:
            await asyncio.sleep(0.05)
            assert worker.status == "ready"

    go(body())


def test_reset_of_the_prefix_cache_is_awaited() -> None:
    async def body() -> None:
        async with working(PlayedEngine(), prefix_cache=True) as worker:
            mail = Mailbox()
            worker.submit([ask(1, num_prompt=9)], mail)
            await until(lambda: ended(mail, 1))
            assert worker.snapshot.prefix.entries > 0
            await worker.reset_prefix_cache()
            await until(lambda: worker.snapshot.prefix.entries == 0)
            worker.submit([ask(2, num_prompt=9)], mail)
            await until(lambda: ended(mail, 2))
            assert mail.of(2)[0].num_cached == 0

    go(body())


def test_a_caller_that_gives_up_on_a_reset_harms_nobody() -> None:
    async def body() -> None:
        engine = PlayedEngine(num_steps=0)
        async with working(engine) as worker:
            mail = Mailbox()
            worker.submit([ask(1)], mail)
            await until(engine.entered.is_set)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(worker.reset_prefix_cache(), 0.01)
            engine.allow()
            await until(lambda: ended(mail, 1))
            assert worker.status == "ready"

    go(body())


def test_snapshot_is_replaced_after_each_tick() -> None:
    async def body() -> None:
        engine = PlayedEngine(num_steps=0)
        async with working(engine) as worker:
            mail, seen = Mailbox(), []
            worker.submit([ask(1, max_tokens=3)], mail)
            for num_output in (1, 2):
                engine.allow(1)
                await until(lambda wanted=num_output: sum(isinstance(news, Token) for news in mail) == wanted)
                seen.append(worker.snapshot)
            assert [snapshot.slots[0].num_output for snapshot in seen] == [1, 2]
            assert seen[0].slots[0].request_id == 1
            engine.allow()
            await until(lambda: ended(mail, 1))
            idle = worker.snapshot
            assert idle.num_active == idle.num_queued == idle.pool.live == 0
            assert not any(slot.is_busy for slot in idle.slots)

    go(body())


def test_many_come_and_go_from_all_sides() -> None:
    """Submits, cancels and finishes fall anywhere between and inside ticks: each request ends once, nothing is lost."""

    async def body() -> None:
        async with working(PlayedEngine(), capacity=6, num_blocks=12, prefix_cache=True) as worker:
            mail, kept = Mailbox(), []

            async def client(ids: Iterable[int]) -> None:
                for request_id in ids:
                    worker.submit(
                        [ask(request_id, max_tokens=1 + request_id % 17, num_prompt=1 + request_id % 13)], mail
                    )
                    for _ in range(request_id % 7):
                        await asyncio.sleep(0)
                    if request_id % 3 == 0:
                        worker.cancel([request_id])
                    elif request_id % 3 == 1:
                        worker.finish(request_id, 1)
                    else:
                        kept.append(request_id)
                        await until(lambda one=request_id: ended(mail, one))

            await asyncio.gather(*(client(range(base, base + 40)) for base in range(0, 600, 100)))
            assert all(sum(isinstance(news, Finished) for news in mail.of(one)) == 1 for one in kept)
            await until(lambda: worker.snapshot.num_active + worker.snapshot.num_queued == 0)

    go(body())


def test_books_that_do_not_add_up_end_an_idle_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.worker.CHECK_INTERVAL_S", 0.0)

    async def body() -> None:
        engine, scheduler = PlayedEngine(), build_scheduler(8, 4)
        worker = Worker(lambda: (engine, scheduler), 4, 600.0, lambda kind, seconds: None)
        await worker.start()
        await worker.reset_prefix_cache()
        assert worker.status == "ready"
        scheduler._tables.pool.take()  # a block that no table holds
        with contextlib.suppress(MlxcelError):
            await worker.reset_prefix_cache()  # something to do, and then idle again
        await asyncio.wait_for(worker.failed.wait(), PATIENCE_S)
        assert worker.status == "dead"
        await worker.stop(PATIENCE_S)

    go(body())
