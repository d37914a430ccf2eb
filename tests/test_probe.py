"""How far two computations of the same logits are apart."""

from __future__ import annotations

import math

import mlx.core as mx
import pytest

from app.engine.engine import Engine
from app.engine.probe import difference
from app.errors import StartError
from ops.families.tiny import build, loaded


def test_a_part_of_the_largest_logit() -> None:
    want = mx.array([[1.0, -4.0], [2.0, 0.5]])
    assert difference(want, want) == 0.0
    assert difference(want + mx.array([[0.0, 0.0], [0.0, 0.5]]), want) == 0.125


def test_a_token_that_is_never_drawn_is_no_difference() -> None:
    want = mx.array([1.0, -math.inf])
    assert difference(want, want) == 0.0
    assert difference(mx.array([1.0, 3.0]), want) == math.inf


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 1, 36])
def test_what_is_no_number_is_as_far_as_can_be(wrong: float, place: int) -> None:
    want = mx.arange(1.0, 41.0)
    got = mx.where(mx.arange(40) == place, wrong, want)
    assert difference(got, want) == math.inf
    assert difference(got[None], got[None]) == (math.inf if math.isnan(wrong) else 0.0)


def test_a_model_whose_logits_are_no_numbers_is_refused() -> None:
    model = build("llama")
    model.lm_head.weight = mx.full(model.lm_head.weight.shape, math.nan)
    with pytest.raises(StartError, match=r"'llama' cannot be served yet: its ragged logits differ .* by inf"):
        Engine(loaded("llama", model), num_blocks=8, block_size=4)
