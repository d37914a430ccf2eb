"""Balancing over hosts, and how many are enough."""

from __future__ import annotations

import pytest

from app.scheduler.cost import CostModel
from app.scheduler.fake_host import HostSpec
from app.scheduler.fleet import simulate
from app.scheduler.policy import SchedulerConfig
from app.scheduler.report import Target, fewest_hosts, percentile, report
from app.scheduler.tally import MAX_BINS, Tally
from app.scheduler.workload import Arrival, Lengths, Shape, poisson

COST = CostModel(1.0, 0.1, 0.01, 0.0)
SPEC = HostSpec(SchedulerConfig(num_slots=2, max_batch_size=2), 200, 8, min_prefix=1)


def hosts_of(arrivals: list[Arrival], num_hosts: int, balance: str = "least-connections") -> list[int]:
    outcomes = simulate(arrivals, SPEC, COST, num_hosts, balance).outcomes
    return [outcome.host for outcome in sorted(outcomes)]


def test_least_connections_goes_round() -> None:
    assert hosts_of([Arrival(0.1 * i, 8, 50) for i in range(6)], 3) == [0, 1, 2, 0, 1, 2]
    busy, brief = Arrival(0.0, 8, 50), Arrival(1.0, 8, 2)
    assert hosts_of([busy, brief, Arrival(9.0, 8, 1)], 2) == [0, 1, 1], "the second host is free again"


def test_a_prefix_stays_where_it_is_cached_until_it_would_have_to_wait_there() -> None:
    shared = [Arrival(10.0 * i, 40, 2, prefix=7, num_shared=32) for i in range(4)]
    assert hosts_of(shared, 3, "prefix-affinity") == [0, 0, 0, 0]
    others = [Arrival(0.1, 8, 2), Arrival(0.2, 40, 2, prefix=9, num_shared=32)]
    assert hosts_of([shared[0], *others, shared[1]], 3, "prefix-affinity") == [0, 1, 2, 0]
    crowd = [Arrival(0.1 * i, 40, 50, prefix=7, num_shared=32) for i in range(4)]
    assert hosts_of(crowd, 2, "prefix-affinity") == [0, 0, 1, 1]


def test_affinity_finds_more_in_the_caches() -> None:
    arrivals = list(poisson(200, 0.3, Shape(Lengths(4, 8), Lengths(2, 4), num_prefixes=12, num_shared=64), seed=1))
    found = {}
    for balance in ("least-connections", "prefix-affinity"):
        run = simulate(arrivals, SPEC, COST, 4, balance)
        found[balance] = report(run, arrivals, Target())["prefix_tokens_reused"]
    assert found["prefix-affinity"] > found["least-connections"]


def test_figures_of_a_run() -> None:
    arrivals = [Arrival(0.0, 100, 11), Arrival(0.0, 100, 11)]
    figures = report(simulate(arrivals, SPEC, COST), arrivals, Target(ttft_s=2.5))
    # The first is read alone (2 s); the second beside its first decode (1 + 0.1 + 1 s).
    assert figures["ttft_s"]["p50"] == pytest.approx(2.0)
    assert figures["ttft_s"]["p99"] == pytest.approx(4.1)
    assert figures["good_share"] == 0.5
    assert figures["output_tokens_per_s"] == pytest.approx(22 / figures["span_s"])
    assert figures["goodput_per_s"] == pytest.approx(1 / figures["span_s"])
    assert figures["itl_s"]["p50"] == pytest.approx(1.2, rel=0.01)


@pytest.mark.parametrize("enough", [1, 2, 3, 5, 8, 13, 20])
@pytest.mark.parametrize("least", [1, 3])
def test_fewest_hosts(enough: int, least: int) -> None:
    tried: list[int] = []

    def is_enough(number: int) -> bool:
        tried.append(number)
        return number >= enough

    assert fewest_hosts(is_enough, least, 20) == max(enough, least)
    assert len(tried) == len(set(tried)) < 11
    assert fewest_hosts(lambda number: number > 20, least, 20) is None


def test_more_hosts_wait_less() -> None:
    arrivals = list(poisson(300, 1.0, Shape(Lengths(20, 60), Lengths(5, 20)), seed=2))
    waits = [report(simulate(arrivals, SPEC, COST, n), arrivals, Target())["ttft_s"]["p95"] for n in (4, 8, 16)]
    assert waits == sorted(waits, reverse=True)
    assert waits[0] > waits[-1]


def test_percentiles_are_of_raw_values() -> None:
    assert percentile([1, 2, 3, 4], 0.5) == 2
    assert percentile([1, 2, 3, 4], 0.95) == 4
    assert percentile([], 0.5) == 0


def test_gaps_are_kept_to_one_per_cent() -> None:
    tally = Tally(1)
    tally.gap(0.02, 90)
    tally.gap(0.5, 10)
    assert tally.gap_s(0.5) == pytest.approx(0.02, rel=0.006)
    assert tally.gap_s(0.95) == pytest.approx(0.5, rel=0.006)
    assert tally.mean_gap_s == pytest.approx(0.068, rel=0.006)
    assert Tally(1).gap_s(0.5) == 0


def test_occupancy_loses_no_time_as_its_spans_widen() -> None:
    tally = Tally(2, span_s=0.1)
    for host, now, *values in ((0, 0.35, 10, 2, 1), (1, 1.0, 4, 1, 0), (0, 5000.0, 0, 0, 0), (1, 5000.0, 0, 0, 0)):
        for kind, value in enumerate(values):
            tally.tell(host, kind, now, value)
    spans = tally.occupancy()
    assert len(spans) <= MAX_BINS
    total = sum(span.live_blocks * (min(span.at_s + tally.span_s, 5000.0) - span.at_s) for span in spans)
    assert total == pytest.approx(10 * (5000 - 0.35) + 4 * (5000 - 1.0))
    assert spans[len(spans) // 2].running == pytest.approx(3)
