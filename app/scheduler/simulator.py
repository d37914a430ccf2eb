"""One simulated host: the real scheduler and block tables, an engine that only says how long it would take, and a
clock that is moved by hand."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate, repeat
from typing import NamedTuple

from app.errors import MlxcelError
from app.request import Request, SamplingParams, State
from app.scheduler.cost import CostModel, Load, load_of
from app.scheduler.fake_host import FakeEngine, HostSpec
from app.scheduler.plan import Event, Finished, Plan, Row, Token
from app.scheduler.tally import LIVE_BLOCKS, RUNNING, WAITING, Tally
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
    """A plan under way, the requests of its rows, and the moments when its ticks end: one, or many where each would be
    planned like the first.

    ``crossings`` says who needs a new block in which tick (from 0).
    """

    plan: Plan
    courses: list[_Course]
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
        self.next_s = math.inf  # when the ticks under way end; never while idle
        self.scheduler, self.tables = spec.scheduler()
        self._spec = spec
        self._cost = cost
        self._leaps = leaps
        self._engine = FakeEngine()
        self._inbox: list[Request] = []
        self._courses: dict[int, _Course] = {}
        self._stretch: _Stretch | None = None
        self._last_ids: list[int] = []
        self._is_paced = spec.config.itl_budget_s is not None
        capacity = spec.max_queue_depth
        self._capacity = math.inf if capacity is None else capacity + spec.config.num_slots

    @property
    def num_slots(self) -> int:
        return min(self._spec.config.num_slots, self._spec.config.max_batch_size)

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
            self.next_s = stretch.ends_s[-1]
        self._courses[index] = _Course(request)
        self.num_in_flight += 1
        self._inbox.append(request)
        if stretch is None:
            self._begin(now)
        else:
            self.tally.tell(self.number, WAITING, now, self.num_in_flight - len(stretch.courses))
        return True

    def tick(self) -> list[Outcome]:
        """End the ticks under way and begin the next one. Gives what has come to its end."""
        stretch = self._stretch
        assert stretch is not None
        now, num_ticks = stretch.ends_s[-1], len(stretch.ends_s)
        self._time_gaps(stretch)
        if num_ticks > 1:
            self._leap(stretch)
        self.num_ticks += num_ticks
        ended = self._enter(self.scheduler.apply(stretch.plan, self._engine.step(stretch.plan), now))
        self._begin(now)
        return ended

    # ---- a stretch ----

    def _begin(self, now: float) -> None:
        for request in self._inbox:
            self.scheduler.add(request)
        self._inbox.clear()
        if self.scheduler.is_idle:
            self._stretch, self.next_s = None, math.inf
            self._tell(now, 0, 0)
            return
        plan = self.scheduler.plan(now)
        if not plan.rows:
            raise Stuck(f"host {self.number} has {self.num_in_flight} requests and plans nothing")
        ids = [row.request_id for row in plan.rows]
        num_waiting = self.num_in_flight - len(ids)
        load = load_of(plan, self._spec.block_size)
        self._tell(now, len(ids), num_waiting)
        self._stretch = _Stretch(plan, [self._courses[i] for i in ids], now, [now + self._cost.seconds(load)])
        # A plan like the one before shows that whoever waits was refused with the blocks as they are now. With a budget
        # for the gap between tokens it may also have been refused for the time that ticks took.
        if self._leaps and (num_waiting == 0 or (ids == self._last_ids and not self._is_paced)):
            self._stretch_out(self._stretch, load)
        self.next_s = self._stretch.ends_s[-1]
        self._last_ids = ids

    def _stretch_out(self, stretch: _Stretch, load: Load) -> None:
        """Add the ticks that follow for certain where all rows decode, as long as nobody new comes."""
        rows = stretch.plan.rows
        if rows[-1].num_new > 1:  # chunks stand last
            return
        requests = [course.request for course in stretch.courses]
        for request in requests:
            if request.state is not State.DECODING:
                return
        num_ticks = min([request.max_tokens - request.num_output for request in requests])
        crossings: dict[int, list[Row]] = {}
        size = self._spec.block_size
        for row in rows:
            for tick in range(len(row.blocks) * size - len(row.tokens) + 1, num_ticks, size):
                crossings.setdefault(tick, []).append(row)
        num_free, num_blocks = self.tables.num_free, load.num_blocks
        ends_s, done = stretch.ends_s, 1
        for tick in [*sorted(crossings), num_ticks]:
            seconds = self._cost.seconds(Load(load.num_single, 0, num_blocks))
            ends_s += accumulate(repeat(seconds, tick - done), initial=ends_s.pop())
            growing = crossings.get(tick, ())
            num_free -= len(growing)
            if tick == num_ticks or num_free < 0:
                return
            stretch.crossings[tick] = crossings[tick]
            num_blocks += len(growing)
            done = tick

    def _may_join(self, stretch: _Stretch) -> bool:
        return self._is_paced or self._spec.config.enable_preemption or len(stretch.plan.rows) < self.num_slots

    def _leap(self, stretch: _Stretch) -> None:
        """Bring the rows, the tables and the scheduler to where all ticks but the last one would have left them. The
        plan of the last one differs from that of the first in nothing that is looked at when it is applied."""
        tables, scheduler, ends_s = self.tables, self.scheduler, stretch.ends_s
        num_skipped = len(ends_s) - 1
        for course in stretch.courses:
            request = course.request
            num_tokens = len(request.tokens)
            request.tokens.extend(range(num_tokens, num_tokens + num_skipped))
            request.num_computed += num_skipped
        for tick, growing in stretch.crossings.items():
            if tick > num_skipped:
                break
            for row in growing:
                tables.publish(row.request_id, row.tokens, row.start + tick)
            tables.prefix_cache.expire(ends_s[tick - 1])
            for row in growing:
                tables.grow(row.request_id, row.start + tick + 1)
            self.tally.tell(self.number, LIVE_BLOCKS, ends_s[tick - 1], tables.pool.num_live)
        tables.prefix_cache.expire(ends_s[-2])
        scheduler._pace.observe_decode([stretch.began_s, *ends_s[:-1]])
        scheduler._planned_s = ends_s[-2]

    # ---- what came of it ----

    def _tell(self, now: float, num_running: int, num_waiting: int) -> None:
        self.tally.tell(self.number, LIVE_BLOCKS, now, self.tables.pool.num_live)
        self.tally.tell(self.number, RUNNING, now, num_running)
        self.tally.tell(self.number, WAITING, now, num_waiting)

    def _time_gaps(self, stretch: _Stretch) -> None:
        """Count the gaps between tokens of rows that go on."""
        first_s, num_on_time = stretch.ends_s[0], 0
        for row, course in zip(stretch.plan.rows, stretch.courses, strict=True):
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
            if isinstance(event, Token):
                course.last_s = event.at_s
                if course.first_s is None:
                    course.first_s = event.at_s
            elif isinstance(event, Finished):
                ended.append(self._outcome(event, course))
                del self._courses[event.request_id]
                self.num_in_flight -= 1
            else:
                course.admitted_s, course.num_cached = event.at_s, event.num_cached
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
