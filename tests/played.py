"""An engine that plays tokens written down beforehand, and a worker around it: threads are tested without a model."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from app.errands import Refused
from app.scheduler.plan import Draw, Plan, Result, Row
from app.worker import Worker
from tests.driving import build_scheduler

PATIENCE_S = 20.0
MANY = 1000
CONFIG: dict[str, Any] = {}  # of every worker's scheduler, where a test says nothing else


class PlayedEngine:
    """Draws ``play(row, index)`` as output ``index`` of a row, and finishes as many steps as it is allowed.

    What ``failures`` holds is raised instead, one a step. ``entered`` is set when a step is waited for, and ``plans``
    are those that were; ``submitted`` may hold one more.
    """

    def __init__(self, play: Callable[[Row, int], int] = lambda row, index: index, num_steps: int = 10**6) -> None:
        self.play = play
        self.failures: list[BaseException] = []
        self.results: list[Result] = []
        self.may_grow = True
        self.plans: list[Plan] = []
        self.submitted: list[Plan] = []
        self.entered = threading.Event()
        self.closed = threading.Event()
        self._allowed = threading.Semaphore(num_steps)

    def allow(self, num_steps: int = MANY) -> None:
        self._allowed.release(num_steps)

    def submit(self, plan: Plan) -> Plan:
        self.submitted.append(plan)
        return plan

    def finish_rows(self, plan: Plan) -> Result:
        self.plans.append(plan)
        self.entered.set()
        assert self._allowed.acquire(timeout=PATIENCE_S), "nobody allowed the step"
        if self.failures:
            raise self.failures.pop(0)
        if self.results:
            return self.results.pop(0)
        return Result({row.request_id: tuple(map(self._draw, row.each_draw())) for row in plan.rows if row.draws})

    def resize(self, num_blocks: int) -> int:
        return num_blocks if self.may_grow else 0

    def close(self) -> None:
        self.closed.set()

    def _draw(self, row: Row) -> Draw:
        token = self.play(row, row.start + row.num_new - row.num_prompt)
        if row.sampling.num_logprobs is None:
            return Draw(token)
        return Draw(token, -0.5, ((token, -0.5), (65, -2.0)))


class Mailbox(list[Any]):
    """A sink that keeps the news it gets."""

    def __call__(self, news: Any) -> None:
        self.append(news)

    def of(self, request_id: int) -> list[Any]:
        return [news for news in self if news.request_id == request_id]

    def refusals(self) -> dict[int, str]:
        return {news.request_id: str(news.error) for news in self if isinstance(news, Refused)}


async def until(condition: Callable[[], Any]) -> None:
    """Wait for what a living worker brings about soon."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110 - the condition looks at another thread
            await asyncio.sleep(0.002)


@asynccontextmanager
async def working(
    engine: PlayedEngine,
    *,
    capacity: int = 8,
    num_blocks: int = 32,
    block_size: int = 4,
    tick_timeout_s: float = 600.0,
    queue_timeout_s: float | None = None,
    prefix_cache: bool = False,
    ticks: list[tuple[str, float]] | None = None,
    **config: Any,
) -> AsyncIterator[Worker]:
    """A started worker. At the end its thread has gone, its engine is closed, and the books add up."""
    scheduler = build_scheduler(num_blocks, block_size, prefix_cache, **(CONFIG | config))
    seen: list[tuple[str, float]] = [] if ticks is None else ticks
    worker = Worker(
        lambda: (engine, scheduler),
        capacity,
        tick_timeout_s,
        lambda kind, seconds: seen.append((kind, seconds)),
        queue_timeout_s,
    )
    await worker.start()
    try:
        yield worker
    finally:
        engine.allow()
        await worker.stop(PATIENCE_S)
        assert engine.closed.is_set()
        assert worker.tick_age_s() == 0.0
        scheduler.check()
        if not worker.failed.is_set():
            assert scheduler.is_idle
            assert scheduler.snapshot().pool.live == 0
