"""What MLX computes slowly on a CPU, written so that it is quick there. On a GPU MLX's own operations stay.

Measured on x86-64 with MLX 0.32: ``exp`` takes 12 to 24 ns an element, ``power`` 4.5 to 7 and numpy's ``exp`` 0.4. So
the exponentials of few tokens are powers of two, in the graph, and those of many are numpy's, for which the step is
computed that far while its graph is built. A rotary embedding is some twenty small operations a call, and four with a
table that all layers share. A BLAS takes a product with one row for one with a vector, and uses a single thread for it:
so a forward has ``LEAST_TOKENS``.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Generic, TypeAlias, TypeVar

import mlx.core as mx
import mlx.nn as nn
import numpy as np

T = TypeVar("T")

LOG2_E = math.log2(math.e)
PIECE = 64
LEAST_TOKENS = 2
FEW = 64  # tokens; no forward of deterministic mode has more, so the bits there do not depend on how many there are

Numbers: TypeAlias = "np.ndarray[Any, np.dtype[np.float32]]"


def on_cpu() -> bool:
    """Whether MLX computes on the CPU."""
    return bool(mx.default_device().type == mx.cpu)


@lru_cache(maxsize=256)
def filled(value: float, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
    """One number in a shape, spread once: each time that a mere number meets an array is an operation more."""
    array = mx.broadcast_to(mx.array(value, dtype), shape)
    mx.eval(array)  # so that any thread may use it
    return array


def swiglu(gate: mx.array, x: mx.array) -> mx.array:
    """``silu(gate) * x``, elementwise (Shazeer, "GLU variants improve Transformer", 2020)."""
    if gate.size <= FEW * gate.shape[-1]:
        one, base = (filled(value, gate.shape, gate.dtype) for value in (1.0, 1 / math.e))
        return gate * x / (one + mx.power(base, gate))
    powers = (-gate).astype(mx.float32)
    numbers = _in_place(powers)
    with np.errstate(all="ignore"):
        np.exp(numbers, out=numbers)
    return gate * x / (1.0 + powers).astype(gate.dtype)


def causal_attention(
    queries: mx.array,
    keys: mx.array,
    values: mx.array,
    scale: float,
    window: int | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Attention of the last n positions of a context, each to the last ``window`` up to itself; None: to all.

    ``queries [1, query_heads, n, dim]``; keys and values ``[1, heads, context, dim]``; gives
    ``[1, query_heads, n, value_dim]``. ``sinks [query_heads]``: each head's score of nothing: it takes
    weight and gives no value.

    In pieces of ``PIECE`` queries, each against no more than it may see: half the work is never done, and no matrix of
    n times context is held.
    """
    num_queries, num_context, heads = queries.shape[2], keys.shape[2], keys.shape[1]
    grouped = (queries * scale).reshape(heads, -1, num_queries, queries.shape[-1])
    keys, values = keys[0][:, None].swapaxes(-1, -2), values[0][:, None]
    sink = None if sinks is None else np.array(sinks.astype(mx.float32)).reshape(heads, -1, 1, 1)
    pieces = []
    for begin in range(0, num_queries, PIECE):
        end = min(begin + PIECE, num_queries)
        first, seen = num_context - num_queries + begin, num_context - num_queries + end
        low = 0 if window is None else max(first - window + 1, 0)
        weights = (grouped[:, :, begin:end] @ keys[..., low:seen]).astype(mx.float32)
        with np.errstate(all="ignore"):  # what is no number is found in the logits
            total = _weigh(_in_place(weights), window, sink)
        pieces.append((weights.astype(values.dtype) @ values[:, :, low:seen]) / total.astype(values.dtype))
    return mx.concatenate(pieces, axis=2).reshape(1, -1, num_queries, values.shape[-1])


def _weigh(scores: Numbers, window: int | None, sink: Numbers | None) -> mx.array:
    """Turn the scores of the last n positions of a context ``[heads, group, n, context]`` into weights, and give their
    sums ``[heads, group, n, 1]``. ``window`` and ``sink [heads, group, 1, 1]`` as in ``causal_attention``."""
    num_queries, num_context = scores.shape[-2:]
    rows, columns = np.arange(num_queries)[:, None], np.arange(num_queries)
    num_before = num_context - num_queries
    np.copyto(scores[..., num_before:], -np.inf, where=columns > rows)
    if window is not None:
        np.copyto(scores[..., :num_queries], -np.inf, where=columns <= rows + num_before - window)
    peak = scores.max(-1, keepdims=True)
    if sink is not None:
        np.maximum(peak, sink, out=peak)
    np.subtract(scores, peak, out=scores)
    np.exp(scores, out=scores)
    total = scores.sum(-1, keepdims=True)
    return mx.array(total if sink is None else total + np.exp(sink - peak))


def _in_place(fresh: mx.array) -> Numbers:
    """The numbers of a float32 array that nobody else holds, computed now: what is written to them is what it holds."""
    mx.eval(fresh)
    return np.array(fresh, copy=False)


