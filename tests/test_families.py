"""The ragged step on unmodified mlx-lm models of many families, tiny and random, against their own forward."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_map

from app.engine.engine import Engine
from app.engine.loader import LoadedModel, layer_shapes
from app.errors import StartError
from app.request import SamplingParams
from app.scheduler.plan import Plan, Row
from tests.driving import assert_same_tokens, build_scheduler, greedy_request, plain_greedy, run

VOCABULARY = 97
TINY = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama tied": {"tie_word_embeddings": True},
    "qwen2": {},
    "qwen3": {},
    "phi3": {"head_dim": None},
    "gemma": {},
    "olmo2": {},
    "cohere": {"logit_scale": 0.5, "layer_norm_eps": 1e-5},
    "granite": {
        "logits_scaling": 2.0,
        "attention_multiplier": 0.25,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_bias": False,
        "mlp_bias": False,
    },
    "starcoder2": {"norm_epsilon": 1e-5, "tie_word_embeddings": True},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {**EXPERTS, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "qwen2_moe": {**EXPERTS, "shared_expert_intermediate_size": 32},
    "smollm3": {"no_rope_layer_interval": 2},
    "stablelm": {
        "layer_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "use_qkv_bias": True,
        "qk_layernorm": False,
        "use_parallel_residual": False,
    },
    "glm4": {"attention_bias": True, "partial_rotary_factor": 0.5},
    "seed_oss": {"attention_bias": True, "attention_out_bias": False, "mlp_bias": False},
    "internlm2": {"bias": False},
    "olmoe": {**EXPERTS},
}
PROMPTS = [[(7 * i + 13 * n) % VOCABULARY for i in range(n)] for n in (1, 9, 26, 5)]
NUM_NEW = 8


def tiny(family: str, **config: Any) -> Any:
    """A model of a family with random weights, the same ones each time."""
    name = family.split()[0]
    module = importlib.import_module(f"mlx_lm.models.{name}")
    mx.random.seed(5)
    model = module.Model(module.ModelArgs.from_dict({**TINY, **config, "model_type": name}))
    model.update(tree_map(lambda p: mx.random.normal(p.shape) * 0.15 if p.ndim > 1 else p, model.parameters()))
    mx.eval(model.parameters())
    return model


def loaded(family: str, model: Any) -> LoadedModel:
    config = {"model_type": family.split()[0]}
    shapes = layer_shapes(model, config)
    return LoadedModel(model, None, config, Path(family), 512, VOCABULARY, shapes, frozenset())


@pytest.mark.parametrize("lookahead", [False, True], ids=["step by step", "lookahead"])
@pytest.mark.parametrize("family", FAMILIES)
def test_staggered_rows_equal_the_plain_forward(family: str, lookahead: bool) -> None:
    plain = tiny(family, **FAMILIES[family])
    want = [plain_greedy(plain, prompt, NUM_NEW) for prompt in PROMPTS]
    engine = Engine(loaded(family, tiny(family, **FAMILIES[family])), num_blocks=64, block_size=4)
    for chunk in (3, 64):
        scheduler = build_scheduler(64, 4, prefill_chunk=chunk, lookahead=lookahead)
        requests = [greedy_request(i, prompt, NUM_NEW) for i, prompt in enumerate(PROMPTS)]
        got = run(engine, scheduler, {2 * i: [request] for i, request in enumerate(requests)})
        for i, (tokens, logits) in enumerate(want):
            assert_same_tokens(got[i], tokens, logits)
        assert (scheduler.snapshot().counters.lookahead_steps > 0) == lookahead


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_in_a_crowd_equal_the_plain_ones(family: str) -> None:
    plain = tiny(family, **FAMILIES[family])
    full = [plain(mx.array([prompt]))[0] for prompt in PROMPTS]
    mx.eval(full)
    engine = Engine(loaded(family, tiny(family, **FAMILIES[family])), num_blocks=64, block_size=4)
    start = [0] * len(PROMPTS)
    for step in range(16):
        rows = []
        for i, prompt in enumerate(PROMPTS):
            num_new = min((1, 3, 4, 2)[(i + step) % 4], len(prompt) - start[i])
            if num_new and step >= i:
                rows.append(Row(i, prompt, start[i], num_new, range(10 * i, 10 * i + 10), True, 0, SamplingParams()))
                start[i] += num_new
        if not rows:
            continue
        rows.sort(key=lambda row: row.num_new > 1)
        logits = engine.logits(rows)
        mx.eval(logits)
        for row, got in zip(rows, logits, strict=True):
            difference = mx.abs(got - full[row.request_id][row.start + row.num_new - 1]).max().item()
            assert difference < 1e-4, (
                f"{difference} at position {row.start + row.num_new - 1} of prompt {row.request_id}"
            )
    assert start == [len(prompt) for prompt in PROMPTS]


def test_a_family_with_another_cache_is_refused_by_name() -> None:
    model = tiny("gemma3_text", sliding_window=8, sliding_window_pattern=2, query_pre_attn_scalar=16)
    with pytest.raises(StartError, match=r"'gemma3_text' cannot be served yet: its layers keep .*RotatingKVCache"):
        layer_shapes(model, {"model_type": "gemma3_text"})


def test_a_family_that_passes_the_seam_by_is_refused_by_name() -> None:
    model = tiny("gemma2", attn_logit_softcapping=50.0, final_logit_softcapping=30.0, query_pre_attn_scalar=16)
    with pytest.raises(StartError, match="'gemma2' cannot be served yet"):
        Engine(loaded("gemma2", model), num_blocks=8, block_size=4)


def test_only_rows_that_draw_reach_the_output_head() -> None:
    model = tiny("llama")
    engine = Engine(loaded("llama", model), num_blocks=8, block_size=4)
    seen: list[tuple[int, ...]] = []
    head = model.lm_head.head
    model.lm_head.head = lambda hidden: seen.append(hidden.shape) or head(hidden)  # type: ignore[func-returns-value]
    tokens = list(range(9))
    engine.step(
        Plan(
            (
                Row(0, tokens, 0, 4, (1, 2, 3), False, 9, SamplingParams()),
                Row(1, tokens, 0, 9, (4, 5, 6), True, 9, SamplingParams()),
            )
        )
    )
    assert seen == [(1, 1, 64)]
