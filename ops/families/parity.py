"""How far the ways of computing a family's logits are apart, on its tiny model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models.cache import make_prompt_cache

from app.engine.engine import Engine
from app.engine.probe import difference
from app.request import SamplingParams
from app.scheduler.plan import Row
from ops.families.tiny import build, loaded

T = TypeVar("T")

# One token, about as many as a sliding window has, three times as many, fewer.
PROMPTS = [[(7 * i + 13 * n) % 97 for i in range(n)] for n in (1, 9, 26, 5)]
JOINING = [[(11 * i + 5 * n) % 97 for i in range(n)] for n in (11, 5, 9)]
NUM_STEPS = 8


class Unbatchable(Exception):
    """mlx-lm cannot batch this family's caches; the text names the operation that failed, and how."""


def ragged(family: str) -> float:
    """The ragged step of prompts that join one after the other, in chunks of one to four tokens, against the plain
    forward of each.

    Raises:
        StartError: the engine refuses the family.
    """
    model = build(family)
    plain = [model(mx.array([prompt]))[0] for prompt in PROMPTS]
    mx.eval(plain)
    engine = Engine(loaded(family, model), num_blocks=64, block_size=4)
    begun = [0] * len(PROMPTS)
    worst = 0.0
    for step in range(16):
        rows = []
        for i, prompt in enumerate(PROMPTS):
            num_new = min((1, 3, 4, 2)[(i + step) % 4], len(prompt) - begun[i])
            if num_new and step >= i:
                rows.append(Row(i, prompt, begun[i], num_new, range(10 * i, 10 * i + 10), True, 0, SamplingParams()))
                begun[i] += num_new
        if rows:
            rows.sort(key=lambda row: row.num_new > 1)
            want = mx.stack([plain[row.request_id][row.start + row.num_new - 1] for row in rows])
            worst = max(worst, difference(engine.logits(rows), want))
    assert begun == [len(prompt) for prompt in PROMPTS]
    return worst


def chunked(family: str) -> float:
    """A prompt read three tokens at a time into mlx-lm's own caches, against the same read at once."""
    model, prompt = build(family), PROMPTS[2]
    want = model(mx.array([prompt]), cache=make_prompt_cache(model))[0]
    cache = make_prompt_cache(model)
    got = [model(mx.array([prompt[i : i + 3]]), cache=cache)[0] for i in range(0, len(prompt), 3)]
    return difference(mx.concatenate(got), want)


def batched(family: str) -> float:
    """mlx-lm's own batch against each row alone: two rows are merged, a third joins, one leaves, one goes on alone.

    Raises:
        Unbatchable: an operation on the caches is not there, or fails.
    """
    batch = _Batch(build(family))
    batch.cache = _attempt("merge", lambda: _merged(batch.alone[:2]))
    batch.step([0, 1])
    other = _attempt("merge", lambda: _merged(batch.alone[2:]))
    _attempt("extend", lambda: [mine.extend(its) for mine, its in zip(batch.cache, other, strict=True)])
    batch.step([0, 1, 2])
    _attempt("filter", lambda: [layer.filter([1, 2]) for layer in batch.cache])
    batch.step([1, 2])
    batch.cache = _attempt("extract", lambda: [layer.extract(0) for layer in batch.cache])
    batch.step([1])
    return batch.worst


def kept(family: str) -> list[Any]:
    """The caches of a prompt longer than a window, as mlx-lm makes and fills them."""
    return _filled(build(family), JOINING[0])


class _Batch:
    """Rows that are decoded together, and what each gives alone."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.alone = [_filled(model, prompt) for prompt in JOINING]
        self.cache: list[Any] = []
        self.worst = 0.0
        self._want = [self._steps_alone(prompt) for prompt in JOINING]
        self._taken = [0] * len(JOINING)

    def step(self, members: Sequence[int]) -> None:
        """Two tokens for each of these rows."""
        for _ in range(2):
            tokens = mx.array([[_next_token(self._taken[i])] for i in members])
            got = _attempt("step", lambda tokens=tokens: _evaluated(self.model(tokens, cache=self.cache)[:, -1]))
            for place, i in enumerate(members):
                self.worst = max(self.worst, difference(got[place], self._want[i][self._taken[i]]))
                self._taken[i] += 1

    def _steps_alone(self, prompt: Sequence[int]) -> list[mx.array]:
        cache = _filled(self.model, prompt)
        steps = range(NUM_STEPS)
        return [_evaluated(self.model(mx.array([[_next_token(step)]]), cache=cache)[0, -1]) for step in steps]


def _filled(model: nn.Module, prompt: Sequence[int]) -> list[Any]:
    cache = make_prompt_cache(model)
    mx.eval(model(mx.array([prompt]), cache=cache))
    return cache


def _merged(caches: Sequence[list[Any]]) -> list[Any]:
    return [layers[0].merge(list(layers)) for layers in zip(*caches, strict=True)]


def _attempt(operation: str, act: Callable[[], T]) -> T:
    try:
        return act()
    except Exception as error:
        raise Unbatchable(" ".join(f"{operation}: {error}".split())) from error


def _evaluated(logits: mx.array) -> mx.array:
    mx.eval(logits)
    return logits


def _next_token(step: int) -> int:
    return (31 * step + 3) % 97
