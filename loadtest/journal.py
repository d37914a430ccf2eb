"""The raw file of a locust process. Workers send their lines to the master, which is the one that writes."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import gevent
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

from loadtest.record import ClientLook, Exchange, Line, from_json, to_json

LOOK_INTERVAL_S = 0.5
MEMBER = "loadtest_lines"  # of a worker's report to its master


class Journal:
    """Takes what happens in this process, and watches how the process itself fares while a test runs."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._unsent: list[str] = []
        self._is_worker = False

    def attach(self, environment: Environment) -> None:
        """Write for this run of locust from now on."""
        events = environment.events
        self._is_worker = isinstance(environment.runner, WorkerRunner)
        if self._path is not None and not self._is_worker:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_bytes(b"")
        events.report_to_master.add_listener(self._report)
        events.worker_report.add_listener(self._take_report)
        if not isinstance(environment.runner, MasterRunner):
            gevent.spawn(self._watch, environment)

    def write(self, *lines: Line) -> None:
        if self._is_worker:
            self._unsent += [to_json(line).decode() for line in lines]
        elif self._path is not None:
            with self._path.open("ab") as file:
                file.writelines(to_json(line) for line in lines)

    def _report(self, data: dict[str, Any], **_: Any) -> None:
        data[MEMBER], self._unsent = self._unsent, []

    def _take_report(self, data: dict[str, Any], **_: Any) -> None:
        self.write(*(from_json(text) for text in data.get(MEMBER, ())))

    def _watch(self, environment: Environment) -> None:
        """A look every half second: a process that is late for it was late for its tokens too."""
        while True:
            cpu_s, clock_s = time.process_time(), time.perf_counter()
            gevent.sleep(LOOK_INTERVAL_S)
            took_s = time.perf_counter() - clock_s
            if environment.runner is not None and environment.runner.user_count:
                cpu = (time.process_time() - cpu_s) / took_s
                self.write(ClientLook(time.time(), cpu, max(0.0, took_s - LOOK_INTERVAL_S)))


def fire(environment: Environment, exchange: Exchange, is_refusal_expected: bool) -> None:
    """Show an exchange to locust: POST (end to end), TTFT, QUEUE, and ITL for each gap, in milliseconds."""
    request = environment.events.request.fire
    shared: dict[str, Any] = {"context": {}, "response": None, "start_time": exchange.at_s}
    name, failure = exchange.kind, None
    if exchange.is_refused and is_refusal_expected:
        name = f"{exchange.kind} (refused)"
    elif exchange.left:
        name = f"{exchange.kind} (left)"
    elif exchange.status != exchange.expects or (exchange.status == 200 and not exchange.is_whole):
        failure = RuntimeError(f"{exchange.status or 'no answer'}: {exchange.error}")
    num_new = exchange.num_new or len(exchange.moments_s)
    ends_s = exchange.end_s * 1000
    request(request_type="POST", name=name, response_time=ends_s, response_length=num_new, exception=failure, **shared)
    if not exchange.is_good:
        return
    waits = {"TTFT": [exchange.ttft_s], "QUEUE": [exchange.queue_s], "ITL": exchange.gaps_s}
    for kind, values in waits.items():
        for value_s in values:
            if value_s is not None:
                request(
                    request_type=kind,
                    name=exchange.kind,
                    response_time=value_s * 1000,
                    response_length=0,
                    exception=None,
                    **shared,
                )
