"""The CPU's own operations against MLX's."""

from __future__ import annotations

from contextlib import nullcontext

import mlx.core as mx
import mlx.nn as nn
import pytest

from app.engine import engine, kernels
from app.engine.engine import Engine
from app.request import SamplingParams
from app.scheduler.plan import Row
from ops.families import tiny


def close(got: mx.array, want: mx.array, tolerance: float = 1e-5) -> bool:
    return got.shape == want.shape and bool(mx.allclose(got, want, rtol=tolerance, atol=tolerance).item())


@pytest.mark.parametrize("rows", [7, kernels.FEW, kernels.FEW + 1, 300])
def test_swiglu(rows: int) -> None:
    gate = mx.random.normal((rows, 1, 50), key=mx.random.key(1)) * 8
    x = mx.random.normal((rows, 1, 50), key=mx.random.key(2))
    want = nn.silu(gate) * x
    assert close(kernels.swiglu(gate, x), want)
    half = kernels.swiglu(gate.astype(mx.bfloat16), x.astype(mx.bfloat16))
    assert half.dtype == mx.bfloat16
    assert mx.allclose(half.astype(mx.float32), want, rtol=0.03, atol=0.03).item()
    for far in (-200.0, 200.0):
        got = kernels.swiglu(mx.full((rows, 1), far), mx.ones((rows, 1)))
        assert close(got, mx.full((rows, 1), max(far, 0.0)))


@pytest.mark.parametrize("part", [nn.Linear(48, 20), nn.Linear(48, 20, bias=False), nn.RMSNorm(48, eps=1e-3)])
@pytest.mark.parametrize("rows", [1, 2, 7])
def test_lean_parts(part: nn.Module, rows: int) -> None:
    if "bias" in part:
        part.bias = mx.random.normal((20,), key=mx.random.key(8))
    if isinstance(part, nn.RMSNorm):
        part.weight = mx.random.normal((48,), key=mx.random.key(9))
    x = mx.random.normal((rows, 1, 48), key=mx.random.key(10))
    want, parameters = part(x), part.parameters()
    model = nn.Module()
    model.part = part
    kernels.quicken(model)
    kernels.quicken(model)
    assert type(part) in (kernels.LeanLinear, kernels.LeanRMSNorm)
    assert close(part(x), want)
    assert close(part(x[0, 0]), want[0, 0])
    assert part.parameters() == parameters


@pytest.mark.parametrize(("num_queries", "num_context"), [(1, 1), (2, 9), (64, 64), (65, 65), (100, 260), (130, 131)])
@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)])
def test_causal_attention(num_queries: int, num_context: int, heads: tuple[int, int]) -> None:
    queries = mx.random.normal((1, heads[0], num_queries, 16), key=mx.random.key(3))
    keys = mx.random.normal((1, heads[1], num_context, 16), key=mx.random.key(4))
    values = mx.random.normal((1, heads[1], num_context, 24), key=mx.random.key(5))
    want = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.3, mask="causal")
    assert close(kernels.causal_attention(queries, keys, values, 0.3), want)
    for window in (1, 7, 64, 300):
        at, others = mx.arange(num_context - num_queries, num_context)[:, None], mx.arange(num_context)
        mask = (others <= at) & (others > at - window)
        for sinks in (None, mx.random.normal((heads[0],), key=mx.random.key(6))):
            want = mx.fast.scaled_dot_product_attention(queries, keys, values, scale=0.3, mask=mask, sinks=sinks)
            assert close(kernels.causal_attention(queries, keys, values, 0.3, window, sinks), want)


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("dims", [32, 16])
def test_ragged_rope(traditional: bool, dims: int) -> None:
    def make() -> nn.RoPE:
        return nn.RoPE(dims, traditional=traditional, base=5000.0, scale=0.5)

    rope, model = make(), nn.Module()
    model.first, model.second = nn.Module(), nn.Module()
    model.first.rope, model.second.rope = make(), make()
    kernels.quicken(model)
    for offsets in (mx.array([0, 7, 300]), mx.array([5, 5, 6])):
        x = mx.random.normal((3, 2, 1, 32), key=mx.random.key(6))
        for layer in (model.first, model.second):
            assert isinstance(layer.rope, kernels.RaggedRope)
            assert close(layer.rope(x, offset=offsets), rope(x, offset=offsets))
    prompt = mx.random.normal((1, 2, 9, 32), key=mx.random.key(7))
    assert close(model.first.rope(prompt, offset=4), rope(prompt, offset=4))


def test_the_table_adds_no_parameters() -> None:
    model = nn.Module()
    model.rope = nn.RoPE(8)
    kernels.quicken(model)
    assert model.parameters() == {"rope": {}}


def test_only_long_forwards_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = [5] * (kernels.FEW + 2)
    built = Engine(tiny.loaded("llama", tiny.build("llama")), 8, 16)
    seen: list[bool] = []
    monkeypatch.setattr(engine, "packed", lambda is_wanted: nullcontext(seen.append(is_wanted)))
    for start, num_new in ((0, kernels.FEW), (0, kernels.FEW + 1), (kernels.FEW + 1, 1)):
        mx.eval(built.logits([Row(0, tokens, start, num_new, range(5), True, len(tokens), SamplingParams())]))
    assert seen == [False, True, False]
