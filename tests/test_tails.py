"""Steps that are submitted ahead on the engine: the same tokens, a pool that is never copied, and what goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import pytest

from app.engine import sampler
from app.engine.engine import Engine
from app.engine.storage import LayerShape, PagedStorage
from app.engine.tails import TAIL_BLOCKS, Tails
from app.errors import EngineFault
from app.pipeline import Pipeline
from app.request import FinishReason, Request, SamplingParams
from app.scheduler.plan import Plan, Row
from app.scheduler.scheduler import Scheduler
from ops.families import tiny
from tests.driving import build_scheduler, run
from tests.test_families import PROMPTS

NUM_BLOCKS = 200
SAMPLINGS = (
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=1.0, seed=5, num_logprobs=3),
    SamplingParams(temperature=1.3, seed=6, top_p=0.9, logit_bias=((3, 4.0), (11, -50.0))),
    SamplingParams(temperature=0.0, banned=(7, 8, 9)),
)


def build(family: str = "llama", num_blocks: int = NUM_BLOCKS, block_size: int = 4, **fields: Any) -> Engine:
    return Engine(tiny.loaded(family, tiny.build(family)), num_blocks, block_size, **fields)


def asked(max_tokens: int = 30, samplings: Sequence[SamplingParams] = SAMPLINGS) -> list[Request]:
    return [
        Request(i, list(prompt), len(prompt), max_tokens, sampling=sampling)
        for i, (prompt, sampling) in enumerate(zip(PROMPTS, samplings, strict=True))
    ]


def both(
    engine: Engine,
    requests: Callable[[], list[Request]],
    leave: Callable[[int, Scheduler], None] = lambda tick, scheduler: None,
    block_size: int = 4,
    **config: Any,
) -> tuple[dict[int, list[int]], dict[int, list[int]], Scheduler]:
    """Outputs step by step, outputs with lookahead, and the scheduler of the latter."""
    outputs = []
    for lookahead in (False, True):
        scheduler = build_scheduler(NUM_BLOCKS, block_size, lookahead=lookahead, **{"num_slots": 4, **config})
        outputs.append(run(engine, scheduler, {0: requests()}, leave))
    assert scheduler.snapshot().counters.lookahead_steps > 5
    return outputs[0], outputs[1], scheduler


@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
def test_biased_seeded_and_greedy_rows_draw_the_same(block_size: int) -> None:
    plain, ahead, _ = both(build(block_size=block_size), asked, block_size=block_size)
    assert ahead == plain
    assert not set(ahead[3]) & {7, 8, 9}


def test_rows_that_end_or_leave_with_a_step_in_flight_disturb_nobody() -> None:
    engine = build()
    plain, _, _ = both(engine, asked)

    def requests() -> list[Request]:
        found = asked()
        found[0].end_tokens = frozenset({plain[0][9]})
        return found

    def leave(tick: int, scheduler: Scheduler) -> None:
        if tick == 12:
            scheduler.cancel(1, 0.0)
        elif tick == 17:
            scheduler.finish(2, FinishReason.STOP, 5, 0.0)

    _, ahead, scheduler = both(engine, requests, leave, prefix_cache=True)
    assert ahead[0] == plain[0][: plain[0].index(plain[0][9]) + 1]
    for request_id in (1, 2):
        assert ahead[request_id] == plain[request_id][: len(ahead[request_id])]
        assert len(ahead[request_id]) < 30
    assert ahead[3] == plain[3]
    # What they left in the prefix cache, their last, partly filled blocks included, is what a cold request computes.
    again = [Request(10 + i, PROMPTS[i] + plain[i][:8], len(PROMPTS[i]) + 8, 12, SAMPLINGS[i]) for i in range(4)]
    got = run(engine, scheduler, {0: again})
    for i, request in enumerate(again):
        assert request.num_cached >= len(PROMPTS[i])
        assert got[10 + i] == plain[i][8:20]


def test_a_nucleus_that_proves_too_wide_is_drawn_again_and_its_row_computed_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sampler, "TOP_WIDTH", 4)
    redrawn: list[Row] = []
    read = sampler.Drawing.read

    def reading(drawing: sampler.Drawing) -> Any:
        draws = read(drawing)
        redrawn.extend(drawing.redrawn)
        return draws

    monkeypatch.setattr(sampler.Drawing, "read", reading)
    wide = [replace(sampling, temperature=2.0, top_p=0.95, seed=i) for i, sampling in enumerate(SAMPLINGS)]
    plain, ahead, _ = both(build(), lambda: asked(samplings=(wide[0], *SAMPLINGS[1:])))
    assert redrawn
    assert ahead == plain


def test_deterministic_mode_gives_the_same_bits() -> None:
    engine = build(deterministic=True, block_size=16)
    bits: dict[bool, dict[tuple[int, int], bytes]] = {False: {}, True: {}}
    compute = engine.logits

    def keep(rows: Sequence[Row], before: Any = None) -> mx.array:
        out = compute(rows, before)
        for row, numbers in zip([row for row in rows if row.draws], out, strict=True):
            bits[lookahead][row.request_id, row.start + row.num_new] = bytes(memoryview(numbers))
        return out

    engine.logits = keep  # type: ignore[method-assign]
    for lookahead in (False, True):
        scheduler = build_scheduler(NUM_BLOCKS, 16, lookahead=lookahead)
        run(engine, scheduler, {2 * i: [request] for i, request in enumerate(asked())})
    assert scheduler.snapshot().counters.lookahead_steps > 20
    assert bits[False].items() <= bits[True].items(), "but for steps that were not wanted"


# ---- memory ----


def test_the_pool_is_not_copied() -> None:
    """The activations of this model are less than 1% of pool and tails; a copy of K or V of one layer is a sixth."""
    peak, pool_bytes, tail_bytes = peak_bytes(lambda engine, plan: engine.submit(plan))
    assert pool_bytes < peak < 1.01 * (pool_bytes + tail_bytes)


def test_a_step_that_writes_to_the_pool_with_another_in_flight_copies_it() -> None:
    """What the test above would see."""

    def careless(engine: Engine, plan: Plan) -> Any:
        rows = tuple(row._replace(tokens=[*row.tokens, 1], blocks=[*row.blocks, 0]) for row in plan.rows)
        return engine.submit(Plan(rows))

    peak, pool_bytes, tail_bytes = peak_bytes(careless)
    assert peak > 1.1 * (pool_bytes + tail_bytes)


def peak_bytes(submit: Callable[[Engine, Plan], Any]) -> tuple[int, int, int]:
    """The most memory that steps ahead of one another have needed besides weights, and what pool and tails come to.

    The pool is held, as the step in flight holds it, until that is read: however soon it is done.
    """
    num_blocks, block_size = 16384, 16
    engine = build(num_blocks=num_blocks, block_size=block_size)
    scheduler = build_scheduler(num_blocks, block_size, lookahead=True)
    for request in asked(max_tokens=60):
        scheduler.add(request)
    plan = scheduler.plan(0.0)
    while any(row.num_new > 1 for row in plan.rows):
        scheduler.apply(plan, engine.step(plan), 0.0)
        plan = scheduler.plan(0.0)
    mx.clear_cache()
    mx.reset_peak_memory()
    weights = mx.get_active_memory() - engine.pool_bytes
    step, num_ahead = engine.submit(plan), 0
    while not scheduler.is_idle:
        following = scheduler.ahead(plan)
        held = [array.reshape(-1) for array in engine._storage.arrays()]
        mx.eval(held)
        ahead = None if following is None else submit(engine, following)
        num_ahead += following is not None
        scheduler.apply(plan, engine.finish_rows(step), 0.0)
        held.clear()
        if following is None and scheduler.is_idle:
            break
        plan = following or scheduler.plan(0.0)
        step = ahead if following is not None else engine.submit(plan)
    assert num_ahead > 40
    tail_bytes = 2 * TAIL_BLOCKS * len(PROMPTS) * engine.pool_bytes // num_blocks
    return mx.get_peak_memory() - weights, engine.pool_bytes, tail_bytes


def test_what_is_flushed_is_what_was_written() -> None:
    storage = PagedStorage([LayerShape(2, 3, 3, mx.float32)], num_blocks=8, block_size=2)
    (layer,) = storage.pools
    before = layer.keys.tolist()
    blocks = [5, 1]
    row = Row(0, [], 1, 1, blocks, True, 1, SamplingParams())
    tails = Tails(storage, [row])
    for position in (1, 2, 3):
        row = row._replace(start=position)
        tails.turn([row])
        assert tails.num_pooled(row) == 0
        at = mx.array([[(position // 2 * 2 + head) * 2 + position % 2 for head in range(2)]])
        tails.pools[0].write(at, mx.full((1, 2, 3), float(position)), mx.full((1, 2, 3), -float(position)))
        assert layer.keys.tolist() == before, "the pool is only read"
    tails.flush()
    want = {5: [0.0, 1.0], 1: [2.0, 3.0]}
    for block in range(8):
        for head in range(2):
            for place in range(2):
                number = want.get(block, [0.0, 0.0])[place]
                vector = (block * 2 + head) * 2 + place
                assert layer.keys[vector].tolist() == [number] * 3
                assert layer.values[vector].tolist() == [-number] * 3


def test_a_block_that_a_row_was_never_given_is_not_flushed() -> None:
    storage = PagedStorage([LayerShape(1, 1, 1, mx.float32)], num_blocks=3, block_size=2)
    row = Row(0, [], 2, 1, [1], True, 1, SamplingParams())
    tails = Tails(storage, [row])
    tails.turn([row])
    tails.pools[0].write(mx.array([[0]]), mx.ones((1, 1, 1)), mx.ones((1, 1, 1)))
    tails.flush()
    assert not storage.pools[0].keys.any().item()


# ---- what goes wrong ----


def test_a_row_of_no_numbers_ends_alone_and_its_blocks_are_clean() -> None:
    engine = build()
    plain, _, _ = both(engine, asked)
    compute = engine.logits

    def spoilt(rows: Sequence[Row], before: Any = None) -> mx.array:
        """Values that are no numbers get into the second row's tail."""
        if engine._tails is not None and any(row.request_id == 1 and row.start > 15 for row in rows):
            for tail in engine._tails.pools:
                vectors = tail.shape.num_heads * tail.block_size
                tail._halves[0].values[TAIL_BLOCKS * vectors] = float("nan")
        return compute(rows, before)

    engine.logits = spoilt  # type: ignore[method-assign]
    scheduler = build_scheduler(NUM_BLOCKS, 4, lookahead=True, prefix_cache=True)
    requests = asked()
    got = run(engine, scheduler, {0: requests})
    assert requests[1].finish_reason is FinishReason.ERROR
    assert 5 < len(got[1]) < 30
    assert got[1] == plain[1][: len(got[1])]
    assert {i: got[i] for i in (0, 2, 3)} == {i: plain[i] for i in (0, 2, 3)}
    engine.logits = compute  # type: ignore[method-assign]
    engine._settle()
    assert all(mx.isfinite(array).all().item() for array in engine._storage.arrays())
    assert run(engine, scheduler, {0: asked()}) == plain


