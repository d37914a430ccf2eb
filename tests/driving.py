"""Drives scheduler and engine tick by tick, without threads: what the parity tests have in common."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.generate import generate_step

from app.engine.dense import DenseEngine
from app.engine.engine import Engine
from app.kv.block_pool import BlockPool
from app.kv.block_table import BlockTables
from app.kv.layout import Layout
from app.kv.prefix_cache import PrefixCache
from app.pipeline import Pipeline
from app.request import Request, SamplingParams
from app.scheduler.policy import SchedulerConfig
from app.scheduler.scheduler import Scheduler
from app.scheduler.speculation import Drafter

GREEDY = SamplingParams(temperature=0.0)
TIE = 1e-3


def greedy_request(request_id: int, prompt: Sequence[int], max_tokens: int, **fields: Any) -> Request:
    return Request(request_id, list(prompt), len(prompt), max_tokens, sampling=GREEDY, **fields)


def build_scheduler(
    num_blocks: int,
    block_size: int,
    prefix_cache: bool = False,
    drafter: Drafter | None = None,
    whole_states: bool = False,
    windows: tuple[int | None, ...] = (None,),
    **config: Any,
) -> Scheduler:
    """``windows`` as in ``Layout``: ``num_blocks`` are those of all groups together."""
    pool, is_on = BlockPool(num_blocks), prefix_cache or whole_states
    cache = PrefixCache(pool, block_size, is_on, min_tokens=1, whole_states=whole_states, layout=Layout(windows))
    return Scheduler(replace(SchedulerConfig(), **config), BlockTables(pool, cache, block_size), drafter)


def run(
    engine: Engine | DenseEngine,
    scheduler: Scheduler,
    arrivals: Mapping[int, Sequence[Request]],
    leave: Callable[[int, Scheduler], None] = lambda tick, scheduler: None,
) -> dict[int, list[int]]:
    """Run ticks until everybody has ended; gives the output by request id. ``leave`` may cancel between ticks, also
    while a step is in flight."""
    requests = {request.id: request for group in arrivals.values() for request in group}
    pipeline = Pipeline(engine, scheduler)
    tick = 0
    while not pipeline.is_idle or any(at >= tick for at in arrivals):
        for request in arrivals.get(tick, ()):
            scheduler.add(request)
        leave(tick, scheduler)
        plan = pipeline.plan(time.monotonic())
        if plan.rows or plan.num_blocks:
            pipeline.run(plan)
        scheduler.check()
        tick += 1
        assert tick < 5000, "no progress"
    return {request_id: request.tokens[request.num_prompt :] for request_id, request in requests.items()}


def plain_greedy(model: nn.Module, prompt: Sequence[int], num_tokens: int) -> tuple[list[int], list[mx.array]]:
    """mlx-lm's own generation of one prompt alone: the tokens, and the log-probabilities each was drawn from."""
    steps = list(generate_step(mx.array(list(prompt)), model, max_tokens=num_tokens))
    return [int(token) for token, _ in steps], [logprobs for _, logprobs in steps]


def assert_same_tokens(got: Sequence[int], want: Sequence[int], logits: Sequence[mx.array]) -> None:
    """Equal, but that two tokens may stand for one another where the plain logits of both are within ``TIE``.

    What follows a tie is another text, so it is not compared.
    """
    for position, (one, other) in enumerate(zip(got, want, strict=True)):
        if one != other:
            gap = (logits[position][other] - logits[position][one]).item()
            assert gap <= TIE, f"token {position} is {one}, not {other}, and their logits are {gap} apart"
            return
