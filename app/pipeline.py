"""Steps one after the other on the engine thread: planned, computed, applied, and sometimes one of them in flight."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from app.errors import EngineFault
from app.scheduler.plan import Event, Finished, Plan, Result
from app.scheduler.scheduler import Scheduler

log = logging.getLogger("mlxcel.worker")


class Engine(Protocol):
    """What is needed of an engine. Everything is called on one thread."""

    def submit(self, plan: Plan) -> Any:
        """Start a step; gives what ``finish_rows`` wants. Raises EngineFault when all that the pool held is lost, with
        whatever else was in flight."""
        ...

    def finish_rows(self, step: Any) -> Result:
        """Wait for a step and read what it drew. Raises as ``submit``."""
        ...

    def resize(self, num_blocks: int) -> int:
        """Grow the pool if memory allows; returns its number of blocks. Raises as ``submit``."""
        ...

    def close(self) -> None: ...


class Pipeline:
    """Runs what the scheduler decides on the engine. Where the scheduler can say what follows a step, that is submitted
    before the step's tokens are read, and is then the next one to be run.

    Between two calls of ``run`` the scheduler may be told anything.
    """

    def __init__(self, engine: Engine, scheduler: Scheduler, on_fault: Callable[[], None] = lambda: None) -> None:
        """``on_fault`` is called when the pool was lost."""
        self.engine = engine
        self.scheduler = scheduler
        self._on_fault = on_fault
        self._in_flight: tuple[Plan, Any] | None = None

    @property
    def is_idle(self) -> bool:
        """Whether no request is queued or running, and nothing is in flight."""
        return self._in_flight is None and self.scheduler.is_idle

    def plan(self, now: float) -> Plan:
        """What ``run`` has to be called with: the step in flight, or a new one. It may be empty."""
        return self._in_flight[0] if self._in_flight else self.scheduler.plan(now)

    def run(self, plan: Plan, meanwhile: Callable[[], None] = lambda: None) -> Sequence[Event]:
        """Compute a plan to its end and apply it. ``meanwhile`` is called while it is computed, if it comes to that."""
        scheduler, in_flight = self.scheduler, self._in_flight
        self._in_flight = None
        try:
            if plan.num_blocks:
                return scheduler.resized(self.engine.resize(plan.num_blocks), time.monotonic())
            step = in_flight[1] if in_flight else self.engine.submit(plan)
            following = scheduler.ahead(plan)
            if following is not None:
                self._in_flight = following, self.engine.submit(following)
            meanwhile()
            result = self.engine.finish_rows(step)
        except EngineFault as fault:
            log.error("a step of %d rows failed, and the block pool with it: %s", len(plan.rows), fault)
            self._in_flight = None
            events = scheduler.lose_pool(plan, time.monotonic())
            self._on_fault()
            return events
        events = scheduler.apply(plan, result, time.monotonic())
        for event in events:
            if isinstance(event, Finished) and event.is_fault:
                why = result.failures.get(event.request_id, "no token, or a block that could not be given back")
                log.error("request %d failed in the engine: %s", event.request_id, why)
        return events
