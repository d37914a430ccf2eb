"""Simulated hosts: what a request's times come to, that leaping changes nothing, and the trends that must show."""

from __future__ import annotations

import random
from dataclasses import fields, replace
from typing import Any

import pytest

from app.kv.books import capture
from app.scheduler.cost import M1_ULTRA_8B, CostModel
from app.scheduler.fake_host import HostSpec
from app.scheduler.fleet import BALANCES, simulate
from app.scheduler.policy import SchedulerConfig
from app.scheduler.report import Target, report
from app.scheduler.simulator import preemptions
from app.scheduler.workload import Arrival, Lengths, Shape, bursty, multi_turn, poisson

COST = CostModel(tick_s=1.0, single_row_s=0.1, prefill_token_s=0.01, context_block_s=0.001)


def spec_of(num_slots: int = 4, num_blocks: int = 64, block_size: int = 8, **config: Any) -> HostSpec:
    chosen = SchedulerConfig(num_slots=num_slots, max_batch_size=num_slots, **config)
    return HostSpec(chosen, num_blocks, block_size, min_prefix=1)


def test_a_lone_request_by_hand() -> None:
    (outcome,) = simulate([Arrival(5.0, 20, 3)], spec_of(), COST).outcomes
    first_s = 5.0 + 1.0 + 20 * 0.01 + 3 * 0.001  # 20 tokens reach into 3 blocks of 8
    assert outcome.admitted_s == outcome.arrived_s == 5.0
    assert outcome.first_s == pytest.approx(first_s)
    assert outcome.ended_s == pytest.approx(first_s + 2 * (1.0 + 0.1 + 3 * 0.001))
    assert (outcome.num_output, outcome.num_cached) == (3, 0)


def test_a_request_that_comes_during_a_tick_waits_for_its_end() -> None:
    first, second = simulate([Arrival(0.0, 8, 1), Arrival(0.5, 8, 1)], spec_of(), COST).outcomes
    assert second.admitted_s == first.ended_s
    assert second.first_s - second.arrived_s == pytest.approx(2 * first.ended_s - 0.5)


def test_a_full_queue_and_an_impossible_request_are_refused() -> None:
    spec = replace(spec_of(num_slots=1, num_blocks=4), max_queue_depth=1)
    arrivals = [Arrival(0.0, 33, 1), Arrival(0.1, 30, 3), Arrival(0.2, 30, 3), Arrival(0.3, 8, 8)]
    run = simulate(arrivals, spec, COST)
    assert [outcome.number for outcome in run.outcomes] == [1, 2]
    assert run.refused == [0, 3]


def test_the_next_turn_comes_after_the_answer_and_adopts_the_conversation() -> None:
    turns = list(multi_turn(3, 1.0, Shape(Lengths(16, 16), Lengths(8, 8)), seed=1, turns=3, think_s=2.0))
    first, second, third = simulate(turns, spec_of(), COST).outcomes
    assert second.arrived_s == pytest.approx(first.ended_s + turns[1].at_s)
    assert third.arrived_s == pytest.approx(second.ended_s + turns[2].at_s)
    # All that was computed is found again: everything but the last token drawn.
    assert (first.num_cached, second.num_cached, third.num_cached) == (0, 23, 47)


def test_who_waits_for_a_refused_answer_is_refused_too() -> None:
    spec = spec_of(num_blocks=2)
    run = simulate([Arrival(0.0, 17, 1), Arrival(1.0, 8, 1, after=0), Arrival(1.0, 8, 1, after=1)], spec, COST)
    assert run.refused == [0, 1, 2]


MIXED = Shape(Lengths(5, 90), Lengths(2, 70), num_prefixes=3, num_shared=20)
WORKLOADS = {
    "poisson": list(poisson(150, 0.4, MIXED, seed=3)),
    "overload": list(poisson(150, 2.0, MIXED, seed=4)),
    "bursty": list(bursty(150, 0.4, MIXED, seed=5, burst=7)),
    "conversations": list(multi_turn(120, 0.3, Shape(Lengths(5, 20), Lengths(2, 40)), seed=6, turns=4, think_s=3.0)),
    "long prompts": list(poisson(100, 0.05, Shape(Lengths(5, 300), Lengths(2, 15)), seed=8)),
    "priorities": [
        arrival._replace(priority=number % 3) for number, arrival in enumerate(poisson(150, 0.5, MIXED, seed=7))
    ],
}
SPECS = {
    "roomy": spec_of(num_blocks=400),
    "tight": spec_of(num_blocks=40, num_slots=6),
    "tight, no watermark": spec_of(num_blocks=40, num_slots=6, watermark=0.0, prefill_chunk=16),
    "preempting": spec_of(num_blocks=60, num_slots=3, enable_preemption=True),
    "no cache": replace(spec_of(num_blocks=60), prefix_cache=False),
    "forgetful": replace(spec_of(num_blocks=80), ttl_s=20.0),
    "with an ITL budget": spec_of(num_blocks=200, itl_budget_s=1.5),
    "single tokens": spec_of(num_blocks=300, block_size=1),
}


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("spec", SPECS)
def test_leaping_over_decode_ticks_changes_nothing(workload: str, spec: str) -> None:
    assert_leaps_change_nothing(WORKLOADS[workload], SPECS[spec], COST)


