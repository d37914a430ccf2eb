"""Deterministic mode: the same bits whoever else is in the step, and however a step is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from app.engine import fixed, loader
from app.engine.engine import Engine
from app.engine.fixed import BASE, SIZES, FixedShapes, Piece, prove
from app.engine.groups import grouped
from app.errors import StartError
from app.request import SamplingParams
from app.scheduler.plan import Row
from loadtest.determinism import NUM_BLOCKS, outputs, subjects
from ops.families import tiny
from tests.driving import assert_same_tokens, build_scheduler, greedy_request, plain_greedy, run
from tests.test_families import FAMILIES, PROMPTS, VOCABULARY

BLOCK_SIZE = 16


def num_outputs(engine: Engine, vocab_size: int, num_schedules: int, **fields: Any) -> list[int]:
    asked = subjects(vocab_size, **fields)
    *_, seen = outputs(engine, BLOCK_SIZE, asked, vocab_size, range(num_schedules))
    return [len(found) for found in seen]


@pytest.mark.parametrize("family", ["llama", "qwen3", "cohere", "mixtral", "gpt_oss"])
def test_one_output_in_any_schedule(family: str) -> None:
    engine = Engine(tiny.loaded(family, tiny.build(family)), NUM_BLOCKS, BLOCK_SIZE, deterministic=True)
    assert num_outputs(engine, VOCABULARY, 12) == [1] * 4


def test_without_the_mode_the_same_schedules_give_several() -> None:
    engine = Engine(tiny.loaded("llama", tiny.build("llama")), NUM_BLOCKS, BLOCK_SIZE)
    assert max(num_outputs(engine, VOCABULARY, 12)) > 1


def test_the_embedded_model(model_dir: Path) -> None:
    model = loader.load(model_dir, "auto")
    plain = plain_greedy(model.model, PROMPTS[2], 4)
    engine = Engine(model, NUM_BLOCKS, BLOCK_SIZE, deterministic=True)
    got = run(engine, build_scheduler(NUM_BLOCKS, BLOCK_SIZE), {0: [greedy_request(0, PROMPTS[2], 4)]})
    assert_same_tokens(got[0], *plain)
    assert num_outputs(engine, model.vocab_size, 2, lengths=(1, 23, 77), num_new=3) == [1] * 3


@pytest.mark.parametrize("family", [*FAMILIES, "gemma3_text", "gpt_oss"])
def test_greedy_tokens_are_those_of_the_plain_forward(family: str) -> None:
    plain = tiny.build(family)
    want = [plain_greedy(plain, prompt, 6) for prompt in PROMPTS]
    model = tiny.loaded(family, tiny.build(family))
    groups = grouped(model.kept.shapes, 1000)
    engine = Engine(model, NUM_BLOCKS, 4, deterministic=True, groups=groups)
    requests = [greedy_request(i, prompt, 6) for i, prompt in enumerate(PROMPTS)]
    scheduler = build_scheduler(NUM_BLOCKS, 4, prefill_chunk=7, windows=groups.windows)
    got = run(engine, scheduler, {2 * i: [request] for i, request in enumerate(requests)})
    for i, (tokens, logits) in enumerate(want):
        assert_same_tokens(got[i], tokens, logits)


def row(request_id: int, start: int, num_new: int, draws: bool = True) -> Row:
    return Row(request_id, [0] * 999, start, num_new, range(99), draws, 1, SamplingParams())


def test_a_step_is_cut_into_forwards_of_fixed_sizes() -> None:
    shapes = FixedShapes((2, 8, 32), 8)
    cut = list(shapes.cut([row(0, 9, 1), row(1, 4, 1), row(2, 0, 70), row(3, 5, 4, False), row(4, 7, 31)]))
    told = [[(part.request_id, part.start, part.num_new, part.draws) for part in piece.rows] for piece in cut]
    assert told == [
        [(0, 9, 1, True), (1, 4, 1, True), (2, 0, 30, False)],
        [(2, 30, 32, False)],
        [(2, 62, 8, True), (3, 5, 4, False), (4, 7, 20, False)],
        [(4, 27, 11, True)],
    ]
    assert [(piece.num_padded, piece.num_draws) for piece in cut] == [(32, 2), (32, 2), (32, 2), (32, 2)]
    assert [piece.num_padded for piece in shapes.cut([row(0, 9, 1)])] == [2]


def test_a_single_token_of_a_cut_chunk_stands_among_the_single_ones() -> None:
    (first, second) = FixedShapes((2, 8), 8).cut([row(0, 0, 7), row(1, 0, 9)])
    assert [part.num_new for part in first.rows] == [1, 7]
    assert [(part.request_id, part.start, part.num_new) for part in second.rows] == [(1, 1, 8)]


class Bent:
    """Logits that depend on the size of a forward, on a place in it, or on the width of a tile, as a test wants it."""

    def __init__(self, bad_sizes: tuple[int, ...] = (), bad_places: int = 0, bad_widths: tuple[int, ...] = ()) -> None:
        self.bad_sizes, self.bad_places, self.bad_widths = bad_sizes, bad_places, bad_widths

    def forward(self, piece: Piece) -> mx.array:
        drawn = mx.array([[float(part.tokens[-1])] for part in piece.rows])
        bent = float(piece.num_padded in self.bad_sizes) + float(piece.width in self.bad_widths)
        if piece.num_padded == self.bad_places:
            drawn = drawn + mx.arange(len(piece.rows))[:, None]
        return drawn + 0.25 * bent

    def proven(self) -> FixedShapes:
        return prove(self.forward, lambda num_blocks, block_size: None, 1000, 64)


def test_sizes_and_widths_that_show_are_left_out() -> None:
    assert Bent().proven() == FixedShapes(SIZES, 8)
    assert Bent(bad_sizes=(2, 64)).proven().sizes == tuple(size for size in SIZES if size not in (2, 64))
    assert 16 not in Bent(bad_places=16).proven().sizes
    assert Bent(bad_widths=(8,)).proven().width == 4
    assert Bent(bad_widths=fixed.WIDTHS).proven().width == 1


def test_a_blas_that_shows_places_at_every_size_is_refused() -> None:
    with pytest.raises(StartError, match="MLXCEL_SDPA_DETERMINISTIC=true is not possible with this BLAS"):
        Bent(bad_places=BASE).proven()


def test_no_forward_of_a_step_copies_the_pool() -> None:
    engine = Engine(tiny.loaded("llama", tiny.build("llama")), 8192, BLOCK_SIZE, deterministic=True)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    run(engine, build_scheduler(8192, BLOCK_SIZE), {0: [greedy_request(0, subjects(VOCABULARY)[3].prompt, 3)]})
    one_layer = engine.pool_bytes / 3
    assert mx.get_peak_memory() - before < one_layer / 4, "a step copied K or V of a layer"
