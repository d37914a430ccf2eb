"""The load test for real: locust against a server, as an operator runs it: alone, distributed, from its page."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import httpx
import pytest

from loadtest.record import Run, read
from loadtest.scrape import samples
from tests.serving import ROOT, ServerProcess, free_port, serving

PATIENCE_S = 480


def loadtest(*arguments: str) -> subprocess.CompletedProcess[str]:
    """``python -m loadtest`` with these arguments, to its end."""
    command = [sys.executable, "-m", "loadtest", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def locust(*arguments: str, **variables: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", *arguments]
    environ = os.environ | {f"LOADTEST_{name}": value for name, value in variables.items()}
    return subprocess.Popen(command, cwd=ROOT, env=environ, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def verdict_of(folder: Path, name: str) -> dict[str, Any]:
    """What was found, once it is clear that nothing but a busy machine can have spoilt the run."""
    verdict: dict[str, Any] = json.loads((folder / name / "verdict.json").read_text())
    if verdict["outcome"] == "invalid":
        assert all("the client was the bottleneck" in reason for reason in verdict["reasons"]), verdict["reasons"]
    return verdict


@pytest.fixture(scope="module")
def quick(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that answers at once: four slots, eight places in the queue."""
    with serving(tmp_path_factory.mktemp("quick"), MODEL=str(tiny_model_dir), MAX_QUEUE_DEPTH="8") as process:
        yield process


def test_a_burst_from_start_to_verdict(tiny_model_dir: Path, tmp_path: Path) -> None:
    """The server is started and ended by the load test; clients and server agree, to the token."""
    # One BLAS thread: two would spin for a tiny model's products and keep clients and HTTP from both cores.
    own = ("--model", str(tiny_model_dir), "--set", "BLAS_THREADS=1", "--out", str(tmp_path))
    done = loadtest("run", "burst", "--small", "--time", "0.4", *own)
    verdict = verdict_of(tmp_path, "burst")
    checks = {check["name"]: check for check in verdict["checks"]}
    assert [check for check in verdict["checks"] if not check["holds"] and check["name"] != "recovery_s"] == []
    assert checks["exit_code"]["value"] == 0
    agreed = [name for name in checks if name.startswith("server agrees on")]
    assert len(agreed) == 7
    measures = verdict["measures"]
    assert measures["refused"] > 0
    assert measures["answers"] + measures["refused"] == measures["requests"]
    assert done.returncode in (0, 1, 2)
    assert "burst" in done.stdout
    suites = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert suites[0].get("name") == "loadtest.burst"
    assert (tmp_path / "report.html").read_text().count("<svg") >= 4
    run = Run().add(read(tmp_path / "burst" / "client.jsonl"))
    assert [stage.name for stage in run.stages] == ["before", "burst", "after", "end"]
    assert {one.num_new for one in run.exchanges if one.is_good} == {16}


def test_a_drain_loses_nothing(tiny_model_dir: Path, tmp_path: Path) -> None:
    loadtest("run", "drain", "--small", "--time", "0.25", "--model", str(tiny_model_dir), "--out", str(tmp_path))
    verdict = verdict_of(tmp_path, "drain")
    assert [check for check in verdict["checks"] if not check["holds"] and check["name"] != "refused"] == []
    assert verdict["measures"]["answers"] > 0
    assert verdict["measures"]["requests"] > verdict["measures"]["answers"], "it did end while users came"


def test_hostile_users_get_what_they_deserve(tiny_model_dir: Path, tmp_path: Path) -> None:
    loadtest("run", "hostile", "--time", "0.05", "--model", str(tiny_model_dir), "--out", str(tmp_path))
    verdict = verdict_of(tmp_path, "hostile")
    assert [check for check in verdict["checks"] if not check["holds"]] == []
    exchanges = Run().add(read(tmp_path / "hostile" / "client.jsonl")).exchanges
    got = {(one.kind, one.status) for one in exchanges}
    assert got == {("asker", 200), ("slow", 200), ("broken", 400), ("huge", 413), ("stranger", 401)}


