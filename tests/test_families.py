"""The ragged step on unmodified mlx-lm models of many families, tiny and random, against their own generation.
Of every family logits are compared, and rows cancelled and requeued, in test_coverage.py."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import pytest

from app.engine.attention import LayerCache
from app.engine.engine import Engine
from app.engine.groups import grouped
from app.engine.storage import LayerShape
from app.errors import StartError
from app.kv.block_pool import BlockPool
from app.kv.block_table import BlockTables
from app.kv.layout import ONE_GROUP, Layout
from app.kv.prefix_cache import PrefixCache
from app.request import FinishReason, SamplingParams
from app.scheduler.plan import Plan, Row
from app.scheduler.policy import SchedulerConfig
from app.scheduler.scheduler import Scheduler
from ops.families.tiny import build, described, loaded
from tests.driving import assert_same_tokens, build_scheduler, greedy_request, plain_greedy, run

VOCABULARY = described()["tiny"]["vocab_size"]
FAMILIES = (
    "llama",
    "llama tied",
    "qwen2",
    "qwen3",
    "phi3",
    "gemma",
    "olmo2",
    "cohere",
    "granite",
    "starcoder2",
    "mixtral",
    "qwen3_moe",
    "qwen2_moe",
    "smollm3",
    "stablelm",
    "glm4",
    "seed_oss",
    "internlm2",
    "olmoe",
)
# Some of their layers see the last eight tokens.
SLIDING = (
    "llama sliding",
    "gemma3_text",
    "gpt_oss",
    "cohere2",
    "olmo3",
    "exaone4",
    "ministral3",
    "mimo_v2_flash",
)
PROMPTS = [[(7 * i + 13 * n) % VOCABULARY for i in range(n)] for n in (1, 9, 26, 5)]
NUM_NEW = 8


@pytest.mark.parametrize("lookahead", [False, True], ids=["step by step", "lookahead"])
@pytest.mark.parametrize("family", [*FAMILIES, *SLIDING])
def test_staggered_rows_equal_the_plain_forward(family: str, lookahead: bool) -> None:
    plain = build(family)
    want = [plain_greedy(plain, prompt, NUM_NEW) for prompt in PROMPTS]
    engine = Engine(loaded(family, build(family)), num_blocks=64, block_size=4)
    for chunk in (3, 64):
        scheduler = build_scheduler(64, 4, prefill_chunk=chunk, lookahead=lookahead)
        requests = [greedy_request(i, prompt, NUM_NEW) for i, prompt in enumerate(PROMPTS)]
        got = run(engine, scheduler, {2 * i: [request] for i, request in enumerate(requests)})
        for i, (tokens, logits) in enumerate(want):
            assert_same_tokens(got[i], tokens, logits)
        assert (scheduler.snapshot().counters.lookahead_steps > 0) == lookahead


@pytest.mark.parametrize("lookahead", [False, True], ids=["step by step", "lookahead"])
@pytest.mark.parametrize("family", SLIDING)
def test_sliding_layers_with_an_adopted_prefix(family: str, lookahead: bool) -> None:
    """The prefix is three windows long, and what a sliding layer still sees of it comes from adopted blocks."""
    model = build(family)
    prompts = [[*PROMPTS[2], *end] for end in ([1, 2, 3], [4, 5, 6, 7, 8, 9, 10, 11, 12, 13])]
    want = [plain_greedy(model, prompt, NUM_NEW) for prompt in prompts]
    engine = Engine(loaded(family, build(family)), num_blocks=64, block_size=4)
    for chunk in (3, 64):
        scheduler = build_scheduler(64, 4, prefix_cache=True, prefill_chunk=chunk, lookahead=lookahead)
        for i, (prompt, (tokens, logits)) in enumerate(zip(prompts, want, strict=True)):
            request = greedy_request(i, prompt, NUM_NEW)
            assert_same_tokens(run(engine, scheduler, {0: [request]})[i], tokens, logits)
            assert request.num_cached == (len(PROMPTS[2]) if i else 0)


@pytest.mark.parametrize("lookahead", [False, True], ids=["step by step", "lookahead"])
@pytest.mark.parametrize("family", SLIDING)
def test_blocks_behind_a_window_are_given_back(family: str, lookahead: bool) -> None:
    """Long answers in a pool that could not hold all their tokens in all layers at once; then again, with a prefix that
    is known from before; and nothing that is drawn differs from the plain forward."""
    model, num_new = build(family), 60
    prompts = [*PROMPTS[:3], [*PROMPTS[2], 3, 1, 4, 1, 5]]
    want = [plain_greedy(model, prompt, num_new) for prompt in prompts]
    kept = loaded(family, build(family))
    groups = grouped(kept.kept.shapes, 1000)
    layout = Layout(groups.windows)
    if family == "mimo_v2_flash":  # its layers are of two shapes, which no block can hold alike
        assert layout == ONE_GROUP
        return
    assert layout.window == 9, "a token more than they see"
    num_blocks = 60 * layout.num_groups
    engine = Engine(kept, num_blocks, 4, groups=groups)
    assert engine.decode_path.endswith("and keep no more")
    cache = PrefixCache(BlockPool(num_blocks), 4, min_tokens=1, layout=layout)
    tables = BlockTables(cache._pool, cache, 4)
    most_live = 0

    def watch(tick: int, scheduler: Scheduler) -> None:
        nonlocal most_live
        most_live = max(most_live, tables.pool.num_live)
        tables.check()

    for chunk in (3, 64):
        scheduler = Scheduler(replace(SchedulerConfig(), prefill_chunk=chunk, lookahead=lookahead), tables)
        requests = [greedy_request(i, prompt, num_new) for i, prompt in enumerate(prompts)]
        got = run(engine, scheduler, {2 * i: [request] for i, request in enumerate(requests)}, watch)
        for i, (tokens, logits) in enumerate(want):
            assert_same_tokens(got[i], tokens, logits)
    num_all = sum(tables.blocks_for(len(prompt) + num_new) for prompt in prompts)
    num_sliding = sum(window is not None for window in layout.windows)
    assert most_live < num_all * (1 - 0.6 * num_sliding / layout.num_groups)
    assert requests[3].num_cached > 0


@pytest.mark.parametrize(
    ("num_full", "num_sliding", "windows"),
    [
        (2, 4, (None, 9, 9)),
        (13, 14, (None,) * 2 + (9,) * 2),
        (2, 3, (None,) * 2 + (9,) * 3),
        (0, 5, (9,)),
        (5, 0, (None,)),
    ],
)
def test_groups_waste_little(num_full: int, num_sliding: int, windows: tuple[int | None, ...]) -> None:
    full = LayerShape(2, 16, 16, mx.float32)
    groups = grouped([*[full] * num_full, *[replace(full, window=8)] * num_sliding], 1000)
    assert groups.windows == windows
    assert groups.bytes_per_token <= 1.1 * full.bytes_per_token * (num_full + num_sliding)


@pytest.mark.parametrize("family", ["llama sliding", "gemma3_text"])
def test_what_is_no_number_is_given_back_without_harm(family: str) -> None:
    """It shows when the prompt's last token draws. Its first blocks are somebody else's by then."""
    model, bad = build(family), 96
    kept = loaded(family, model)
    groups = grouped(kept.kept.shapes, 1000)
    num_blocks = 14 * groups.num_groups
    engine = Engine(kept, num_blocks, 4, groups=groups)
    model.model.embed_tokens.weight[bad] = mx.nan
    scheduler = build_scheduler(
        num_blocks, 4, windows=groups.windows, prefill_chunk=4, num_slots=4, max_batch_prefill=4
    )
    broken = greedy_request(0, [bad] * 33, 2)
    others = [greedy_request(i, PROMPTS[1][:5], 6) for i in (1, 2, 3)]
    requests = [broken, *others]
    for request in requests:
        request.sampling = replace(request.sampling, banned=(bad,))
    run(engine, scheduler, {0: [broken], 4: others})
    assert broken.finish_reason is FinishReason.ERROR
    assert [request.finish_reason for request in others] == [FinishReason.LENGTH] * 3


@pytest.mark.parametrize("lookahead", [False, True], ids=["step by step", "lookahead"])
def test_layers_that_share_a_pool_write_it_in_place(lookahead: bool) -> None:
    """Three layers one after the other write to the same arrays in one forward."""
    kept = loaded("gemma3_text", build("gemma3_text"))
    groups = grouped(kept.kept.shapes, 1000)
    assert (len(groups.pools), groups.num_groups) == (1, 3)
    num_blocks = 30_000
    engine = Engine(kept, num_blocks, 4, groups=groups)
    scheduler = build_scheduler(num_blocks, 4, windows=groups.windows, lookahead=lookahead, num_slots=4)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    run(engine, scheduler, {0: [greedy_request(i, PROMPTS[2], 40) for i in range(4)]})
    assert mx.get_peak_memory() - before < engine.pool_bytes / 4, "a step copied K or V"


def test_a_family_with_another_cache_is_refused_by_name() -> None:
    with pytest.raises(StartError, match="'mamba' cannot be served yet: its layers keep ArraysCache"):
        Engine(loaded("mamba", build("mamba")), num_blocks=8, block_size=4)


def test_a_family_that_passes_the_seam_by_is_refused_by_name() -> None:
    model = build("gemma2")
    with pytest.raises(StartError, match="'gemma2' cannot be served yet"):
        Engine(loaded("gemma2", model), num_blocks=8, block_size=4)


def test_a_window_that_is_not_the_models_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt longer than the window is tried at start. Here the model is not heard, and its caches are off by one."""
    monkeypatch.setattr(LayerCache, "make_mask", lambda *_, **__: None)
    model = loaded("gemma3_text", build("gemma3_text"))
    shapes = tuple(replace(shape, window=shape.window and shape.window + 1) for shape in model.kept.shapes)
    with pytest.raises(StartError, match="'gemma3_text' cannot be served yet: its ragged logits differ"):
        Engine(replace(model, kept=replace(model.kept, shapes=shapes)), num_blocks=8, block_size=4)


@pytest.mark.parametrize(
    ("family", "path"),
    [("llama", "ragged paged"), ("gemma3_text", "ragged paged, 2 of 3 layers see the last 8 tokens")],
)
def test_the_path_is_said(family: str, path: str) -> None:
    assert Engine(loaded(family, build(family)), num_blocks=8, block_size=4).decode_path == path


def test_only_rows_that_draw_reach_the_output_head() -> None:
    model = build("llama")
    engine = Engine(loaded("llama", model), num_blocks=8, block_size=4)
    seen: list[tuple[int, ...]] = []
    head = model.lm_head.head
    model.lm_head.head = lambda hidden: seen.append(hidden.shape) or head(hidden)  # type: ignore[func-returns-value]
    tokens = list(range(9))
    engine.step(
        Plan(
            (
                Row(0, tokens, 0, 4, (0,), False, 9, SamplingParams()),
                Row(1, tokens, 0, 9, (1, 2, 3), True, 9, SamplingParams()),
                Row(2, tokens, 0, 9, (4, 5, 6), True, 9, SamplingParams()),
            )
        )
    )
    assert seen == [(2, 1, 64)]
