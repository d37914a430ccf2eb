"""Simulated against measured waves: the figures and the table. The waves here are simulated themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.scheduler.cost import CostModel, Fit, Load, Sample
from app.scheduler.fake_host import HostSpec
from app.scheduler.fleet import simulate
from app.scheduler.workload import Arrival
from loadtest.validate_simulator import Played, Round, compare, markdown, predict
from loadtest.waves import Outcome, Wave

COST = CostModel(0.05, 0.004, 0.0045, 0.0001)
SPEC = HostSpec()


def wave_of(level: int, cost: CostModel) -> Played:
    """A wave of a server whose ticks cost exactly ``cost``."""
    arrivals = [Arrival(0.001 * number, 100 + number, 20) for number in range(level)]
    outcomes = tuple(
        Outcome(one.arrived_s, one.first_s - one.arrived_s, one.ended_s - one.arrived_s, one.num_output)
        for one in simulate(arrivals, SPEC, cost).outcomes
    )
    rate = sum(one.num_tokens for one in outcomes) / max(one.sent_s + one.end_s for one in outcomes)
    return Played(level, arrivals, Wave(rate, outcomes))


def round_of(*played: Played) -> Round:
    """A round whose ticks cost ``COST``."""
    loads = [Load(singles, tokens, blocks) for singles in (0, 1, 4) for tokens in (3, 80, 300) for blocks in (2, 9)]
    return Round([Sample(load, COST.seconds(load)) for load in loads], list(played))


def test_a_server_that_costs_what_the_model_says_is_predicted() -> None:
    rows = compare([round_of(wave_of(1, COST), wave_of(4, COST))] * 2, SPEC)
    assert [row.level for row in rows] == [1, 4]
    assert [row.errors for row in rows] == [pytest.approx((0.0, 0.0), abs=1e-9)] * 2
    ttft_s, _ = predict(wave_of(1, COST).arrivals, SPEC, COST)
    assert rows[0].ttft_s == pytest.approx((ttft_s, ttft_s))


def test_a_model_that_is_wrong_is_found_out() -> None:
    slow = replace(COST, prefill_token_s=2 * COST.prefill_token_s, tick_s=2 * COST.tick_s)
    (row,) = compare([round_of(wave_of(4, slow))], SPEC)
    ttft_error, rate_error = row.errors
    assert ttft_error < -0.4
    assert rate_error > 0.4
    table = markdown(Fit(COST, 300, 0.98, 0.031, 0.12), [row], 1)
    assert f"| {ttft_error:+.1%} |" in table
    assert f"| {rate_error:+.1%} |" in table
    lines = table.splitlines()
    assert {line.count("|") for line in lines[:3]} == {8}
    assert "300 ticks" in lines[-1]
    assert "median 3.1%, p95 12.0%" in lines[-1]