def test_a_server_that_others_use_too_does_not_agree(quick: ServerProcess, tmp_path: Path) -> None:
    """Against a given server; one request that is not the load test's is enough to be found out."""
    arguments = ("run", "steady", "--time", "0.05", "--host", quick.url, "--out", str(tmp_path))
    command = [sys.executable, "-m", "loadtest", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    raw = tmp_path / "steady" / "client.jsonl"
    deadline = time.monotonic() + PATIENCE_S
    while not (raw.exists() and raw.stat().st_size):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    quick.post("/v1/completions", {"prompt": "a", "max_tokens": 3, "ignore_eos": True}).raise_for_status()
    process.wait(PATIENCE_S)
    checks = {check["name"]: check for check in verdict_of(tmp_path, "steady")["checks"]}
    assert "exit_code" not in checks
    for name in ("answers", "output tokens"):
        assert not checks[f"server agrees on {name}"]["holds"]


def test_users_leave_and_free_their_slots(quick: ServerProcess, tmp_path: Path) -> None:
    loadtest("run", "leaving", "--small", "--time", "0.4", "--host", quick.url, "--out", str(tmp_path))
    verdict = verdict_of(tmp_path, "leaving")
    measures = verdict["measures"]
    assert (measures["slots_held"], measures["blocks_held"], measures["queued"]) == (0, 0, 0)
    assert measures["left"] > 0
    assert quick.http.get("/metrics").text.count('completed_total{reason="cancelled"}') == 1


def test_two_servers_side_by_side(quick: ServerProcess, tiny_model_dir: Path, tmp_path: Path) -> None:
    arguments = ("--time", "0.05", "--model", str(tiny_model_dir), "--peer", quick.url, "--out", str(tmp_path))
    done = loadtest("compare", "steady", *arguments)
    assert done.returncode == 0, done.stderr
    header = next(line for line in done.stdout.splitlines() if line.startswith("measure"))
    assert "mlxcel" in header
    assert quick.url in header
    assert any(line.startswith("ttft_p50_s") and len(line.split()) == 4 for line in done.stdout.splitlines())


def test_workers_send_their_lines_to_the_master(quick: ServerProcess, tmp_path: Path) -> None:
    raw = tmp_path / "raw.jsonl"
    options = ("--headless", "--processes", "2", "--only-summary", "--stop-timeout", "400", "--host", quick.url)
    port, before = str(free_port()), completed(quick)
    process = locust(
        *options, "--master-bind-port", port, "--master-port", port, SCENARIO="steady", TIME="0.05", RAW=str(raw)
    )
    assert process.wait(PATIENCE_S) == 0
    run = Run().add(read(raw))
    good = [one for one in run.exchanges if one.is_good]
    assert len({one.user for one in good}) == 8, "the users of both workers"
    assert len(good) == completed(quick) - before, "not one is missing"
    assert all(one.num_new == 48 for one in good)
    assert [stage.name for stage in run.stages] == ["steady", "end"]


def test_the_web_page_starts_and_stops_users(quick: ServerProcess) -> None:
    port = free_port()
    process = locust("--web-port", str(port), "--web-host", "127.0.0.1", "--host", quick.url, SHAPE="none")
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as http:
            wait_until(lambda: answers(http))
            assert http.post("/swarm", data={"user_count": 2, "spawn_rate": 2}).json()["success"]
            wait_until(lambda: {"POST", "TTFT", "ITL", "QUEUE"} <= shown(http))
            assert http.post("/stop").json()["success"]
            wait_until(lambda: http.get("/stats/requests").json()["state"] == "stopped")
    finally:
        process.terminate()
        process.wait(30)


def completed(server: ServerProcess) -> int:
    """Answers that the server has brought to their ends."""
    counted = samples(server.http.get("/metrics").text)
    return int(counted.get("mlxcel_batch_sequences_completed_total{reason=length}", 0))


def answers(http: httpx.Client) -> bool:
    try:
        return http.get("/").status_code == 200
    except httpx.TransportError:
        return False


def shown(http: httpx.Client) -> set[str]:
    """The kinds of measures that locust's own statistics show."""
    stats = http.get("/stats/requests").json()["stats"]
    return {line["method"] for line in stats if line["num_requests"] and not line["num_failures"]}


def wait_until(holds: Any) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def test_an_unknown_scenario_is_refused_in_one_line() -> None:
    done = loadtest("run", "stedy")
    assert done.returncode == 2
    assert "no such scenario: stedy" in done.stderr
