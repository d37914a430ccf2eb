"""What it brings to submit a decode step before the tokens of the last are read, in scheduler and engine alone."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from app.engine.blas import preload
from app.kv.block_pool import BlockPool
from app.kv.block_table import BlockTables
from app.kv.prefix_cache import PrefixCache
from app.pipeline import Pipeline
from app.request import Request, SamplingParams
from app.scheduler.policy import SchedulerConfig
from app.scheduler.scheduler import Scheduler
from loadtest.figures.figure import Cell, Figure

if TYPE_CHECKING:
    from app.engine.engine import Engine

COLUMNS = ("rows", "read first: ms a step", "submitted first: ms a step", "submitted first / read first", "steps ahead")


@dataclass(frozen=True)
class Sizes:
    levels: tuple[int, ...] = (1, 8)
    num_prompt: int = 64
    num_new: int = 150
    rounds: int = 5


SMALL = Sizes(levels=(1, 2), num_new=6, rounds=1)


def measure(folder: Path, small: bool) -> Figure:
    preload("auto", "auto")
    from app.engine import kernels, loader
    from app.engine.engine import Engine

    sizes = SMALL if small else Sizes()
    block_size = 64 if kernels.on_cpu() else 32
    num_blocks = max(sizes.levels) * -(-(sizes.num_prompt + sizes.num_new) // block_size)
    loaded = loader.load(loader.model_directory("embedded", folder, offline=True), "auto")
    engine = Engine(loaded, num_blocks, block_size)
    rows = tuple(_measure(engine, level, num_blocks, block_size, sizes) for level in sizes.levels)
    return Figure(
        "lookahead",
        f"the embedded model, {sizes.num_new} tokens a row after {sizes.num_prompt}",
        COLUMNS,
        rows,
        (f"Medians over the decode steps of {sizes.rounds} rounds, both ways in turn in one process.",),
        asdict(sizes),
    )


def _measure(engine: Engine, level: int, num_blocks: int, block_size: int, sizes: Sizes) -> tuple[Cell, ...]:
    taken_ms: dict[bool, list[float]] = {False: [], True: []}
    num_ahead = num_steps = 0
    for number in range(1 + sizes.rounds):
        for is_on, times in taken_ms.items():
            scheduler = _scheduler(level, num_blocks, block_size, is_on)
            taken = _play(engine, scheduler, level, sizes)
            if number:  # the first round warms up
                times += taken
            if is_on:
                counters = scheduler.snapshot().counters
                num_ahead += counters.lookahead_steps
                num_steps += counters.decode_steps
    off_ms, on_ms = (statistics.median(times) for times in taken_ms.values())
    return level, off_ms, on_ms, on_ms / off_ms, f"{100 * num_ahead / num_steps:.0f} %"


def _scheduler(level: int, num_blocks: int, block_size: int, is_on: bool) -> Scheduler:
    pool = BlockPool(num_blocks)
    tables = BlockTables(pool, PrefixCache(pool, block_size, enabled=False), block_size)
    return Scheduler(SchedulerConfig(num_slots=level, max_batch_size=level, lookahead=is_on), tables)


def _play(engine: Engine, scheduler: Scheduler, level: int, sizes: Sizes) -> list[float]:
    """Milliseconds from the end of each step to the end of the next, while all rows decode."""
    for i in range(level):
        tokens = [(7919 * i + 104729 * k) % 40000 + 100 for k in range(sizes.num_prompt)]
        scheduler.add(Request(i, tokens, sizes.num_prompt, sizes.num_new, SamplingParams(temperature=0.0)))
    pipeline = Pipeline(engine, scheduler)
    taken_ms = []
    ended_s = time.perf_counter()
    while not pipeline.is_idle:
        plan = pipeline.plan(time.monotonic())
        pipeline.run(plan)
        began_s, ended_s = ended_s, time.perf_counter()
        if plan.kind == "decode" and len(plan.rows) == level:
            taken_ms.append((ended_s - began_s) * 1000)
    return taken_ms
