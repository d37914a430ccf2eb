"""The thread that owns MLX: it loads, and then runs drain, plan, run, apply, publish until it is told to stop."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from app import errands
from app.errands import Errand, News, Refused
from app.errors import BackendError, InvalidRequest, MlxcelError, Overloaded, Unavailable, kind_and_place
from app.pipeline import Engine, Pipeline
from app.request import Request
from app.scheduler.plan import Finished, Kind
from app.scheduler.scheduler import Scheduler
from app.scheduler.snapshot import Snapshot

log = logging.getLogger("mlxcel.worker")

Status = Literal["loading", "ready", "draining", "dead"]
WATCH_INTERVAL_S = 0.5
CHECK_INTERVAL_S = 10.0
LEAST_WAIT_S, MOST_WAIT_S = 1.0, 30.0
LATELY_S, NUM_ENDS = 60.0, 32  # what counts of the ends that tell how fast places become free

Sink = Callable[[News], None]


class Worker:
    """Runs one engine under one scheduler on a thread of its own.

    All methods belong to the event loop. They leave errands in an inbox that the thread empties between ticks; news
    comes back through the sinks, on the loop, one hop a tick: first tokens and ends at once, what else a decode step
    brings once the next one is submitted, since the loop and the building of a step's graph hold each other up.
    """

    def __init__(
        self,
        load: Callable[[], tuple[Engine, Scheduler]],
        capacity: int,
        tick_timeout_s: float,
        observe_tick: Callable[[Kind, float], None],
        queue_timeout_s: float | None = None,
        dump: Callable[[str], None] = lambda why: None,
    ) -> None:
        """``load`` runs on the thread and may raise StartError. ``capacity`` is how many requests may be in flight, and
        ``queue_timeout_s`` how long one may wait for its slot. ``dump`` is called once something went wrong."""
        self._load = load
        self._capacity = capacity
        self.tick_timeout_s = tick_timeout_s
        self._queue_timeout_s = queue_timeout_s
        self._observe_tick = observe_tick
        self._dump = dump
        self._inbox: queue.SimpleQueue[Errand | None] = queue.SimpleQueue()
        self._sinks: dict[int, Sink] = {}
        self._untold: list[News] = []  # of the last tick; the thread's own
        self._resets: set[asyncio.Future[None]] = set()
        self._ended_s: deque[float] = deque(maxlen=NUM_ENDS)
        self._tick_began_s: float | None = None
        self._checked_s = 0.0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[None] = self._loop.create_future()
        self._emptied = asyncio.Event()
        self.failed = asyncio.Event()
        self.status: Status = "loading"
        self.snapshot = Snapshot()

    def tick_age_s(self) -> float:
        """How long the running tick has been running; 0 while idle."""
        began_s = self._tick_began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    async def start(self) -> None:
        """Load, and return when requests can be served.

        Raises:
            StartError: as ``load``.
        """
        self._thread.start()
        await self._loaded
        if self.status == "loading":
            self.status = "ready"
        self._watcher = self._loop.create_task(self._watch())

    def check_room(self, num_requests: int, param: str = "n") -> None:
        """Whether ``submit`` would take so many requests now.

        Raises:
            InvalidRequest: they are more than this server could ever hold.
            Overloaded: they do not fit beside those in flight.
            Unavailable: loading or draining.
            BackendError: the engine is dead.
        """
        if self.status == "dead":
            raise BackendError
        if self.status != "ready":
            raise Unavailable("Loading model" if self.status == "loading" else "Draining")
        if num_requests > self._capacity:
            why = f"{num_requests} answers are asked for at once, and this server holds at most {self._capacity}"
            raise InvalidRequest(f"{param}: {why}", param)
        if len(self._sinks) + num_requests > self._capacity:
            raise Overloaded(retry_after_s=self._wait_s())

    def _wait_s(self) -> float:
        """How long it takes until all who wait now have a slot, as fast as requests have ended lately. Who comes back
        sooner is likely to be refused again, and what refusing costs is taken from those who are answered."""
        now_s = time.monotonic()
        ended_s = [at_s for at_s in self._ended_s if now_s - at_s < LATELY_S]
        if not ended_s:
            return LEAST_WAIT_S
        wait_s = (now_s - ended_s[0]) / len(ended_s) * self.snapshot.num_queued
        return min(max(wait_s, LEAST_WAIT_S), MOST_WAIT_S)

    def submit(self, requests: Sequence[Request], sink: Sink) -> None:
        """Take requests that belong together: all of them or none. Raises as ``check_room``."""
        self.check_room(len(requests))
        self._sinks.update((request.id, sink) for request in requests)
        self._inbox.put(lambda scheduler: errands.add(scheduler, requests))

    def cancel(self, request_ids: Iterable[int]) -> None:
        """End requests nobody waits for any more. No news of them follows."""
        ids = [request_id for request_id in request_ids if self._forget(request_id)]
        if ids:
            self._inbox.put(lambda scheduler: errands.cancel(scheduler, ids))

    def finish(self, request_id: int, num_output: int) -> None:
        """End a request whose answer was complete after ``num_output`` tokens: a stop string was found in its text."""
        if self._forget(request_id):
            self._inbox.put(lambda scheduler: errands.finish(scheduler, request_id, num_output))

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; return when that is done. Raises as ``check_room``, also while it waits."""
        self.check_room(0)
        done = self._loop.create_future()

        def reset(scheduler: Scheduler) -> Iterable[News]:
            scheduler.reset_prefix_cache()
            self._call(lambda: None if done.done() else done.set_result(None))
            return ()

        self._resets.add(done)
        done.add_done_callback(self._resets.discard)
        self._inbox.put(reset)
        await done

    async def drain(self, timeout_s: float) -> None:
        """Refuse new and queued work, let running requests end, and refuse what still runs after ``timeout_s``."""
        if self.status != "dead":
            self.status = "draining"
        self._inbox.put(errands.refuse_waiting)
        self._emptied.clear()
        if self._sinks:
            try:
                await asyncio.wait_for(self._emptied.wait(), timeout_s)
            except TimeoutError:
                self._refuse_all(Unavailable("Draining"))

    async def stop(self, timeout_s: float) -> None:
        """Refuse whatever is left and end the thread, freeing the engine. A tick that outlasts ``timeout_s`` is left
        behind: the thread does not keep the process alive."""
        if self.status != "dead":
            self.status = "draining"
        self._refuse_all(Unavailable("Shutting down"))
        self._inbox.put(None)
        if self._thread.ident is not None:
            await asyncio.to_thread(self._thread.join, timeout_s)

    # ---- on the loop, called from the thread ----

    def _deliver(self, news: Sequence[News]) -> None:
        for item in news:
            sink = self._sinks.get(item.request_id)
            if sink is None:
                continue
            if isinstance(item, Finished | Refused):
                self._forget(item.request_id)
            try:
                sink(item)
            except Exception as error:
                log.error("request %d failed when it was told its news: %s", item.request_id, kind_and_place(error))
                self.cancel([item.request_id])

    def _forget(self, request_id: int) -> bool:
        known = self._sinks.pop(request_id, None) is not None
        if known:
            self._ended_s.append(time.monotonic())
        if not self._sinks:
            self._emptied.set()
        return known

    def _refuse_all(self, error: MlxcelError) -> None:
        ids = list(self._sinks)
        if ids:
            self._inbox.put(lambda scheduler: errands.cancel(scheduler, ids))
        self._deliver([Refused(request_id, error) for request_id in ids])
        for reset in [reset for reset in self._resets if not reset.done()]:
            reset.set_exception(error)

    def _die(self) -> None:
        self.status = "dead"
        self.failed.set()
        self._refuse_all(BackendError())

    async def _watch(self) -> None:
        while not self.failed.is_set():
            if self.tick_age_s() > self.tick_timeout_s:
                log.critical("the running tick has taken %.0f s, over MLXCEL_TICK_TIMEOUT", self.tick_age_s())
                self._die()
                await asyncio.to_thread(self._dump, "stuck")
            await asyncio.sleep(WATCH_INTERVAL_S)

    # ---- on the thread ----

    def _run(self) -> None:
        try:
            engine, scheduler = self._load()
        except BaseException as error:
            self._call(self._loaded.set_exception, error)
            return
        self.snapshot = scheduler.snapshot()
        self._call(self._loaded.set_result, None)
        pipeline = Pipeline(engine, scheduler, lambda: self._dump("fault"))
        try:
            while self._errands(pipeline):
                self._tick(pipeline)
        except BaseException as error:
            frames = "".join(traceback.format_tb(error.__traceback__))
            log.critical("the engine loop has ended: %s\n%s", kind_and_place(error), frames)
            self._tell()
            self._call(self._die)
            self._dump("dead")
        finally:
            self._tick_began_s = None
            engine.close()

    def _errands(self, pipeline: Pipeline) -> bool:
        """Empty the inbox, and wait while there is nothing else to do. False when told to stop."""
        scheduler = pipeline.scheduler
        while True:
            if pipeline.is_idle:
                self._tell()
                self._tick_began_s = None
                self._check(scheduler)
            try:
                errand = self._inbox.get(block=pipeline.is_idle)
            except queue.Empty:
                return True
            if errand is None:
                return False
            self._publish(scheduler, list(errand(scheduler)))

    def _check(self, scheduler: Scheduler) -> None:
        """Check the books of blocks while nobody waits. Where they do not add up the loop ends: a block that is held by
        nobody is lost, and one that is held by mistake could show a person what another wrote."""
        now_s = time.monotonic()
        if now_s - self._checked_s >= CHECK_INTERVAL_S:
            self._checked_s = now_s
            scheduler.check()

    def _tick(self, pipeline: Pipeline) -> None:
        scheduler = pipeline.scheduler
        began_s = self._tick_began_s = time.monotonic()
        plan = pipeline.plan(began_s)
        if self._queue_timeout_s is not None:  # after planning, which may have given a slot to one that is late
            self._publish(scheduler, errands.expire(scheduler, self._queue_timeout_s))
        if plan.kind != "decode":
            self._tell()  # it takes long
        if not plan.rows and not plan.num_blocks:
            return
        self.snapshot = scheduler.snapshot()
        news = pipeline.run(plan, self._tell)
        self._untold.extend(news)
        if plan.rows:
            self._observe_tick(plan.kind, time.monotonic() - began_s)
        self.snapshot = scheduler.snapshot()
        if plan.kind != "decode" or any(isinstance(item, Finished) for item in news):
            self._tell()

    def _publish(self, scheduler: Scheduler, news: Sequence[News]) -> None:
        self.snapshot = scheduler.snapshot()
        self._untold += news
        self._tell()

    def _tell(self) -> None:
        if self._untold:
            news, self._untold = self._untold, []
            self._call(self._deliver, news)

    def _call(self, function: Callable[..., object], *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError:
            log.debug("the event loop has closed")
