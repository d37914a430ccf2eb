"""Run a scenario: a server if none is given, locust, a watch on both, and the verdict."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from loadtest import agreement, record
from loadtest.contestants import ROOT, Contestant, Running, ours, running
from loadtest.exchange import client
from loadtest.measures import measure
from loadtest.record import Run
from loadtest.scenario import Scenario
from loadtest.scrape import Watch
from loadtest.validity import faults
from loadtest.verdict import Verdict, judge, objectives

STOP_TIMEOUT_S = 900  # how long requests that are open at the end of the shape may take
RAW = "client.jsonl"
OF_METRICS = frozenset({"slots_held", "blocks_held", "queued", "pool_peak_share"})


@dataclass(frozen=True)
class Options:
    """``time`` and ``load`` are factors on durations and users; ``small``: the shape of the smoke test."""

    out: Path
    time: float = 1.0
    load: float = 1.0
    small: bool = False
    host: str | None = None
    api_key: str | None = None
    model: str = "embedded"
    baseline: Path | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    fields: str = '{"ignore_eos": true}'
    contestant: Contestant | None = None  # another server to start in place of ours


def perform(scenario: Scenario, options: Options) -> tuple[Run, Verdict]:
    """Run one scenario and judge it. Raw lines, locust's output and the server's log stay in ``options.out``.

    Raises:
        RuntimeError: the server did not start, or locust could not be run.
    """
    scenario = scenario.scaled(options.time, options.load)
    scenario = scenario.small_one() if options.small else scenario
    folder = (options.out / scenario.name).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / RAW).unlink(missing_ok=True)
    wanted = objectives(scenario.name, options.small)
    run = Run()
    with _target(scenario, options, folder) as server:
        api_key = options.api_key or (scenario.api_key if options.host is None else None)
        with client(server.url, api_key) as http:
            model = server.model or str(http.get("/v1/models").raise_for_status().json()["data"][0]["id"])
            watch = Watch(http, folder / "server.jsonl", server.pid)
            drain = _Drain(server, scenario.drain_after_s, folder / RAW)
            with watch, drain:
                _run_locust(scenario, options, folder, server.url, model, api_key)
        run.drained_s = drain.drained_s
    is_ours = options.host is None and options.contestant is None
    run.exit_code = server.exit_code if is_ours else None
    for name in (RAW, "server.jsonl"):
        run.add(record.read(folder / name))
    measures = measure(run, scenario)
    unknowable = frozenset() if is_ours else frozenset({"exit_code"})
    if not run.servers or scenario.drain_after_s is not None:
        unknowable |= OF_METRICS
    comparisons = []
    if scenario.agrees:
        comparisons = agreement.compare(run, wanted.ttft_share, wanted.ttft_floor_s, is_alone=options.host is None)
    notes = [] if comparisons else ["clients and server were not compared: one of them left, or there are no metrics"]
    verdict = judge(
        scenario.name,
        measures,
        wanted,
        faults(run, scenario, wanted.client),
        comparisons,
        _kept(options, scenario),
        unknowable,
        notes,
    )
    (folder / "verdict.json").write_text(json.dumps(as_json(verdict, options), indent=1) + "\n")
    return run, verdict


def as_json(verdict: Verdict, options: Options) -> dict[str, Any]:
    """A verdict as it is written down."""
    return {
        "scenario": verdict.scenario,
        "outcome": verdict.outcome.value,
        "reasons": verdict.reasons,
        "notes": verdict.notes,
        "factors": {"time": options.time, "load": options.load, "small": options.small},
        "checks": [vars(check) for check in verdict.checks],
        "measures": verdict.measures,
    }


def keep(verdict: Verdict, options: Options) -> None:
    """Make the run the baseline of its scenario, for later runs with the same factors."""
    path = _baseline_path(options, verdict.scenario)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(as_json(verdict, options), indent=1) + "\n")


def _baseline_path(options: Options, scenario: str) -> Path | None:
    return None if options.baseline is None else options.baseline / f"{scenario}.json"


def _kept(options: Options, scenario: Scenario) -> dict[str, float] | None:
    path = _baseline_path(options, scenario.name)
    if path is None or not path.exists():
        return None
    kept: dict[str, Any] = json.loads(path.read_text())
    mine = {"time": options.time, "load": options.load, "small": options.small}
    return kept["measures"] if kept["factors"] == mine else None


@contextmanager
def _target(scenario: Scenario, options: Options, folder: Path) -> Iterator[Running]:
    if options.host is not None:
        yield Running("given", options.host.rstrip("/"), "", 0.0)
        return
    settings = {"CACHE_DIR": str(options.out.resolve()), **scenario.server, **options.settings}
    rows = int(settings.pop("N_PARALLEL"))
    contestant = options.contestant or ours(options.model, rows, api_key=scenario.api_key, **settings)
    with running(contestant, folder) as server:
        yield server


def _run_locust(scenario: Scenario, options: Options, folder: Path, url: str, model: str, api_key: str | None) -> None:
    variables = {
        "SCENARIO": scenario.name,
        "SHAPE": "small" if options.small else "full",
        "TIME": repr(options.time),
        "LOAD": repr(options.load),
        "RAW": str(folder / RAW),
        "MODEL": model,
        "API_KEY": api_key or "",
        "FIELDS": options.fields,
    }
    command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless", "--only-summary"]
    command += ["--host", url, "--stop-timeout", str(STOP_TIMEOUT_S), "--html", str(folder / "locust.html")]
    log = folder / "locust.log"
    with log.open("wb") as output:
        subprocess.run(
            command,
            cwd=ROOT,
            env=os.environ | {f"LOADTEST_{name}": value for name, value in variables.items()},
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
            check=False,  # locust's exit code only tells of failed requests: the lines tell better
        )
    if not (folder / RAW).exists():
        raise RuntimeError(f"locust could not be run; see {log}")


class _Drain:
    """Tells the server to end ``after_s`` seconds after the first users have come, which ``raw`` tells. Does nothing
    without such a time, and for a server that was not started here."""

    def __init__(self, server: Running, after_s: float | None, raw: Path) -> None:
        self.drained_s: float | None = None
        self._server, self._after_s, self._raw = server, after_s, raw
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._wait, daemon=True)

    def _wait(self) -> None:
        while not (self._raw.exists() and self._raw.stat().st_size):
            if self._over.wait(0.1):
                return
        if not self._over.wait(self._after_s):
            self.drained_s = time.time()
            self._server.terminate()

    def __enter__(self) -> _Drain:
        if self._after_s is not None and self._server.pid is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()
