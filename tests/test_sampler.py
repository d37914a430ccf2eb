"""Draws against what they promise: each stage's set of tokens, the distribution, and independence from neighbours."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from app.engine import sampler
from app.engine.sampler import Drawing, uniform
from app.request import Constraint, SamplingParams
from app.scheduler.plan import Draw, Row
from app.scheduler.speculation import right

VOCABULARY = 1000


def draw(
    logits: mx.array, params: Sequence[SamplingParams], tokens: Sequence[int] = (0,), num_prompt: int = 1
) -> list[Draw]:
    rows = [Row(i, tokens, len(tokens) - 1, 1, (0,), True, num_prompt, sampling) for i, sampling in enumerate(params)]
    drawing = Drawing(logits, rows)
    mx.eval(drawing.arrays())
    return drawing.read()


def one_row(params: SamplingParams, logits: Sequence[float], **history: object) -> Draw:
    return draw(mx.array([logits]), [params], **history)[0]  # type: ignore[arg-type]


def frequencies(params: SamplingParams, logits: mx.array, num_draws: int) -> Counter[int]:
    crowd = [replace(params, seed=seed) for seed in range(num_draws)]
    return Counter(d.token for d in draw(mx.broadcast_to(logits, (num_draws, logits.size)), crowd))


def test_noise_is_uniform_and_keyed_by_seed_and_position() -> None:
    values = np.array([uniform(seed, position) for seed in range(200) for position in range(200)])
    assert values.min() >= 0
    assert values.max() < 1
    counts, _ = np.histogram(values, bins=20, range=(0, 1))
    assert abs(counts - 2000).max() < 5 * math.sqrt(2000)
    assert len({uniform(1, 2), uniform(2, 1), uniform(1, 3), uniform(3, 2)}) == 4
    assert uniform(-5, 7) == uniform(-5, 7)
    assert uniform(2**64 + 3, 1) == uniform(3, 1)


def chi_square(counts: Counter[Any], shares: dict[Any, float]) -> float:
    total = counts.total()
    assert not set(counts) - set(shares)
    return sum((counts[key] - total * share) ** 2 / (total * share) for key, share in shares.items())


@pytest.mark.parametrize("drafted", [(0, 0), (1, 2), (3, 1)])
@pytest.mark.parametrize(
    "params", [SamplingParams(), SamplingParams(temperature=0.6), SamplingParams(top_k=3), SamplingParams(top_p=0.9)]
)
def test_answers_with_drafts_have_the_distribution_of_those_without(
    params: SamplingParams, drafted: tuple[int, int]
) -> None:
    """Two positions are proposed; what is kept is counted whole: one token, two, or all three."""
    num_draws = 6000
    logits = mx.array([[1.0, 0.6, 0.2, -0.5], [0.3, 1.2, 0.0, 0.4], [0.0, -0.2, 0.9, 0.1]])
    rows = [Row(seed, (0,), 0, 3, (0,), True, 1, replace(params, seed=seed), drafted) for seed in range(num_draws)]
    drawing = Drawing(mx.tile(logits, (num_draws, 1)), [one for row in rows for one in row.each_draw()])
    mx.eval(drawing.arrays())
    drawn = [draw.token for draw in drawing.read()]
    kept: Counter[tuple[int, ...]] = Counter()
    for i in range(num_draws):
        own = tuple(Draw(token) for token in drawn[3 * i : 3 * i + 3])
        kept[tuple(draw.token for draw in right(drafted, own))] += 1
    want = np.array(mx.softmax(logits / params.temperature, axis=-1), np.float64)
    for at, row in enumerate(want):
        order = np.argsort(-row)
        inside = np.cumsum(row[order]) - row[order] < params.top_p
        want[at, order[~inside]] = 0.0
        want[at, order[params.top_k or 4 :]] = 0.0
    want /= want.sum(axis=-1, keepdims=True)
    shares: dict[tuple[int, ...], float] = {}
    for first, second, third in itertools.product(range(4), repeat=3):
        run = (first,) if first != drafted[0] else (first, second) if second != drafted[1] else (first, second, third)
        share = want[0][first] * want[1][second] * want[2][third]
        if share:
            shares[run] = shares.get(run, 0.0) + share
    freedom = len(shares) - 1
    allowed = freedom + 4 * math.sqrt(2 * freedom)  # four deviations above the mean
    assert chi_square(kept, shares) < allowed
    if want[0][drafted[0]]:  # had the draft been taken more often than that, it would show
        weights = {run: share * (1.6 if run[0] == drafted[0] else 1.0) for run, share in shares.items()}
        biased = {run: weight / sum(weights.values()) for run, weight in weights.items()}
        assert chi_square(kept, biased) > allowed


def test_greedy_takes_the_largest() -> None:
    assert one_row(SamplingParams(temperature=0.0), [0.1, 5.0, 3.0]).token == 1


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_plain_sampling_has_the_softmax_distribution(temperature: float) -> None:
    logits = mx.array([2.0, 1.0, 0.0, -1.0, -30.0])
    want = np.array(mx.softmax(logits / temperature))
    got = frequencies(SamplingParams(temperature=temperature), logits, 4000)
    for token, probability in enumerate(want):
        assert abs(got[token] - 4000 * probability) < 4.5 * math.sqrt(4000 * probability + 1)
    assert got[4] == 0


def test_top_k_keeps_k() -> None:
    logits = mx.random.normal((VOCABULARY,), key=mx.random.key(1))
    best = set(mx.argsort(-logits)[:7].tolist())
    assert set(frequencies(SamplingParams(top_k=7), logits, 800)) == best


def test_top_k_beyond_the_vocabulary_keeps_everything() -> None:
    logits = mx.zeros(5)
    assert set(frequencies(SamplingParams(top_k=999), logits, 200)) == set(range(5))


def test_top_p_keeps_the_smallest_nucleus() -> None:
    logits = mx.log(mx.array([0.05, 0.4, 0.3, 0.2, 0.05]))
    got = frequencies(SamplingParams(top_p=0.6), logits, 1000)
    assert set(got) == {1, 2}
    assert abs(got[1] - 1000 * 4 / 7) < 4.5 * math.sqrt(1000)
    assert set(frequencies(SamplingParams(top_p=1e-6), logits, 50)) == {1}


@pytest.mark.parametrize("least", [5e-324, 1e-40, 1e-12, 1e-6, 1e-5, 1e-4])
@pytest.mark.parametrize("name", ["temperature", "top_p"])
def test_the_least_values_leave_the_likeliest_token(name: str, least: float) -> None:
    """Also those that are no numbers above zero any more, once they are float32."""
    params = [SamplingParams(**{name: least}), SamplingParams(**{name: least}, top_k=3)]  # type: ignore[arg-type]
    rows = [Row(i, (0,), 0, 1, (0,), True, 1, sampling) for i, sampling in enumerate(params)]
    drawing = Drawing(mx.array([[30.0, -40.0, 45.0, 44.0]] * 2), rows)
    mx.eval(drawing.arrays())
    assert drawing.unsound() == []
    assert [drawn.token for drawn in drawing.read()] == [2, 2]


def test_a_nucleus_wider_than_the_first_look_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = mx.random.normal((VOCABULARY,), key=mx.random.key(2)) * 0.3
    narrow = frequencies(SamplingParams(top_p=0.9), logits, 300)
    assert len(narrow) > 100
    monkeypatch.setattr(sampler, "TOP_WIDTH", VOCABULARY)
    assert frequencies(SamplingParams(top_p=0.9), logits, 300) == narrow
    monkeypatch.setattr(sampler, "TOP_WIDTH", 3)
    assert frequencies(SamplingParams(top_p=0.9), logits, 300) == narrow


def test_top_p_counts_within_top_k() -> None:
    logits = mx.log(mx.array([0.4, 0.3, 0.2, 0.1]))
    # Of the two that top_k leaves, the first has 4/7 of the mass: enough for 0.5.
    assert set(frequencies(SamplingParams(top_k=2, top_p=0.5), logits, 200)) == {0}


def test_min_p_is_a_share_of_the_likeliest() -> None:
    logits = mx.log(mx.array([0.5, 0.3, 0.15, 0.05]))
    assert set(frequencies(SamplingParams(min_p=0.25), logits, 500)) == {0, 1, 2}
    wide = mx.zeros(VOCABULARY)
    assert len(frequencies(SamplingParams(min_p=0.5), wide, 900)) > sampler.TOP_WIDTH


def test_a_row_draws_the_same_alone_and_in_a_crowd() -> None:
    logits = mx.random.normal((8, VOCABULARY), key=mx.random.key(3)) * 2
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(seed=1),
        SamplingParams(seed=2, top_p=0.8),
        SamplingParams(seed=3, top_k=5, num_logprobs=3),
        SamplingParams(seed=4, min_p=0.1, temperature=0.7),
        SamplingParams(seed=5, logit_bias=((3, 4.0),)),
        SamplingParams(seed=6, repetition_penalty=1.3, presence_penalty=0.5),
        SamplingParams(temperature=0.0, banned=(1, 2)),
    ]
    crowd = draw(logits, params)
    for i, sampling in enumerate(params):
        alone = draw(logits[i : i + 1], [sampling])[0]
        assert alone.token == crowd[i].token
        assert alone.logprob == pytest.approx(crowd[i].logprob, abs=1e-6)


def test_rows_without_bias_stay_bitwise_the_same() -> None:
    logits = mx.random.normal((2, VOCABULARY), key=mx.random.key(4))
    rows = [
        Row(0, (1, 2), 1, 1, (0,), True, 1, SamplingParams(logit_bias=((5, 2.0),), frequency_penalty=1.0)),
        Row(1, (1, 2), 1, 1, (0,), True, 1, SamplingParams()),
    ]
    adjusted = Drawing(logits, rows).logits
    assert mx.array_equal(adjusted[1], logits[1]).item()
    assert not mx.array_equal(adjusted[0], logits[0]).item()


def test_logit_bias_bans_and_forces() -> None:
    assert one_row(SamplingParams(temperature=0.0, logit_bias=((1, -100.0),)), [0.0, 5.0, 3.0]).token == 2
    assert one_row(SamplingParams(temperature=1.0, logit_bias=((0, 100.0),)), [0.0, 5.0, 3.0]).token == 0
    assert one_row(SamplingParams(temperature=0.0, banned=(1, 2)), [0.0, 5.0, 3.0]).token == 0


def test_penalties_follow_their_definitions() -> None:
    logits = [4.0, 3.0, -2.0, 1.0]
    history = {"tokens": (0, 2, 1, 1), "num_prompt": 2}  # prompt 0 2, output 1 1

    def adjusted(params: SamplingParams) -> list[float]:
        row = Row(0, history["tokens"], 3, 1, (0,), True, 2, params)  # type: ignore[arg-type]
        return Drawing(mx.array([logits]), [row]).logits[0].tolist()  # type: ignore[no-any-return]

    assert adjusted(SamplingParams(repetition_penalty=2.0)) == pytest.approx([2.0, 1.5, -4.0, 1.0])
    assert adjusted(SamplingParams(presence_penalty=0.5)) == pytest.approx([4.0, 2.5, -2.0, 1.0])
    assert adjusted(SamplingParams(frequency_penalty=0.5)) == pytest.approx([4.0, 2.0, -2.0, 1.0])


def test_logprobs_are_of_the_models_own_distribution() -> None:
    logits = [1.0, 3.0, 2.0]
    got = one_row(SamplingParams(temperature=0.0, num_logprobs=2, logit_bias=((0, 50.0),)), logits)
    want = np.log(np.exp(logits) / np.exp(logits).sum())
    assert got.token == 0
    assert got.logprob == pytest.approx(want[0], abs=1e-5)
    assert [token for token, _ in got.top] == [1, 2]
    assert [logprob for _, logprob in got.top] == pytest.approx([want[1], want[2]], abs=1e-5)
    assert one_row(SamplingParams(num_logprobs=0), logits).top == ()
    assert one_row(SamplingParams(), logits).logprob is None


def test_rows_that_ask_for_different_numbers_of_logprobs() -> None:
    logits = mx.random.normal((3, VOCABULARY), key=mx.random.key(5))
    params = [SamplingParams(num_logprobs=20), SamplingParams(temperature=0.0), SamplingParams(num_logprobs=1)]
    assert [len(d.top) for d in draw(logits, params)] == [20, 0, 1]


NOT_NUMBERS = [math.nan, math.inf]


@pytest.mark.parametrize("bad", NOT_NUMBERS)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.0),
        SamplingParams(),
        SamplingParams(top_p=0.9),
        SamplingParams(temperature=0.0, repetition_penalty=1.2, num_logprobs=2),
    ],
)
def test_a_row_whose_logits_are_no_numbers_is_named_and_no_other(bad: float, params: SamplingParams) -> None:
    rows = [Row(i, (0,), 0, 1, (0,), True, 1, params) for i in range(3)]
    drawing = Drawing(mx.array([[1.0, 2.0, 9.0], [0.0, bad, 1.0], [1.0, 2.0, 9.0]]), rows)
    mx.eval(drawing.arrays())
    assert [row.request_id for row in drawing.unsound()] == [1]
    assert len(drawing.read()) == 3


def test_a_banned_token_leaves_the_row_sound() -> None:
    rows = [Row(0, (0,), 0, 1, (0,), True, 1, SamplingParams(temperature=0.0, banned=(2,)))]
    drawing = Drawing(mx.array([[1.0, 2.0, 9.0]]), rows)
    assert drawing.unsound() == []
    assert drawing.read()[0].token == 1


def test_a_draw_that_cannot_be_built_costs_nobody_else_theirs() -> None:
    bad = SamplingParams(temperature="secret")  # type: ignore[arg-type]
    rows = [Row(i, (0,), 0, 1, (0,), True, 1, bad if i == 1 else SamplingParams(temperature=0.0)) for i in range(3)]
    drawing, failures = sampler.draw_rows(mx.array([[1.0, 2.0], [1.0, 2.0], [2.0, 1.0]]), rows)
    assert drawing is not None
    assert [(row.request_id, draw.token) for row, draw in zip(drawing.rows, drawing.read(), strict=True)] == [
        (0, 1),
        (2, 0),
    ]
    assert list(failures) == [1]
    assert "secret" not in failures[1]
    assert sampler.draw_rows(mx.array([[1.0, 2.0]]), [rows[1]])[0] is None
    assert sampler.draw_rows(mx.array([[1.0, 2.0]]), []) == (None, {})


class Only:
    """Allows the same tokens at every place, as far as it knows any: a vocabulary of 8 and more."""

    is_at_limit = False

    def __init__(self, *tokens: int, num_bytes: int = VOCABULARY // 8) -> None:
        self.tokens = tokens
        self.num_bytes = num_bytes

    def mask(self, tokens: Sequence[int]) -> bytes:
        bits = np.zeros(8 * self.num_bytes, np.uint8)
        bits[list(self.tokens)] = 1
        return np.packbits(bits, bitorder="little").tobytes()


class Lost:
    is_at_limit = False

    def mask(self, tokens: Sequence[int]) -> bytes:
        raise ValueError("secret")


def constrained(i: int, sampling: SamplingParams, constraint: Constraint | None) -> Row:
    return Row(i, (0,), 0, 1, (0,), True, 1, sampling, constraint=constraint)


def drawn(logits: mx.array, rows: Sequence[Row]) -> list[Draw]:
    drawing = Drawing(logits, rows)
    mx.eval(drawing.arrays())
    assert drawing.unsound() == []
    return drawing.read()


KINDS = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(top_p=0.5),
    SamplingParams(top_k=1),
    SamplingParams(min_p=0.3, repetition_penalty=1.5),
    SamplingParams(logit_bias=((5, 100.0), (700, -100.0))),
    SamplingParams(top_p=0.9, num_logprobs=3),
]


@pytest.mark.parametrize("params", KINDS)
def test_a_constrained_row_draws_what_it_may(params: SamplingParams) -> None:
    from dataclasses import replace

    logits = mx.random.normal((200, VOCABULARY), key=mx.random.key(6)) * 3
    rows = [constrained(i, replace(params, seed=i), Only(700, 701, 999)) for i in range(200)]
    seen = {draw.token for draw in drawn(logits, rows)}
    assert seen <= {700, 701, 999}
    assert len(seen) > 1
    assert drawn(logits[:1], [constrained(0, params, Only(3))])[0].token == 3


def test_only_what_is_allowed_counts_for_a_nucleus() -> None:
    logits = mx.log(mx.array([0.9, 0.05, 0.04, 0.01, 0.0, 0.0, 0.0, 0.0]))
    allowed = Only(1, 2, 3, num_bytes=1)
    rows = [constrained(i, SamplingParams(seed=i, top_p=0.8), allowed) for i in range(300)]
    assert {draw.token for draw in drawn(mx.broadcast_to(logits, (300, 8)), rows)} == {1, 2}


def test_a_constraint_that_knows_fewer_tokens_than_the_model_allows_no_others() -> None:
    rows = [constrained(0, SamplingParams(temperature=0.0), Only(2, num_bytes=1))]
    assert drawn(mx.arange(100)[None], rows)[0].token == 2


def test_neighbours_of_a_constrained_row_keep_their_bits() -> None:
    logits = mx.random.normal((3, VOCABULARY), key=mx.random.key(7))
    for params in KINDS:
        plain = [constrained(i, params, None) for i in range(3)]
        mixed = [plain[0], constrained(1, params, Only(4, 5)), plain[2]]
        one, other = Drawing(logits, plain).logits, Drawing(logits, mixed).logits
        assert mx.array_equal(one[mx.array([0, 2])], other[mx.array([0, 2])]).item()
        assert not mx.array_equal(one[1], other[1]).item()
        alone, together = drawn(logits, plain), drawn(logits, mixed)
        assert (together[0], together[2]) == (alone[0], alone[2])


def test_logprobs_of_a_constrained_row_are_the_models_own() -> None:
    logits = mx.array([[1.0, 3.0, 2.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    (got,) = drawn(logits, [constrained(0, SamplingParams(temperature=0.0, num_logprobs=2), Only(0, num_bytes=1))])
    want = np.array(logits[0] - mx.logsumexp(logits))
    assert got.token == 0
    assert got.logprob == pytest.approx(want[0], abs=1e-5)
    assert [token for token, _ in got.top] == [1, 2]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_constraint_does_not_hide_logits_that_are_no_numbers(bad: float) -> None:
    logits = mx.array([[0.0, bad, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    rows = [constrained(0, SamplingParams(temperature=0.0), Only(0, num_bytes=1))]
    assert Drawing(logits, rows).unsound() == rows


def test_a_constraint_that_fails_costs_nobody_else_their_draw() -> None:
    rows = [constrained(i, SamplingParams(temperature=0.0), Lost() if i == 1 else None) for i in range(3)]
    drawing, failures = sampler.draw_rows(mx.array([[1.0, 2.0], [1.0, 2.0], [2.0, 1.0]]), rows)
    assert drawing is not None
    assert [draw.token for draw in drawing.read()] == [1, 0]
    assert list(failures) == [1]
    assert "secret" not in failures[1]
