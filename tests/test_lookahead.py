"""Which steps are submitted ahead, and that one which turns out not to be wanted changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from app.request import FinishReason, Request, State
from app.scheduler.plan import Admitted, Draw, Event, Finished, Plan, Result, Token
from app.scheduler.scheduler import Scheduler
from tests.driving import GREEDY, build_scheduler, greedy_request

BLOCK_SIZE = 4


def drawn(plan: Plan, *missing: int, token: int = 5) -> Result:
    return Result({row.request_id: (Draw(token),) for row in plan.rows if row.draws and row.request_id not in missing})


def decoding(*requests: Request, num_blocks: int = 32, **config: Any) -> tuple[Scheduler, Plan]:
    """A scheduler and its plan of the first step in which these requests decode."""
    scheduler = build_scheduler(num_blocks, BLOCK_SIZE, **{"lookahead": True, **config})
    for request in requests:
        scheduler.add(request)
    plan = scheduler.plan(0.0)
    while any(request.state is not State.DECODING for request in requests):
        scheduler.apply(plan, drawn(plan), 0.0)
        plan = scheduler.plan(0.0)
    return scheduler, plan


def ask(request_id: int, num_prompt: int = 5, max_tokens: int = 20, **fields: Any) -> Request:
    return greedy_request(request_id, range(num_prompt), max_tokens, **fields)


def test_the_same_rows_each_one_token_further() -> None:
    scheduler, plan = decoding(ask(1), ask(2, num_prompt=7))
    following = scheduler.ahead(plan)
    assert following is not None
    assert [(row.request_id, row.start, row.num_new, row.draws) for row in following.rows] == [
        (1, 6, 1, True),
        (2, 8, 1, True),
    ]
    assert (plan.num_ahead, following.num_ahead, following.kind) == (0, 1, "decode")
    scheduler.apply(plan, drawn(plan), 0.0)
    assert scheduler.ahead(following).num_ahead == 2  # type: ignore[union-attr]
    scheduler.apply(following, drawn(following), 0.0)
    counters = scheduler.snapshot().counters
    assert (counters.decode_steps, counters.lookahead_steps) == (2, 1)


class Anything:
    is_at_limit = False

    def mask(self, tokens: Sequence[int]) -> bytes:
        raise AssertionError("only the engine asks")


def test_a_constrained_row_ends_the_run() -> None:
    """What it may draw depends on the token that is still in flight."""
    scheduler, plan = decoding(ask(1), ask(2))
    assert scheduler.ahead(plan) is not None
    scheduler, plan = decoding(ask(1), ask(2, constraint=Anything()))
    assert scheduler.ahead(plan) is None


def test_off_there_is_none() -> None:
    scheduler, plan = decoding(ask(1), lookahead=False)
    assert scheduler.ahead(plan) is None


def test_a_prompt_is_no_step_to_go_on_from() -> None:
    scheduler = build_scheduler(32, BLOCK_SIZE, lookahead=True)
    scheduler.add(ask(1))
    assert scheduler.ahead(scheduler.plan(0.0)) is None


@pytest.mark.parametrize(
    ("sampling", "is_ahead"),
    [
        ({"logit_bias": ((3, 2.0),)}, True),
        ({"banned": (0,)}, True),  # ignore_eos
        ({"temperature": 1.0, "seed": 3, "top_p": 0.9}, True),
        ({"num_logprobs": 3}, True),
        ({"repetition_penalty": 1.1}, False),
        ({"presence_penalty": 0.5}, False),
        ({"frequency_penalty": 0.5}, False),
    ],
)
def test_what_a_draw_needs_to_know(sampling: dict[str, Any], is_ahead: bool) -> None:
    request = ask(1)
    request.sampling = replace(GREEDY, **sampling)
    scheduler, plan = decoding(request, ask(2))
    assert (scheduler.ahead(plan) is not None) == is_ahead


@pytest.mark.parametrize(("max_tokens", "is_ahead"), [(2, False), (3, True)])
def test_a_row_whose_answer_ends_with_the_step_in_flight(max_tokens: int, is_ahead: bool) -> None:
    scheduler, plan = decoding(ask(1, max_tokens=max_tokens))
    assert (scheduler.ahead(plan) is not None) == is_ahead


@pytest.mark.parametrize(
    ("config", "is_ahead"),
    [
        ({"num_slots": 2}, False),
        ({"num_slots": 1}, True),
        ({"num_slots": 1, "enable_preemption": True}, False),
    ],
)
def test_somebody_who_could_be_admitted_ends_the_run(config: dict[str, Any], is_ahead: bool) -> None:
    scheduler, plan = decoding(ask(1), **config)
    scheduler.add(ask(2))
    assert (scheduler.ahead(plan) is not None) == is_ahead


def test_a_run_ends_after_as_many_steps_as_a_block_has_tokens() -> None:
    scheduler, plan = decoding(ask(1, max_tokens=50))
    seen = []
    for _ in range(20):
        following = scheduler.ahead(plan)
        scheduler.apply(plan, drawn(plan), 0.0)
        plan = following or scheduler.plan(0.0)
        seen.append(plan.num_ahead)
    assert seen == [1, 2, 3, 4, 0] * 4


def test_a_block_is_taken_only_when_the_row_is_known_to_go_on() -> None:
    scheduler, plan = decoding(ask(1, num_prompt=7, end_tokens=frozenset({9})))
    (row,) = plan.rows
    following = scheduler.ahead(plan)  # its token is the first of the third block
    assert following is not None
    assert scheduler.snapshot().pool.live == len(row.blocks) == 2
    scheduler.apply(plan, drawn(plan), 0.0)
    assert scheduler.ahead(following) is not None
    assert scheduler.snapshot().pool.live == 2
    scheduler.apply(following, drawn(following), 0.0)
    assert scheduler.snapshot().pool.live == len(row.blocks) == 3


def test_blocks_are_promised_once_only() -> None:
    """Both rows go on in a new block, and one is free."""
    scheduler, plan = decoding(ask(1, 7, 5), ask(2, 7, 5), num_blocks=5, watermark=0.0)
    assert scheduler.snapshot().pool.free == 1
    assert scheduler.ahead(plan) is None


def events_of(events: list[Event], request_id: int) -> list[Event]:
    return [event for event in events if event.request_id == request_id]


@pytest.mark.parametrize("how", ["end token", "cancel", "stop string", "failure"])
def test_a_row_that_ends_with_a_step_in_flight(how: str) -> None:
    scheduler, plan = decoding(ask(1, end_tokens=frozenset({9})), ask(2), prefix_cache=True)
    following = scheduler.ahead(plan)
    assert following is not None
    result = drawn(plan)
    if how == "end token":
        result.draws[1] = (Draw(9),)
    elif how == "failure":
        del result.draws[1]
        result.failures[1] = "why"
    events = scheduler.apply(plan, result, 0.0)
    if how == "cancel":
        events += scheduler.cancel(1, 0.0)
    elif how == "stop string":
        events += scheduler.finish(1, FinishReason.STOP, 1, 0.0)
    assert isinstance(events_of(events, 1)[-1], Finished)
    before = scheduler.snapshot()
    assert scheduler.ahead(following) is None
    events = scheduler.apply(following, drawn(following), 0.0)
    assert [event.request_id for event in events] == [2]
    after = scheduler.snapshot()
    assert (after.pool, after.prefix) == (before.pool, before.prefix)
    assert after.counters.completed == before.counters.completed
    assert after.counters.completion_tokens == before.counters.completion_tokens
    scheduler.check()
    assert [row.request_id for row in scheduler.plan(0.0).rows] == [2]


def test_when_all_rows_have_ended_the_step_in_flight_counts_for_nothing() -> None:
    scheduler, plan = decoding(ask(1))
    following = scheduler.ahead(plan)
    assert following is not None
    scheduler.apply(plan, drawn(plan), 0.0)
    scheduler.cancel(1, 0.0)
    assert scheduler.is_idle
    before = scheduler.snapshot()
    assert scheduler.ahead(following) is None
    assert scheduler.apply(following, drawn(following), 0.0) == []
    assert scheduler.snapshot() == before


def test_a_row_that_went_astray_is_computed_again() -> None:
    scheduler, plan = decoding(ask(1), ask(2))
    following = scheduler.ahead(plan)
    assert following is not None
    scheduler.apply(plan, drawn(plan), 0.0)
    third = scheduler.ahead(following)
    assert third is not None
    events = scheduler.apply(following, drawn(following, 1), 0.0)
    assert [event.request_id for event in events] == [2]
    assert scheduler.ahead(third) is None
    assert [event.request_id for event in scheduler.apply(third, drawn(third), 0.0)] == [2], "it starts too far on"
    assert [(row.request_id, row.start) for row in scheduler.plan(0.0).rows] == [(1, 6), (2, 8)]


def test_a_row_that_went_astray_gets_no_block_for_it() -> None:
    scheduler, plan = decoding(ask(1, num_prompt=7), ask(2))
    following = scheduler.ahead(plan)  # the token of the first row is the first of its third block
    assert following is not None
    scheduler.apply(plan, drawn(plan), 0.0)
    assert scheduler.ahead(following) is not None
    before = scheduler.snapshot().pool.live
    scheduler.apply(following, drawn(following, 1), 0.0)
    assert scheduler.snapshot().pool.live == before


def test_a_lost_pool_requeues_the_rows_that_are_left() -> None:
    first, second = ask(1), ask(2)
    scheduler, plan = decoding(first, second)
    following = scheduler.ahead(plan)
    assert following is not None
    scheduler.apply(plan, drawn(plan), 0.0)
    scheduler.cancel(1, 0.0)
    assert scheduler.lose_pool(following, 0.0) == []
    assert second.state is State.QUEUED
    assert second.num_faults == 1
    events = scheduler.apply(plan := scheduler.plan(0.0), drawn(plan), 0.0)
    assert [type(event) for event in events] == [Token], "it was admitted before"
    assert not any(isinstance(event, Admitted) for event in events)
