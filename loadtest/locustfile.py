"""``locust -f loadtest/locustfile.py``: one scenario for locust's own web UI, headless runs and distributed workers.

Configured by the environment, alike for master and workers: LOADTEST_SCENARIO (its name; unset: steady), LOADTEST_SHAPE
(full; small: of the smoke test; none: locust's own -u, -r and -t or the web UI decide), LOADTEST_TIME and LOADTEST_LOAD
(factors on durations, and on users or arrival rates), LOADTEST_RAW (file for the JSON lines; unset: none),
LOADTEST_API_KEY, LOADTEST_MODEL (unset: the first the server names), LOADTEST_FIELDS (JSON members of each body beside
OpenAI's; unset: ``{"ignore_eos": true}``).
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))  # locust puts only this file's own folder there

from locust import LoadTestShape, events
from locust.runners import WORKER_REPORT_INTERVAL, MasterRunner

from loadtest.journal import Journal
from loadtest.record import StageBegin
from loadtest.scenario import scenario
from loadtest.users import Target, user_classes


def setting(name: str, unset: str = "") -> str:
    return os.environ.get(f"LOADTEST_{name}", "") or unset


SCENARIO = scenario(setting("SCENARIO", "steady")).scaled(float(setting("TIME", "1")), float(setting("LOAD", "1")))
if setting("SHAPE", "full") == "small":
    SCENARIO = SCENARIO.small_one()
MOST_USERS = max(stage.num_users for stage in SCENARIO.shape)
TARGET = Target(
    setting("API_KEY") or None, json.loads(setting("FIELDS", '{"ignore_eos": true}')), setting("MODEL") or None
)
JOURNAL = Journal(Path(setting("RAW")) if setting("RAW") else None)
logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each request else
globals().update(user_classes(SCENARIO, TARGET, JOURNAL))

if setting("SHAPE", "full") != "none":

    class StagesShape(LoadTestShape):
        """The scenario's stages, one after the other. All users of a stage come, and go, at once."""

        stage = -1
        empty_s: float | None = None  # when the last user had gone

        def tick(self) -> tuple[int, float] | None:
            left_s = self.get_run_time()
            for i, stage in enumerate(SCENARIO.shape):
                if left_s < stage.for_s:
                    self.enter(i, stage.name, stage.num_users)
                    return stage.num_users, float(MOST_USERS)
                left_s -= stage.for_s
            return self.finish()

        def enter(self, i: int, name: str, num_users: int) -> None:
            if i != self.stage:
                self.stage, self.empty_s = i, None
                JOURNAL.write(StageBegin(name, time.time(), num_users))

        def finish(self) -> tuple[int, float] | None:
            """Let all users go before the test is over: a master does not wait for the last words of its workers."""
            self.enter(len(SCENARIO.shape), "end", 0)
            if self.get_current_user_count():
                return 0, float(MOST_USERS)
            self.empty_s = self.empty_s or time.monotonic()
            wait_s = 2 * WORKER_REPORT_INTERVAL if isinstance(self.runner, MasterRunner) else 0.0
            return None if time.monotonic() - self.empty_s >= wait_s else (0, float(MOST_USERS))


@events.init.add_listener
def attach(environment: Any, **_: Any) -> None:
    JOURNAL.attach(environment)
    if shape := environment.shape_class:
        environment.events.test_stop.add_listener(lambda **_: setattr(shape, "stage", -1))  # for the next start
