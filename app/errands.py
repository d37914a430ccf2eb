"""What can be done to the scheduler between two ticks, and the news that it makes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from app.errors import InvalidRequest, MlxcelError, QueueTimeout, Unavailable
from app.request import FinishReason, Request
from app.scheduler.plan import Event
from app.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Refused:
    """The last news of a request that gets no (further) answer."""

    request_id: int
    error: MlxcelError


News = Event | Refused
Errand = Callable[[Scheduler], Iterable[News]]


def add(scheduler: Scheduler, requests: Sequence[Request]) -> list[News]:
    """Queue requests; refuse those that even an empty pool could not hold."""
    refused: list[News] = []
    for request in requests:
        try:
            scheduler.add(request)
        except InvalidRequest as error:
            refused.append(Refused(request.id, error))
    return refused


def cancel(scheduler: Scheduler, request_ids: Iterable[int]) -> list[News]:
    """End requests, wherever they are; unknown ids have ended by themselves."""
    now = time.monotonic()
    return [event for request_id in request_ids for event in scheduler.cancel(request_id, now)]


def finish(scheduler: Scheduler, request_id: int, num_output: int) -> list[News]:
    """End a request whose answer was complete after ``num_output`` tokens."""
    return list(scheduler.finish(request_id, FinishReason.STOP, num_output, time.monotonic()))


def refuse_waiting(scheduler: Scheduler) -> list[News]:
    """A drain begins: who has no slot yet gets none."""
    return [_refuse(scheduler, request, Unavailable("Draining")) for request in scheduler.waiting()]


def expire(scheduler: Scheduler, timeout_s: float) -> list[News]:
    """Refuse the requests that have waited for their slot longer than ``timeout_s``."""
    now = time.monotonic()
    late = scheduler.waiting(arrived_before_s=now - timeout_s)
    return [_refuse(scheduler, request, QueueTimeout(now - request.arrival_s)) for request in late]


def _refuse(scheduler: Scheduler, request: Request, error: MlxcelError) -> Refused:
    scheduler.finish(request.id, FinishReason.REFUSED, 0, time.monotonic())
    return Refused(request.id, error)
