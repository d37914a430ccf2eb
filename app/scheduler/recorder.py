"""The flight recorder: a scheduler that remembers what it was told and what it decided in its last ticks.

What is kept here refers to tokens, as the scheduler itself does. What leaves the process does not: see ``recording``.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from app.kv.block_table import BlockTables
from app.kv.books import Books, capture
from app.request import FinishReason, Request
from app.scheduler.lookahead import wanted
from app.scheduler.pace import Pace
from app.scheduler.plan import Event, Finished, Plan, Result
from app.scheduler.policy import SchedulerConfig
from app.scheduler.scheduler import Scheduler
from app.scheduler.speculation import Drafter, right

Entry = tuple[Any, ...]


@dataclass(slots=True)
class Recorded:
    """One request. ``tokens`` is its own growing list until it ends, then a copy. ``num_stopped`` is how many tokens it
    had drawn when an end token ended it; 0: none did."""

    id: int
    num_prompt: int
    max_tokens: int
    priority: int
    arrival_s: float
    use_prefix_cache: bool
    salt: str
    tokens: Sequence[int]
    num_stopped: int = 0


class Standing(NamedTuple):
    """Where a request stood at a checkpoint. ``num_tokens`` is what it had by then, ``arrival`` its place in line."""

    id: int
    state: str
    arrival: int
    num_tokens: int
    num_computed: int
    num_cached: int
    slot: int | None
    num_faults: int


class Checkpoint(NamedTuple):
    """All that decisions depend on, before the first entry of a segment: the books of the blocks, the running requests
    in their order, the waiting ones, and every plain number that the scheduler keeps (see ``numbers_of``)."""

    books: Books
    running: tuple[Standing, ...]
    waiting: tuple[Standing, ...]
    numbers: dict[str, float]


class Segment(NamedTuple):
    """Entries from one checkpoint to the next. An entry is its kind, then integers and moments in seconds:

    ``add`` (request), ``cancel`` (id, at), ``finish`` (id, reason, num_output, at), ``reset`` (), ``plan`` (at, rows,
    number of copies, blocks asked for, live blocks, waiting requests), ``ahead`` (rows of the step that was submitted
    before this tick's ``apply``, and is applied after it), ``apply`` (at, ids that failed, ids of rows ahead that were
    dropped), ``resize`` (blocks, at), ``lose`` (at). ``rows`` are four integers each: request id, start, number of
    tokens, whether it draws. Before a ``plan`` there is a ``draft`` (id, number of tokens) for each that was offered,
    and before an ``apply`` a ``check`` (id, number of tokens that were right) for each that was computed.
    """

    first_tick: int
    checkpoint: Checkpoint
    requests: dict[int, Recorded]
    entries: list[Entry]


class RecordedScheduler(Scheduler):
    """Keeps the last ``num_ticks`` ticks at least, and twice as many at most: two segments, of which the older one goes
    when the newer is full and nothing is in flight. So the first tick that is kept always has its checkpoint.

    ``segments`` may be read from any thread: it is replaced whole, entries are only ever appended.
    """

    def __init__(
        self, config: SchedulerConfig, tables: BlockTables, num_ticks: int, drafter: Drafter | None = None
    ) -> None:
        super().__init__(config, tables, None if drafter is None else _NotedDrafter(drafter, self._note))
        self.config = config
        self._ticks_kept = num_ticks
        self._tick = 0
        self._is_planning = False
        self._live: dict[int, Recorded] = {}
        self.segments: tuple[Segment, ...] = ()
        self._open_segment()

    def add(self, request: Request) -> None:
        super().add(request)
        recorded = Recorded(
            request.id,
            request.num_prompt,
            request.max_tokens,
            request.priority,
            request.arrival_s,
            request.use_prefix_cache,
            request.cache_salt,
            request.tokens,
        )
        self._live[request.id] = self.segments[-1].requests[request.id] = recorded
        self._note("add", request.id)

    def cancel(self, request_id: int, now: float) -> list[Event]:
        self._note("cancel", request_id, now)
        return super().cancel(request_id, now)

    def finish(self, request_id: int, reason: FinishReason, num_output: int, now: float) -> list[Event]:
        self._note("finish", request_id, reason.value, num_output, now)
        return super().finish(request_id, reason, num_output, now)

    def reset_prefix_cache(self) -> int:
        self._note("reset")
        return super().reset_prefix_cache()

    def plan(self, now: float) -> Plan:
        if self._is_planning:  # a plan that has pushed out the only row begins once more
            return super().plan(now)
        if self._tick - self.segments[-1].first_tick >= self._ticks_kept:
            self._open_segment()
        self._is_planning = True
        try:
            plan = super().plan(now)
        finally:
            self._is_planning = False
        figures = len(plan.copies), plan.num_blocks, self._tables.pool.num_live, len(self._queue)
        self._note("plan", now, _flat(plan), *figures)
        self._tick += 1
        return plan

    def ahead(self, plan: Plan) -> Plan | None:
        following = super().ahead(plan)
        if following is not None:
            self._note("ahead", _flat(following))
            self._tick += 1
        return following

    def apply(self, plan: Plan, result: Result, now: float) -> list[Event]:
        draws, failures = result.draws, result.failures
        counted = {row.request_id for row in wanted(plan, result, self._seats)}
        dropped = tuple(row.request_id for row in plan.rows if row.request_id not in counted)
        failed = [
            row.request_id
            for row in plan.rows
            if row.request_id in counted and (row.request_id in failures or (row.draws and row.request_id not in draws))
        ]
        for row in plan.rows:
            if row.draft and row.request_id in draws:
                self._note("check", row.request_id, len(right(row.draft, draws[row.request_id])) - 1)
        self._note("apply", now, tuple(failed), dropped)
        return super().apply(plan, result, now)

    def resized(self, num_blocks: int, now: float) -> list[Event]:
        self._note("resize", num_blocks, now)
        return super().resized(num_blocks, now)

    def lose_pool(self, plan: Plan, now: float) -> list[Event]:
        self._note("lose", now)
        return super().lose_pool(plan, now)

    def _finish(self, request: Request, reason: FinishReason, num_output: int, now: float) -> Finished:
        finished = super()._finish(request, reason, num_output, now)
        recorded = self._live.pop(request.id)
        # The list would hold every token as an object of its own.
        recorded.tokens = array("q", request.tokens)
        if finished.reason is FinishReason.STOP and request.tokens[-1] in request.end_tokens:
            recorded.num_stopped = request.num_output
        return finished

    def _note(self, *entry: Any) -> None:
        self.segments[-1].entries.append(entry)

    def _open_segment(self) -> None:
        waiting = [request for request in self._requests.values() if request.id not in self._seats]
        checkpoint = Checkpoint(
            capture(self._tables),
            tuple(_standing(request) for request in self._seats.running),
            tuple(_standing(request) for request in waiting),
            numbers_of(self),
        )
        self.segments = (*self.segments[-1:], Segment(self._tick, checkpoint, dict(self._live), []))


class _NotedDrafter:
    """Notes how long each draft is. From there on all is decided by what the scheduler knows."""

    def __init__(self, drafter: Drafter, note: Callable[..., None]) -> None:
        self._drafter = drafter
        self._note = note
        self.may_propose = drafter.may_propose
        self.learn = drafter.learn
        self.forget = drafter.forget

    def draft(self, request: Request) -> tuple[int, ...]:
        draft = self._drafter.draft(request)
        if draft:
            self._note("draft", request.id, len(draft))
        return draft


def _flat(plan: Plan) -> array[int]:
    rows = array("q")
    for row in plan.rows:
        rows.extend((row.request_id, row.start, row.num_new, row.draws))
    return rows


def numbers_of(thing: object, path: str = "") -> dict[str, float]:
    """Every plain number among the attributes of a scheduler, and of the measured pace of its ticks, by its path."""
    numbers: dict[str, float] = {}
    for name, value in vars(thing).items():
        if isinstance(value, int | float):
            numbers[path + name] = value
        elif type(value).__module__ == Pace.__module__:
            numbers |= numbers_of(value, f"{path}{name}.")
    return numbers


def _standing(request: Request) -> Standing:
    return Standing(
        request.id,
        request.state.value,
        request.arrival,
        len(request.tokens),
        request.num_computed,
        request.num_cached,
        request.slot,
        request.num_faults,
    )
