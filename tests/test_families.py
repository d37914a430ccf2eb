"""The ragged step on unmodified mlx-lm models of many families, tiny and random, against their own generation.
Of every family logits are compared, and rows cancelled and requeued, in test_coverage.py."""

from __future__ import annotations

from dataclasses import replace

import pytest

from app.engine.attention import LayerCache
from app.engine.engine import Engine
from app.errors import StartError
from app.request import SamplingParams
from app.scheduler.plan import Plan, Row
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
