"""One simulated host: the real scheduler and block tables, an engine that only says how long it would take, and a
clock that is moved by hand."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from app.errors import MlxcelError
from app.request import Request, SamplingParams, State
from app.scheduler.cost import CostModel, Load, load_of
from app.scheduler.fake_host import FakeEngine, HostSpec
from app.scheduler.plan import Admitted, Event, Finished, Plan, Row
from app.scheduler.tally import Tally
from app.scheduler.workload import Arrival, tokens_of

GREEDY = SamplingParams(temperature=0.0)


class Stuck(MlxcelError):
    """The scheduler has requests and plans nothing: a fault in it."""


class Outcome(NamedTuple):
    """What became of arrival ``number``. All times in seconds from the start of the simulation."""

    number: int
    host: int
    arrived_s: float
    admitted_s: float
    first_s: float
    ended_s: float
    num_output: int
    num_cached: int


@dataclass(slots=True)
class _Course:
    """A request under way. ``last_s`` is when its latest token came."""

    request: Request
    admitted_s: float = 0.0
    num_cached: int = 0
    first_s: float | None = None
    last_s: float = 0.0


@dataclass(slots=True)
class _Stretch:
    """A plan under way and the moments when its ticks end: one, or many where each would be planned like the first.

    ``crossings`` says who needs a new block in which tick (from 0).
    """

    plan: Plan
    began_s: float
    ends_s: list[float]
    crossings: dict[int, list[Row]] = field(default_factory=dict)


class Host:
    """Runs ticks one after the other. Between two of them, decode ticks that cannot differ are taken as one stretch:
    no row ends in it, nobody can be admitted, and the blocks that it takes are free. The block tables see the same
    calls in the same order as with single ticks, and an arrival that might be admitted cuts the stretch short. So the
    result is the same, to the bit, as with ``leaps`` off.
    """

    def __init__(self, number: int, spec: HostSpec, cost: CostModel, tally: Tally, leaps: bool = True) -> None:
        self.number = number
        self.tally = tally
        self.num_ticks = 0
        self.num_in_flight = 0  # queued or running
        self.scheduler, self.tables = spec.scheduler()
        self._spec = spec
        self._cost = cost
        # A budget for the gap between tokens is kept by the time that single ticks take.
        self._leaps = leaps and spec.config.itl_budget_s is None
        self._engine = FakeEngine()
        self._inbox: list[Request] = []
        self._courses: dict[int, _Course] = {}
        self._stretch: _Stretch | None = None
        self._last_rows: set[int] = set()
        capacity = spec.max_queue_depth
        self._capacity = math.inf if capacity is None else capacity + spec.config.num_slots

    @property
    def num_slots(self) -> int:
        return min(self._spec.config.num_slots, self._spec.config.max_batch_size)

    @property
    def next_s(self) -> float:
        """When the ticks under way end; never while idle."""
        return math.inf if self._stretch is None else self._stretch.ends_s[-1]

    def offer(self, index: int, arrival: Arrival, now: float) -> bool:
        """Take a request, or refuse it: the queue is full, or it would not fit into an empty pool."""
        num_needed = self.tables.blocks_for(arrival.num_prompt + arrival.num_output - 1)
        if self.num_in_flight >= self._capacity or num_needed > self.tables.num_blocks:
            return False
        request = Request(
            index,
            tokens_of(index, arrival),
            arrival.num_prompt,
            arrival.num_output,
            GREEDY,
            priority=arrival.priority,
            arrival_s=now,
        )
        stretch = self._stretch
        if stretch is not None and len(stretch.ends_s) > 1 and self._may_join(stretch):
            del stretch.ends_s[bisect_right(stretch.ends_s, now) + 1 :]
        self._courses[index] = _Course(request)
        self.num_in_flight += 1
        self._inbox.append(request)
        if stretch is None:
            self._begin(now)
        return True

    def tick(self) -> list[Outcome]:
        """End the ticks under way and begin the next one. Gives what has come to its end."""
        stretch = self._stretch
        assert stretch is not None
        now, num_ticks = stretch.ends_s[-1], len(stretch.ends_s)
        plan = self._leap(stretch) if num_ticks > 1 else stretch.plan
        self._time_gaps(stretch)
        self.num_ticks += num_ticks
        events = self.scheduler.apply(plan, self._engine.step(plan), now)
        ended = self._enter(events)
        self._begin(now)
        return ended

    # ---- a stretch ----

    def _begin(self, now: float) -> None:
        for request in self._inbox:
            self.scheduler.add(request)
        self._inbox.clear()
        if self.scheduler.is_idle:
            self._stretch = None
            self.tally.occupy(self.number, now, self.tables.pool.num_live, 0, 0)
            return
        plan = self.scheduler.plan(now)
        if not plan.rows:
            raise Stuck(f"host {self.number} has {self.num_in_flight} requests and plans nothing")
        rows = {row.request_id for row in plan.rows}
        num_waiting = self.num_in_flight - len(rows)
        load = load_of(plan, self._spec.block_size)
        self.tally.occupy(self.number, now, self.tables.pool.num_live, len(rows), num_waiting)
        self._stretch = _Stretch(plan, now, [now + self._cost.seconds(load)])
        # A plan like the one before shows that whoever waits was refused with the blocks as they are now.
        if self._leaps and (num_waiting == 0 or rows == self._last_rows) and self._all_decode(plan):
            self._stretch_out(self._stretch, load)
        self._last_rows = rows

    def _all_decode(self, plan: Plan) -> bool:
        courses, decoding = self._courses, State.DECODING
        if plan.copies or plan.rows[-1].num_new > 1:  # chunks stand last
            return False
        return all(courses[row.request_id].request.state is decoding for row in plan.rows)

    def _stretch_out(self, stretch: _Stretch, load: Load) -> None:
        """Add the ticks that follow for certain, as long as nobody new comes."""
        rows = stretch.plan.rows
        num_ticks = min([self._num_left(row) for row in rows])
        crossings: dict[int, list[Row]] = {}
        size = self._spec.block_size
        for row in rows:
            for tick in range(len(row.blocks) * size - len(row.tokens) + 1, num_ticks, size):
                crossings.setdefault(tick, []).append(row)
        num_free, num_blocks = self.tables.num_free, load.num_blocks
        ends_s, done = stretch.ends_s, 1
        for tick in [*sorted(crossings), num_ticks]:
            end_s, seconds = ends_s[-1], self._cost.seconds(load._replace(num_blocks=num_blocks))
            for _ in range(done, tick):
                end_s += seconds
                ends_s.append(end_s)
            growing = crossings.get(tick, ())
            num_free -= len(growing)
            if tick == num_ticks or num_free < 0:
                return
            stretch.crossings[tick] = crossings[tick]
            num_blocks += len(growing)
            done = tick

    def _may_join(self, stretch: _Stretch) -> bool:
        return self._spec.config.enable_preemption or len(stretch.plan.rows) < self.num_slots

    def _num_left(self, row: Row) -> int:
        request = self._courses[row.request_id].request
        return request.max_tokens - request.num_output

    def _leap(self, stretch: _Stretch) -> Plan:
        """Give the rows the tokens and blocks of all ticks but the last one's token, and widen the plan to cover them:
        the scheduler enters it as it would a chunk that ends with the request's last token."""
        rows, num_ticks = stretch.plan.rows, len(stretch.ends_s)
        num_held = {row.request_id: len(row.tokens) for row in rows}
        for row in rows:
            after = row.tokens[-1] + 1
            self._courses[row.request_id].request.tokens.extend(range(after, after + num_ticks - 1))
        for tick, growing in stretch.crossings.items():
            if tick >= num_ticks:
                break
            for row in growing:
                self.tables.publish(row.request_id, row.tokens, num_held[row.request_id] + tick - 1)
            self.tables.prefix_cache.expire(stretch.ends_s[tick - 1])
            for row in growing:
                self.tables.grow(row.request_id, num_held[row.request_id] + tick)
        self.tables.prefix_cache.expire(stretch.ends_s[-2])
        return Plan(tuple(_widened(row, num_ticks) for row in rows))

    # ---- what came of it ----

    def _time_gaps(self, stretch: _Stretch) -> None:
        """Count the gaps between tokens of rows that go on."""
        first_s, num_on_time = stretch.ends_s[0], 0
        for row in stretch.plan.rows:
            course = self._courses[row.request_id]
            if row.draws and course.first_s is not None:
                if course.last_s == stretch.began_s:
                    num_on_time += 1
                else:
                    self.tally.gap(first_s - course.last_s, 1)
        if num_on_time:
            self.tally.gap(first_s - stretch.began_s, num_on_time)
        if len(stretch.ends_s) > 1:
            num_rows = len(stretch.plan.rows)
            marks = [0, *(tick - 1 for tick in stretch.crossings if 1 < tick < len(stretch.ends_s))]
            for early, late in zip(marks, [*marks[1:], len(stretch.ends_s) - 1], strict=True):
                seconds = stretch.ends_s[late] - stretch.ends_s[early]
                self.tally.gap(seconds / (late - early), num_rows * (late - early))

    def _enter(self, events: Iterable[Event]) -> list[Outcome]:
        ended = []
        for event in events:
            course = self._courses[event.request_id]
            if isinstance(event, Admitted):
                course.admitted_s, course.num_cached = event.at_s, event.num_cached
            elif isinstance(event, Finished):
                ended.append(self._outcome(event, course))
                del self._courses[event.request_id]
                self.num_in_flight -= 1
            else:
                course.last_s = event.at_s
                if course.first_s is None:
                    course.first_s = event.at_s
        return ended

    def _outcome(self, event: Finished, course: _Course) -> Outcome:
        assert course.first_s is not None
        return Outcome(
            event.request_id,
            self.number,
            course.request.arrival_s,
            course.admitted_s,
            course.first_s,
            event.at_s,
            event.num_output,
            course.num_cached,
        )


def preemptions(hosts: Iterable[Host]) -> dict[str, int]:
    """How often running requests lost their place, by cause, over all hosts."""
    total: Counter[str] = Counter()
    for host in hosts:
        total.update(host.scheduler.snapshot().counters.preemptions)
    return dict(total)


def _widened(row: Row, num_new: int) -> Row:
    return row._replace(num_new=num_new)
