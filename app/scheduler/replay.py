"""Runs a recording through the scheduler again: the same decisions, or the first one that differs."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple

from app.kv.books import restore
from app.request import FinishReason, Request, State
from app.scheduler.plan import Draw, Plan, Result, Row
from app.scheduler.recorder import Standing, numbers_of
from app.scheduler.recording import BadRecording, Recording, Rows, rows_of
from app.scheduler.scheduler import Scheduler
from app.scheduler.speculation import Drafter

UNKNOWN = -1  # a token of a draft, of which a recording tells no more than that it was there


@dataclass(frozen=True, slots=True)
class Difference:
    """The first tick that was planned otherwise. ``at`` says in which of the values, in words."""

    tick: int
    at: str
    recorded: object
    replayed: object

    def __str__(self) -> str:
        return f"tick {self.tick}: {self.at}: {self.recorded} was recorded, {self.replayed} came out"


class TickView(NamedTuple):
    """One tick as it was recorded. ``num_requeued`` requests lost their place since the one before; ``outcome`` is
    "applied", "resized" (the pool, and nothing else), "lost" (with the pool), or "open": it had not ended."""

    tick: int
    began_s: float
    seconds: float
    rows: Rows
    live_blocks: int
    num_waiting: int
    num_requeued: int
    outcome: str


@dataclass(frozen=True, slots=True)
class Replayed:
    """The ticks up to the first difference, if there is one."""

    ticks: list[TickView]
    difference: Difference | None = None


def replay(recording: Recording) -> Replayed:
    """Tell the scheduler again what it was told, and compare each plan: its rows, the number of copies, the blocks held
    and the requests waiting. Raises BadRecording for an entry of no meaning, and anything for one that makes no sense.
    """
    drafter = _RecordedDrafts()
    scheduler, requests = rebuild(recording, drafter)
    ticks: list[TickView] = []
    plan, following, num_requeued = Plan(), None, 0
    checked: dict[int, int] = {}
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
            case ("draft", request_id, num_tokens):
                drafter.lengths[request_id] = num_tokens
            case ("plan", at_s, _, *recorded):
                tick = recording.first_tick + len(ticks)
                plan, following = scheduler.plan(at_s), None
                drafter.lengths.clear()
                snapshot = scheduler.snapshot()
                rows = _rows(plan)
                values = [len(plan.copies), plan.num_blocks, snapshot.pool.live, snapshot.num_queued]
                names = ("copies of blocks", "blocks asked for", "blocks held", "requests waiting")
                if rows != rows_of(entry):
                    return Replayed(ticks, _difference_of_rows(tick, rows_of(entry), rows))
                for name, ours, theirs in zip(names, values, recorded, strict=True):
                    if ours != theirs:
                        return Replayed(ticks, Difference(tick, name, theirs, ours))
                before, num_requeued = num_requeued, sum(snapshot.counters.preemptions.values())
                _, _, live_blocks, num_waiting = values
                view = TickView(tick, at_s, 0.0, rows, live_blocks, num_waiting, num_requeued - before, "open")
                ticks.append(view)
            case ("check", request_id, num_right):
                checked[request_id] = num_right
            case ("ahead", _):
                following = scheduler.ahead(plan)
                if (rows := _rows(following or Plan())) != rows_of(entry):
                    return Replayed(ticks, _difference_of_rows(ticks[-1].tick + 1, rows_of(entry), rows))
            case ("apply", at_s, failed, dropped):
                rows_drawn = [
                    _drawn(row, recording.requests[row.request_id].tokens, checked.get(row.request_id, 0))
                    for row in plan.rows
                ]
                checked.clear()
                missing = {*failed, *dropped}
                draws = {row.request_id: drawn for row, drawn in rows_drawn if drawn and row.request_id not in missing}
                plan = replace(plan, rows=tuple(row for row, _ in rows_drawn))
                scheduler.apply(plan, Result(draws, dict.fromkeys(failed, "as recorded")), at_s)
                ticks[-1] = ticks[-1]._replace(seconds=at_s - ticks[-1].began_s, outcome="applied")
                if following is not None:
                    ticks.append(_view_ahead(ticks[-1].tick + 1, at_s, following, scheduler))
                    plan, following = following, None
            case ("resize", num_blocks, at_s):
                scheduler.resized(num_blocks, at_s)
                ticks[-1] = ticks[-1]._replace(seconds=at_s - ticks[-1].began_s, outcome="resized")
            case ("lose", at_s):
                scheduler.lose_pool(plan, at_s)
                ticks[-1] = ticks[-1]._replace(seconds=at_s - ticks[-1].began_s, outcome="lost")
                if following is not None:
                    view = _view_ahead(ticks[-1].tick + 1, at_s, following, scheduler)
                    ticks.append(view._replace(outcome="lost"))
                    following = None
            case _:
                raise BadRecording(f"an entry that means nothing: {str(entry)[:80]}")
    if following is not None:
        ticks.append(_view_ahead(ticks[-1].tick + 1, ticks[-1].began_s, following, scheduler))
    return Replayed(ticks)


class _RecordedDrafts:
    """Offers drafts as long as they were, by request id. What is in them shows only once they are checked."""

    def __init__(self) -> None:
        self.lengths: dict[int, int] = {}

    def draft(self, request: Request) -> tuple[int, ...]:
        return (UNKNOWN,) * self.lengths.get(request.id, 0)

    def may_propose(self, request: Request) -> bool:
        return False

    def learn(self, request_id: int, num_proposed: int, num_right: int) -> None:
        pass

    def forget(self, request_id: int) -> None:
        pass


def _drawn(row: Row, tokens: Sequence[int], num_right: int) -> tuple[Row, tuple[Draw, ...]]:
    """A row whose draft is right as far as it was, and its draws as far as they counted."""
    if not row.draws:
        return row, ()
    first = row.start + row.num_new - len(row.draft)
    right = tuple(tokens[first : first + num_right])
    draft = (*right, *row.draft[num_right:])
    return row._replace(draft=draft), tuple(Draw(token) for token in tokens[first : first + num_right + 1])


def rebuild(recording: Recording, drafter: Drafter | None = None) -> tuple[Scheduler, dict[int, Request]]:
    """The scheduler as it was before the first entry, and every request that is known, to be added or there already."""
    checkpoint = recording.checkpoint
    requests = {request_id: _request(recording, request_id) for request_id in recording.requests}
    scheduler = Scheduler(recording.config, restore(checkpoint.books), drafter)
    for path in numbers_of(scheduler).keys() & checkpoint.numbers.keys():
        owner, _, name = path.rpartition(".")
        setattr(attrgetter(owner)(scheduler) if owner else scheduler, name, checkpoint.numbers[path])
    for standing in (*checkpoint.running, *checkpoint.waiting):
        request = requests[standing.id]
        _resume(request, recording.requests[standing.id].tokens, standing)
        scheduler._requests[request.id] = request
        if request.slot is None:
            scheduler._queue.push(request)
        else:
            scheduler._seats._running[request.id] = request
            scheduler._seats._free.remove(request.slot)
        if len(request.tokens) == request.num_prompt and request.num_computed == 0:
            scheduler._unannounced[request.id] = None
    heapq.heapify(scheduler._seats._free)
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


def _view_ahead(tick: int, began_s: float, plan: Plan, scheduler: Scheduler) -> TickView:
    """A step that was submitted ahead, when its turn begins."""
    snapshot = scheduler.snapshot()
    return TickView(tick, began_s, 0.0, _rows(plan), snapshot.pool.live, snapshot.num_queued, 0, "open")


def _rows(plan: Plan) -> Rows:
    return [(row.request_id, row.start, row.num_new, row.draws) for row in plan.rows]


def _difference_of_rows(tick: int, recorded: Rows, replayed: Rows) -> Difference:
    for place in range(max(len(recorded), len(replayed))):
        theirs, ours = recorded[place : place + 1], replayed[place : place + 1]
        if theirs != ours:
            break
    return Difference(tick, f"row {place}", _row(theirs), _row(ours))


def _row(rows: Rows) -> str:
    if not rows:
        return "no row"
    request_id, start, num_new, draws = rows[0]
    return f"request {request_id}, {num_new} tokens from {start}{', drawing' if draws else ''}"
