"""Pace: measured ticks in, a chunk out."""

from __future__ import annotations

from app.scheduler.pace import Pace


def measured(budget_s: float | None, grant_interval: int = 16) -> Pace:
    """Decode takes 50 ms, a prefill token 1 ms."""
    pace = Pace(budget_s, grant_interval)
    for _ in range(20):
        pace.observe(4, 0, 0.05)
        pace.observe(4, 100, 0.15)
    return pace


def test_without_a_budget_a_chunk_is_due_whole():
    assert measured(None).chunk(512) == 512


def test_nothing_is_held_back_before_it_is_known_what_it_costs():
    pace = Pace(0.001, 16)
    assert pace.chunk(512) == 512
    pace.observe(4, 0, 0.05)
    assert pace.chunk(512) == 512


def test_the_chunk_fills_what_decode_leaves_of_the_budget():
    assert measured(0.1).chunk(512) in (49, 50)
    assert measured(10.0).chunk(512) == 512


def test_a_tick_of_prefill_alone_tells_the_cost_of_a_token():
    pace = Pace(0.1, 16)
    pace.observe(0, 1000, 1.0)
    pace.observe(1, 0, 0.05)
    assert pace.chunk(512) in (49, 50)


def test_what_is_held_back_is_granted_after_the_interval():
    pace = measured(0.06, grant_interval=3)
    for _ in range(3):
        assert pace.chunk(512) == 0
        pace.hold_back(True)
    assert pace.chunk(512) == 512
    pace.hold_back(False)
    assert pace.chunk(512) == 0


def test_without_an_interval_it_may_be_held_back_for_ever():
    pace = measured(0.06, grant_interval=0)
    for _ in range(1000):
        pace.hold_back(True)
    assert pace.chunk(512) == 0


def test_the_measures_follow_a_change():
    pace = measured(0.1)
    for _ in range(40):
        pace.observe(4, 0, 0.02)
        pace.observe(4, 100, 0.02 + 0.05)
    assert 150 < pace.chunk(512) <= 160


def test_a_chunk_with_its_own_overhead_settles_where_it_meets_the_budget():
    pace = Pace(0.2, 16)
    pace.observe(4, 0, 0.05)
    chunk = 512
    for _ in range(60):
        pace.observe(4, chunk, 0.05 + 0.04 + 0.001 * chunk)
        chunk = pace.chunk(512)
    assert 105 <= chunk <= 115


def test_what_a_token_costs_alone_is_learned_from_ticks_without_decode():
    pace = Pace(None, 16)
    pace.observe(4, 100, 5.0)
    pace.observe(0, 6, 0.5)  # the tick itself, hardly its tokens
    assert pace.alone_s is None
    pace.observe(0, 500, 1.0)
    assert pace.alone_s == 0.002