@pytest.mark.parametrize("seed", range(40))
def test_leaping_changes_nothing_whatever_the_load_and_the_host(seed: int) -> None:
    source = random.Random(seed)
    shape = Shape(
        Lengths(1, source.choice((10, 60, 250))),
        Lengths(1, source.choice((5, 60))),
        source.choice((0, 2, 5)),
        num_shared=source.randint(1, 40),
    )
    rate = source.choice((0.1, 0.5, 2.0))
    arrivals = [
        *poisson(40, rate, shape, seed),
        *bursty(30, rate, shape, seed, burst=source.randint(1, 9)),
    ]
    arrivals = [arrival._replace(priority=source.choice((0, 0, 1, 5))) for arrival in arrivals]
    for turn in multi_turn(
        20, rate, Shape(Lengths(1, 20), Lengths(1, 20)), seed, turns=source.randint(1, 5), think_s=1.0
    ):
        after = None if turn.after is None else turn.after + 70
        arrivals.append(turn._replace(prefix=turn.prefix + 5, after=after))
    spec = HostSpec(
        SchedulerConfig(
            num_slots=source.randint(1, 6),
            max_batch_size=source.randint(2, 6),
            prefill_chunk=source.choice((None, None, 0, 7, 64)),
            max_batch_prefill=source.randint(1, 4),
            watermark=source.choice((0.0, 0.01, 0.2)),
            itl_budget_s=source.choice((None, None, 1.3, 2.0)),
            grant_interval=source.choice((0, 3, 16)),
            enable_preemption=source.random() < 0.4,
            preemption_policy=source.choice(("longest-first", "lowest-priority")),
        ),
        num_blocks=source.choice((30, 80, 400)),
        block_size=source.choice((1, 4, 16)),
        prefix_cache=source.random() < 0.9,
        min_prefix=source.choice((1, 8, 32)),
        ttl_s=source.choice((None, 5.0, 60.0)),
        max_queue_depth=source.choice((2, 32, None)),
    )
    cost = CostModel(*(source.choice((0.01, 1.0)) * source.random() for _ in fields(CostModel)))
    assert_leaps_change_nothing(arrivals, spec, cost, source.randint(1, 3), source.choice(list(BALANCES)))


def assert_leaps_change_nothing(
    arrivals: list[Arrival],
    spec: HostSpec,
    cost: CostModel,
    num_hosts: int = 2,
    balance: str = "least-connections",
) -> None:
    """Equal to the bit: every moment, every count, and at the end every block in its place."""
    leapt, stepped = (simulate(arrivals, spec, cost, num_hosts, balance, leaps=leaps) for leaps in (True, False))
    assert leapt.outcomes == stepped.outcomes
    assert leapt.refused == stepped.refused
    assert preemptions(leapt.hosts) == preemptions(stepped.hosts)
    assert leapt.tally.num_gaps == stepped.tally.num_gaps
    assert leapt.tally.mean_gap_s == pytest.approx(stepped.tally.mean_gap_s, rel=1e-3)
    spans = zip(leapt.tally.occupancy(), stepped.tally.occupancy(), strict=True)
    assert all(ours == pytest.approx(theirs, abs=1e-6) for ours, theirs in spans)
    for ours, theirs in zip(leapt.hosts, stepped.hosts, strict=True):
        assert ours.num_ticks == theirs.num_ticks
        assert capture(ours.tables) == capture(theirs.tables)
        ours.scheduler.check()
        assert ours.scheduler.is_idle


def test_leaps_are_taken_at_all() -> None:
    run = simulate([Arrival(0.0, 8, 1000)], spec_of(num_blocks=400), COST)
    num_applied = run.hosts[0].scheduler.snapshot().counters.decode_steps
    assert run.hosts[0].num_ticks == 1000
    assert num_applied < 5


def conversations(watermark: float, seed: int) -> tuple[int, float]:
    """The seed's case: a pool of 600 MB for an 8B model, 138 blocks of 32 tokens, and conversations of three turns with
    600 tokens each; six of them, so that somebody always waits. Gives preemptions and seconds."""
    turns = multi_turn(18, 10.0, Shape(Lengths(40, 40), Lengths(600, 600)), seed, turns=3, think_s=1.0)
    spec = HostSpec(SchedulerConfig(num_slots=6, max_batch_size=6, watermark=watermark), 138, 32)
    run = simulate(list(turns), spec, M1_ULTRA_8B)
    assert len(run.outcomes) == 18
    return sum(preemptions(run.hosts).values()), max(outcome.ended_s for outcome in run.outcomes)


def test_a_higher_watermark_preempts_less_and_finishes_sooner() -> None:
    runs = [[conversations(watermark, seed) for seed in range(4)] for watermark in (0.0, 0.01, 0.05, 0.1)]
    counts = [sum(count for count, _ in run) for run in runs]
    spans = [sum(span for _, span in run) for run in runs]
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] < counts[0] / 2
    assert spans[-1] < spans[0]


def long_prompt(chunk: int) -> tuple[dict[str, Any], float]:
    """Four streams decode while a prompt of 8192 tokens is admitted: the figures, and its TTFT."""
    streams = [Arrival(0.0, 64, 40) for _ in range(4)]
    spec = HostSpec(SchedulerConfig(num_slots=5, max_batch_size=5, prefill_chunk=chunk), 1024, 32)
    arrivals = [*streams, Arrival(0.5, 8192, 16)]
    run = simulate(arrivals, spec, M1_ULTRA_8B)
    late = next(outcome for outcome in run.outcomes if outcome.number == 4)
    return report(run, arrivals, Target()), late.first_s - late.arrived_s


def test_a_small_chunk_spares_the_streams_and_delays_the_prompt() -> None:
    (small, small_ttft_s), (large, large_ttft_s) = long_prompt(512), long_prompt(2048)
    assert small["itl_s"]["p95"] < large["itl_s"]["p95"] / 2
    assert small_ttft_s > large_ttft_s
