"""What a tick costs: the load of a plan, and the fit to measured ticks."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from app.request import Request
from app.scheduler.cost import BadCost, CostModel, Load, Sample, Unfit, fit, load_of, read_cost
from app.scheduler.plan import Plan, Row

COSTS = '{"tick_s": %s, "single_row_s": %s, "prefill_token_s": %s, "context_block_s": 0}'
MODEL = CostModel(0.05, 0.004, 0.0045, 0.0001)


def ticks(num_ticks: int, noise: float = 0.0, seed: int = 1) -> list[Sample]:
    source = random.Random(seed)
    loads = [
        Load(source.randint(0, 16), source.choice((0, 0, 100, 512)), source.randint(1, 100)) for _ in range(num_ticks)
    ]
    return [Sample(load, MODEL.seconds(load) * (1 + source.uniform(-noise, noise))) for load in loads]


def test_load_of_a_plan() -> None:
    decoding, fresh = Request(1, list(range(21)), 10, 50), Request(2, list(range(100)), 100, 1)
    decoding.num_computed = 20
    plan = Plan((Row.of(decoding, 1, [0, 1, 2]), Row.of(fresh, 40, [3, 4, 5, 6, 7])))
    assert load_of(plan, 8) == Load(1, 40, 3 + 5)


def test_exact_ticks_give_the_model_back() -> None:
    found = fit(ticks(60))
    for name in ("tick_s", "single_row_s", "prefill_token_s", "context_block_s"):
        assert getattr(found.model, name) == pytest.approx(getattr(MODEL, name), rel=1e-6)
    assert found.r_squared == pytest.approx(1)
    assert found.median_error < 1e-6


def test_the_error_that_is_stated_is_the_error_that_was_made() -> None:
    found = fit(ticks(2000, noise=0.2))
    assert found.median_error == pytest.approx(0.1, abs=0.02)
    assert found.model.prefill_token_s == pytest.approx(MODEL.prefill_token_s, rel=0.05)
    assert 0.9 < found.r_squared < 1


def test_a_few_stalled_ticks_do_not_move_it() -> None:
    stalled = [sample._replace(seconds=20 * sample.seconds) for sample in ticks(3)]
    assert fit(ticks(200) + stalled).model.tick_s == pytest.approx(MODEL.tick_s, rel=0.01)


def test_no_cost_is_negative_and_what_never_varied_costs_nothing() -> None:
    falling = [Sample(Load(1, 0, n), 1.0 - 0.001 * n) for n in range(1, 100)]
    model = fit(falling).model
    assert min(model.single_row_s, model.context_block_s, model.tick_s) >= 0
    assert model.prefill_token_s == 0
    assert model.seconds(Load(1, 0, 50)) == pytest.approx(0.95, rel=0.06)


@pytest.mark.parametrize("samples", [[], ticks(7), [*ticks(10), Sample(Load(1, 0, 1), 0.0)]])
def test_too_little_to_go_by(samples: list[Sample]) -> None:
    with pytest.raises(Unfit):
        fit(samples)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "is not JSON"),
        ("null", "must be a JSON object with tick_s, single_row_s"),
        ('{"tick_s": 1}', "must be a JSON object"),
        (COSTS % ('"a"', 0, 0), "tick_s must be a number of seconds"),
        (COSTS % (-1, 1, 1), "tick_s must be a number of seconds, at least 0"),
        (COSTS % ("Infinity", 1, 1), "tick_s must be a number"),
        (COSTS % (0, 0, 1), "a tick takes no time"),
    ],
)
def test_costs_that_make_no_sense_are_refused(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "cost").write_text(text)
    with pytest.raises(BadCost, match=said):
        read_cost(tmp_path / "cost")


def test_costs_that_were_written_down(tmp_path: Path) -> None:
    (tmp_path / "cost").write_text(COSTS % (0, 0.5, 0.25))
    assert read_cost(tmp_path / "cost") == CostModel(0, 0.5, 0.25, 0)
    with pytest.raises(BadCost, match="not one of m1-ultra-8b, and no file"):
        read_cost(tmp_path / "other")
