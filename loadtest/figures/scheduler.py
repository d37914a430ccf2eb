"""What a tick costs besides its forward: plan, apply and snapshot of the scheduler alone, under a long queue."""

from __future__ import annotations

import statistics
import time
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path

from app.kv.block_pool import BlockPool
from app.kv.block_table import BlockTables
from app.kv.prefix_cache import PrefixCache
from app.request import Request
from app.scheduler.plan import Draw, Plan, Result
from app.scheduler.policy import SchedulerConfig
from app.scheduler.scheduler import Scheduler
from loadtest.figures.figure import Figure
from loadtest.waves import percentile

BLOCK_SIZE = 64


@dataclass(frozen=True)
class Sizes:
    """Answers have one to two times ``num_rows`` tokens, so that rows leave and others are admitted all the time."""

    num_rows: int = 256
    num_queued: int = 10_000
    num_ticks: int = 400
    num_prompt: int = 100


SMALL = Sizes(num_rows=32, num_queued=500, num_ticks=100)


def measure(folder: Path, small: bool) -> Figure:
    return figure(SMALL if small else Sizes())


def figure(sizes: Sizes) -> Figure:
    scheduler = _scheduler(sizes)
    ids = count()

    def queue(num_requests: int) -> None:
        for _, i in zip(range(num_requests), ids, strict=False):
            scheduler.add(_request(i, sizes))

    queue(4 * sizes.num_rows)
    for _ in range(2 * sizes.num_rows):
        plan = scheduler.plan(0.0)
        scheduler.apply(plan, _draws(plan), 0.0)
    queue(sizes.num_queued - scheduler.snapshot().num_queued)
    before, taken_ms, num_rows = scheduler.snapshot(), _time(scheduler, sizes.num_ticks), sizes.num_rows
    after = scheduler.snapshot().counters
    num_started = after.started - before.counters.started
    num_decoding = (after.decode_tokens - before.counters.decode_tokens) / sizes.num_ticks
    return Figure(
        "scheduler",
        f"{num_rows} rows, {before.num_queued} requests in the queue, no engine, {sizes.num_ticks} ticks",
        ("ms a tick", "median", "p99"),
        tuple((name, statistics.median(times), percentile(times, 0.99)) for name, times in taken_ms.items()),
        (f"{num_decoding:.1f} rows decode in a tick, {num_started} requests are admitted in all.",),
        asdict(sizes),
    )


def _time(scheduler: Scheduler, num_ticks: int) -> dict[str, list[float]]:
    """Milliseconds of each part, tick by tick, and of all parts together."""
    taken_ms: dict[str, list[float]] = {"plan": [], "apply": [], "snapshot": [], "together": []}
    for _ in range(num_ticks):
        began_s = time.perf_counter()
        plan = scheduler.plan(0.0)
        planned_s = time.perf_counter()
        result = _draws(plan)
        ran_s = time.perf_counter()
        scheduler.apply(plan, result, 0.0)
        applied_s = time.perf_counter()
        scheduler.snapshot()
        parts = (planned_s - began_s, applied_s - ran_s, time.perf_counter() - applied_s)
        for times, part_s in zip(taken_ms.values(), (*parts, sum(parts)), strict=True):
            times.append(part_s * 1000)
    return taken_ms


def _scheduler(sizes: Sizes) -> Scheduler:
    longest = sizes.num_prompt + 2 * sizes.num_rows
    pool = BlockPool(2 * sizes.num_rows * -(-longest // BLOCK_SIZE))
    config = SchedulerConfig(num_slots=sizes.num_rows, max_batch_size=sizes.num_rows)
    return Scheduler(config, BlockTables(pool, PrefixCache(pool, BLOCK_SIZE), BLOCK_SIZE))


def _request(request_id: int, sizes: Sizes) -> Request:
    tokens = [(7919 * request_id + 104729 * k) % 40000 + 100 for k in range(sizes.num_prompt)]
    return Request(request_id, tokens, sizes.num_prompt, sizes.num_rows + 37 * request_id % sizes.num_rows)


def _draws(plan: Plan) -> Result:
    """What an engine would give back: a token for each row that draws."""
    return Result({row.request_id: (Draw(1000),) for row in plan.rows if row.draws})
