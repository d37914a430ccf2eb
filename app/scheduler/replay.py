"""Runs a recording through the scheduler again: the same decisions, or the first one that differs."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from app.kv.books import restore
from app.request import FinishReason, Request, State
from app.scheduler.plan import Draw, Plan, Result
from app.scheduler.recorder import Standing
from app.scheduler.recording import Recording, rows_of
from app.scheduler.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class Difference:
    """The first tick that was planned otherwise. ``at`` says in which of the values, in words."""

    tick: int
    at: str
    recorded: object
    replayed: object

    def __str__(self) -> str:
        return f"tick {self.tick}: {self.at}: {self.recorded} was recorded, {self.replayed} came out"


def replay(recording: Recording) -> Difference | None:
    """Tell the scheduler again what it was told, and compare each plan: its rows, the number of copies, the blocks held
    and the requests waiting. None: they are all the same."""
    scheduler, requests = rebuild(recording)
    tick, plan = recording.first_tick - 1, Plan()
    for entry in recording.entries:
        match entry:
            case ("add", request_id):
                scheduler.add(requests[request_id])
            case ("cancel", request_id, at_s):
                scheduler.cancel(request_id, at_s)
            case ("finish", request_id, reason, num_output, at_s):
                scheduler.finish(request_id, FinishReason(reason), num_output, at_s)
            case ("reset",):
                scheduler.reset_prefix_cache()
            case ("plan", at_s, _, *recorded):
                tick += 1
                plan = scheduler.plan(at_s)
                snapshot = scheduler.snapshot()
                rows = [(row.request_id, row.start, row.num_new, row.draws) for row in plan.rows]
                values = [len(plan.copies), snapshot.pool.live, snapshot.num_queued]
                names = ("copies of blocks", "blocks held", "requests waiting")
                if rows != rows_of(entry):
                    return _difference_of_rows(tick, rows_of(entry), rows)
                for name, ours, theirs in zip(names, values, recorded, strict=True):
                    if ours != theirs:
                        return Difference(tick, name, theirs, ours)
            case ("apply", at_s, failed):
                draws = {
                    row.request_id: Draw(recording.requests[row.request_id].tokens[row.start + row.num_new])
                    for row in plan.rows
                    if row.draws and row.request_id not in failed
                }
                scheduler.apply(plan, Result(draws, dict.fromkeys(failed, "as recorded")), at_s)
            case ("lose", at_s):
                scheduler.lose_pool(plan, at_s)
    return None


def rebuild(recording: Recording) -> tuple[Scheduler, dict[int, Request]]:
    """The scheduler as it was before the first entry, and every request that is known, to be added or there already."""
    checkpoint = recording.checkpoint
    requests = {request_id: _request(recording, request_id) for request_id in recording.requests}
    scheduler = Scheduler(recording.config, restore(checkpoint.books))
    for name, value in checkpoint.numbers.items():
        if name in vars(scheduler):
            setattr(scheduler, name, value)
    for standing in (*checkpoint.running, *checkpoint.waiting):
        request = requests[standing.id]
        _resume(request, recording.requests[standing.id].tokens, standing)
        scheduler._requests[request.id] = request
        if request.slot is None:
            scheduler._queue.push(request)
        else:
            scheduler._running[request.id] = request
            scheduler._free_slots.remove(request.slot)
        if len(request.tokens) == request.num_prompt and request.num_computed == 0:
            scheduler._unannounced[request.id] = None
    heapq.heapify(scheduler._free_slots)
    return scheduler, requests


def _request(recording: Recording, request_id: int) -> Request:
    recorded = recording.requests[request_id]
    request = Request(
        recorded.id,
        list(recorded.tokens[: recorded.num_prompt]),
        recorded.num_prompt,
        recorded.max_tokens,
        priority=recorded.priority,
        arrival_s=recorded.arrival_s,
        use_prefix_cache=recorded.use_prefix_cache,
        cache_salt=recorded.salt,
    )
    if recorded.num_stopped:
        # The number of a beginning stands in no other place, so nothing but that draw can end the request.
        request.end_tokens = frozenset({recorded.tokens[recorded.num_prompt + recorded.num_stopped - 1]})
    return request


def _resume(request: Request, tokens: object, standing: Standing) -> None:
    assert isinstance(tokens, list)
    request.tokens = tokens[: standing.num_tokens]
    request.arrival = standing.arrival
    request.state = State(standing.state)
    request.num_computed, request.num_cached = standing.num_computed, standing.num_cached
    request.slot, request.num_faults = standing.slot, standing.num_faults


def _difference_of_rows(
    tick: int, recorded: list[tuple[int, int, int, bool]], replayed: list[tuple[int, int, int, bool]]
) -> Difference:
    for place in range(max(len(recorded), len(replayed))):
        theirs, ours = recorded[place : place + 1], replayed[place : place + 1]
        if theirs != ours:
            break
    return Difference(tick, f"row {place}", _row(theirs), _row(ours))


def _row(rows: list[tuple[int, int, int, bool]]) -> str:
    if not rows:
        return "no row"
    request_id, start, num_new, draws = rows[0]
    return f"request {request_id}, {num_new} tokens from {start}{', drawing' if draws else ''}"