@pytest.mark.parametrize("where", ["submit", "finish"])
def test_a_fault_with_a_step_in_flight_costs_nobody_a_token(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build()
    plain, _, _ = both(engine, asked)
    scheduler = build_scheduler(NUM_BLOCKS, 4, lookahead=True)
    for request in (requests := asked()):
        scheduler.add(request)
    pipeline, faults = Pipeline(engine, scheduler), []
    whole = {"submit": engine.logits, "finish": engine.finish_rows}[where]

    def broken(*arguments: Any) -> Any:
        if pipeline._in_flight is not None or where == "submit":
            setattr(engine, "logits" if where == "submit" else "finish_rows", whole)
            faults.append(where)
            if where == "submit":
                raise RuntimeError("out of memory")
            raise engine._fault(RuntimeError("out of memory"))
        return whole(*arguments)

    for tick in range(300):
        if tick == 10:
            monkeypatch.setattr(engine, "logits" if where == "submit" else "finish_rows", broken)
        if pipeline.is_idle:
            break
        pipeline.run(pipeline.plan(float(tick)))
    assert faults == [where]
    assert scheduler.snapshot().counters.preemptions == {"fault": 4}
    assert {request.id: request.tokens[request.num_prompt :] for request in requests} == plain
    scheduler.check()


def test_what_was_computed_ahead_is_lost_with_the_pool() -> None:
    engine = build()
    scheduler = build_scheduler(NUM_BLOCKS, 4, lookahead=True)
    scheduler.add(asked()[1])
    scheduler.apply(plan := scheduler.plan(0.0), engine.step(plan), 0.0)
    engine.submit(plan := scheduler.plan(0.0))
    engine.submit(scheduler.ahead(plan))  # type: ignore[arg-type]
    assert isinstance(engine._fault(RuntimeError()), EngineFault)
    assert engine._tails is None