class RotaryTable:
    """Cosines and sines of one step's positions, made once and used by every layer with the same kind of rotation."""

    def __init__(self, rope: nn.RoPE, width: int) -> None:
        half = rope.dims // 2
        angles = rope.base ** (-np.arange(half) * 2.0 / rope.dims) * rope.scale
        first, second = (
            (np.arange(half) * 2, np.arange(half) * 2 + 1)
            if rope.traditional
            else (
                np.arange(half),
                np.arange(half) + half,
            )
        )
        turn = np.zeros((width, width), np.float32)  # x @ turn: each pair (a, b) becomes (-b, a)
        turn[second, first], turn[first, second] = -1.0, 1.0
        frequencies = np.zeros(width)
        frequencies[first] = frequencies[second] = angles
        self.turn = mx.array(turn)
        self._frequencies = mx.array(frequencies.astype(np.float32))
        self._offsets: mx.array | None = None
        self._waves = (self.turn, self.turn)
        self._spread: dict[tuple[int, ...], tuple[mx.array, mx.array]] = {}

    def waves(self, offsets: mx.array, shape: tuple[int, ...]) -> tuple[mx.array, mx.array]:
        """Cosines and sines of ``offsets [T]``, spread to a ``shape`` of ``[T, heads, 1, width]``. All layers of a step
        pass the same array."""
        if offsets is not self._offsets:
            angles = offsets[:, None, None, None] * self._frequencies
            self._offsets, self._waves = offsets, (mx.cos(angles), mx.sin(angles))
            self._spread.clear()
        if shape not in self._spread:
            cosines, sines = self._waves
            self._spread[shape] = mx.broadcast_to(cosines, shape), mx.broadcast_to(sines, shape)
        return self._spread[shape]


class RaggedRope(nn.Module):
    """Stands in for ``nn.RoPE``: rows of one token each are turned by a shared table, all else by the original."""

    def __init__(self, rope: nn.RoPE, tables: dict[tuple[object, ...], RotaryTable]) -> None:
        super().__init__()
        self._rope = rope
        self._key = (rope.dims, rope.traditional, rope.base, rope.scale)
        self._tables = _Shared(tables)

    def __call__(self, x: mx.array, offset: int | mx.array = 0) -> mx.array:
        """Turn ``x [T, heads, 1, dim]`` by its positions ``offset [T]``."""
        if not isinstance(offset, mx.array) or offset.ndim != 1 or x.shape[-2] != 1:
            return self._rope(x, offset=offset)
        key = (*self._key, x.shape[-1])
        table = self._tables.of.get(key) or self._tables.of.setdefault(key, RotaryTable(self._rope, x.shape[-1]))
        cosines, sines = table.waves(offset, x.shape)
        return x * cosines + (x @ table.turn) * sines


class LeanRMSNorm(nn.RMSNorm):
    """``nn.RMSNorm`` in fewer operations: the root of the width goes into the weight, and its square into epsilon."""

    def __call__(self, x: mx.array) -> mx.array:
        weight, epsilon = self._folded.of.spread(x.shape)
        return x * mx.rsqrt(mx.square(x).sum(-1, keepdims=True) + epsilon) * weight


class LeanLinear(nn.Linear):
    """``nn.Linear`` with its weight turned once and for all."""

    def __call__(self, x: mx.array) -> mx.array:
        return mx.addmm(self["bias"], x, self._turned.of) if "bias" in self else x @ self._turned.of


class _NormConstants:
    """Weight and epsilon of a ``LeanRMSNorm``, spread over the tokens: decoding asks for one shape again and again, and
    an operation that need not be in the graph costs nothing."""

    def __init__(self, norm: nn.RMSNorm) -> None:
        width = norm.weight.size
        self._weight, self._epsilon = norm.weight * math.sqrt(width), mx.array(norm.eps * width)
        self._shape: tuple[int, ...] = ()
        self._last = (self._weight, self._epsilon)

    def spread(self, shape: tuple[int, ...]) -> tuple[mx.array, mx.array]:
        """The weight as ``shape [..., width]``, epsilon as ``[..., 1]``."""
        if shape != self._shape:
            self._shape = shape
            self._last = mx.broadcast_to(self._weight, shape), mx.broadcast_to(self._epsilon, (*shape[:-1], 1))
        return self._last


@dataclass(frozen=True, slots=True)
class _Shared(Generic[T]):
    """Keeps what it holds out of the parameters, where ``nn.Module`` would put it."""

    of: T


def quicken(model: nn.Module) -> None:
    """Put these operations in place of MLX's in a model. Doing it twice changes nothing."""
    tables: dict[tuple[object, ...], RotaryTable] = {}
    for part in list(model.modules()):
        if type(part) is nn.Linear:
            part._turned = _Shared(part.weight.T)
            part.__class__ = LeanLinear
        if type(part) is nn.RMSNorm and part.weight.dtype == mx.float32:
            part._folded = _Shared(_NormConstants(part))
            part.__class__ = LeanRMSNorm
        for name, child in list(part.items()):
            if type(child) is nn.RoPE:
                setattr(part, name, RaggedRope(child, tables))
    for module in {cls.__module__ for part in model.modules() for cls in type(part).__mro__}:
        if module.startswith("mlx_lm.models.") and hasattr(sys.modules[module], "swiglu"):
            sys.modules[module].swiglu = swiglu  # type: ignore[attr-defined]
