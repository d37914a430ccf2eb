"""How a real server process under load ends, and what cannot end it or hold it up."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.cli import main
from tests.serving import ServerProcess, serving

TEXT = "/v1/completions"
STORY = {"prompt": "Once upon a time", "temperature": 0, "ignore_eos": True}
ENDLESS = STORY | {"max_tokens": 14000}
EXIT_MARGIN_S = 15  # what the Ansible role gives a server on top of the drain before SIGKILL
DRAINING = {"message": "Draining", "type": "unavailable_error", "param": None, "code": None}
SHUTTING_DOWN = DRAINING | {"message": "Shutting down"}
IMPATIENT = """
from app.api import delivery
from app.cli import entry
delivery.SEND_TIMEOUT_S = 1.0
entry()
"""


def tiny(folder: Path, model: Path, **settings: str) -> Any:
    return serving(folder, MODEL=str(model), BLAS="none", **({"N_PARALLEL": "2"} | settings))


def ask(server: ServerProcess, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(server.url + TEXT, json=body, timeout=60)


def last_events(server: ServerProcess, body: dict[str, Any]) -> list[str]:
    """The last two events of a stream, or its refusal."""
    with httpx.stream("POST", server.url + TEXT, json=body | {"stream": True}, timeout=60) as response:
        if response.status_code != 200:
            return [str(response.status_code), response.read().decode()]
        return [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")][-2:]


def wait_for(holds: Callable[[], bool], timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.02)


def load_of(server: ServerProcess) -> tuple[int, int]:
    """Requests that run, and requests that wait."""
    batch = server.http.get("/health").json()["batch"]
    return batch["active_sequences"], batch["queued_requests"]


def error_of(future: Future[list[str]]) -> Any:
    return json.loads(future.result(5)[-1])["error"]


def test_a_drain_refuses_what_is_new_or_waits_and_lets_the_rest_end(tiny_model_dir: Path, tmp_path: Path) -> None:
    with tiny(tmp_path, tiny_model_dir, DRAIN_TIMEOUT="60") as server, ThreadPoolExecutor(6) as pool:
        body = STORY | {"max_tokens": 500}
        running = [pool.submit(last_events, server, body), pool.submit(ask, server, body)]
        wait_for(lambda: load_of(server) == (2, 0))
        queued = [pool.submit(last_events, server, body), pool.submit(ask, server, body)]
        wait_for(lambda: load_of(server) == (2, 2))
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: httpx.get(server.url + "/health/ready").status_code == 503)
        for path in ("/health", "/health/ready"):
            answer = httpx.get(server.url + path).json()
            assert answer == {"error": {"code": 503, "message": "Draining", "type": "unavailable_error"}}
        assert httpx.get(server.url + "/health/live").status_code == 200
        for stream in (False, True):
            late = ask(server, STORY | {"max_tokens": 5, "stream": stream})
            assert (late.status_code, late.json()) == (503, {"error": DRAINING})
            assert late.headers["retry-after"]
        assert queued[0].result(2) == ["503", json.dumps({"error": DRAINING}, separators=(",", ":"))]
        assert queued[1].result(2).status_code == 503  # type: ignore[union-attr]
        assert server.process.poll() is None
        assert running[0].result()[-1] == "[DONE]"  # type: ignore[index]
        whole = running[1].result()
        assert whole.json()["usage"]["completion_tokens"] == 500  # type: ignore[union-attr]
        assert server.process.wait(5) == 0
        assert "Traceback" not in server.log.read_text()


@pytest.mark.parametrize(
    ("settings", "signals", "error", "patience_s"),
    [
        ({"DRAIN_TIMEOUT": "1"}, [signal.SIGTERM], DRAINING, 3.5),
        ({"DRAIN_TIMEOUT": "60"}, [signal.SIGTERM, signal.SIGTERM], SHUTTING_DOWN, 2.5),
        ({"DRAIN_TIMEOUT": "60"}, [signal.SIGINT], SHUTTING_DOWN, 2.0),
    ],
    ids=["timeout", "hurry", "interrupt"],
)
def test_what_still_runs_ends_with_a_proper_last_event(
    tiny_model_dir: Path,
    tmp_path: Path,
    settings: dict[str, str],
    signals: list[signal.Signals],
    error: dict[str, Any],
    patience_s: float,
) -> None:
    with tiny(tmp_path, tiny_model_dir, N_PARALLEL="4", **settings) as server, ThreadPoolExecutor(6) as pool:
        streams = [pool.submit(last_events, server, ENDLESS) for _ in range(3)]
        whole = pool.submit(ask, server, ENDLESS)
        wait_for(lambda: load_of(server) == (4, 0))
        began_s = time.monotonic()
        for number in signals:
            server.process.send_signal(number)
            time.sleep(0.3)
        assert server.process.wait(10) == 0
        assert time.monotonic() - began_s < patience_s
        for stream in streams:
            assert error_of(stream) == error
        assert (whole.result(5).status_code, whole.result().json()) == (503, {"error": error})
        assert "Traceback" not in server.log.read_text()


def test_weights_and_pool_are_given_back_before_the_process_goes(tiny_model_dir: Path, tmp_path: Path) -> None:
    with tiny(tmp_path, tiny_model_dir, DRAIN_TIMEOUT="1") as server, ThreadPoolExecutor(1) as pool:
        stream = pool.submit(last_events, server, ENDLESS)
        wait_for(lambda: load_of(server) == (1, 0))
        assert server.signal_and_wait(signal.SIGTERM, 1 + EXIT_MARGIN_S) == 0
        assert error_of(stream) == DRAINING
        log = server.log.read_text()
    weights, held, freed = (
        float(re.search(pattern, log)[1])  # type: ignore[index]
        for pattern in (r"([\d.]+) MiB of weights loaded", r"freed: [\d.]+ of ([\d.]+) MiB", r"freed: ([\d.]+) of")
    )
    assert held >= weights + 256
    assert freed == held
    assert log.index("weights and pool freed") < log.index('"stopped"')


def test_usr1_leaves_a_recording_that_replays(
    tiny_model_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "recordings"
    with tiny(tmp_path, tiny_model_dir, RECORD_DIR=str(folder)) as server, ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, server, STORY | {"max_tokens": 20}) for _ in range(4)]
        assert [one.result(60).status_code for one in asked] == [200] * 4
        server.process.send_signal(signal.SIGUSR1)
        wait_for(lambda: "the last ticks were written to" in server.log.read_text())
        (path,) = folder.iterdir()
        route = server.http.get("/v1/recording").json()
    assert json.loads(path.read_text())["entries"] == route["entries"]
    assert main(["replay", str(path)]) == 0
    assert "replayed to the same decisions" in capsys.readouterr().out


def test_no_other_signal_ends_it_or_starts_a_second_one(tiny_model_dir: Path, tmp_path: Path) -> None:
    with tiny(tmp_path, tiny_model_dir, RECORD_DIR=str(tmp_path)) as server:
        for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT, signal.SIGPIPE):
            server.process.send_signal(number)
            time.sleep(0.1)
        assert ask(server, STORY | {"max_tokens": 5}).status_code == 200
        log = server.log.read_text()
        assert log.count("of weights loaded") == 1
        assert "most recent call first" in log, "SIGQUIT shows where every thread is"
        if sys.platform == "linux":
            tasks = Path(f"/proc/{server.process.pid}/task").glob("*/children")
            assert "".join(task.read_text() for task in tasks) == "", "there is no process beside it"
        server.process.kill()
        server.process.wait(5)
        with pytest.raises(httpx.ConnectError):
            httpx.get(server.url + "/health/live")
        with pytest.raises(ProcessLookupError):
            os.kill(server.process.pid, 0)


def test_a_request_that_waits_too_long_is_refused(tiny_model_dir: Path, tmp_path: Path) -> None:
    with tiny(tmp_path, tiny_model_dir, N_PARALLEL="1", QUEUE_TIMEOUT="1") as server, ThreadPoolExecutor(4) as pool:
        with httpx.stream("POST", server.url + TEXT, json=ENDLESS | {"stream": True}) as first:
            lines = first.iter_lines()  # kept: a forgotten iterator closes its stream
            next(lines)
            began_s = time.monotonic()
            late = [pool.submit(ask, server, ENDLESS | {"stream": stream}) for stream in (False, True)]
            for one in late:
                assert one.result().status_code == 503
                error = {"message": "The request waited 1 s to be admitted. Retry later.", "type": "overloaded"}
                assert one.result().json() == {"error": error}
                assert one.result().headers["retry-after"]
            assert 1.0 <= time.monotonic() - began_s < 2.5
            assert load_of(server) == (1, 0)
        wait_for(lambda: load_of(server) == (0, 0))


def stalled(server: ServerProcess, body: dict[str, Any], path: str = TEXT) -> socket.socket:
    """A client that asks and then never reads."""
    raw = json.dumps(body).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    connection.sendall(head.encode() + raw)
    return connection


def test_a_reader_that_does_not_read_holds_no_slot(tiny_model_dir: Path, tmp_path: Path) -> None:
    """The kernel takes some megabytes before anybody notices, so the answer is wide: eight choices, with logprobs."""
    with serving(
        tmp_path, command=("-c", IMPATIENT, "serve"), MODEL=str(tiny_model_dir), BLAS="none", N_PARALLEL="8"
    ) as server:
        wordy = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 14000, "ignore_eos": True}
        wordy |= {"stream": True, "logprobs": True, "top_logprobs": 20, "n": 8}
        with stalled(server, wordy, "/v1/chat/completions"):
            wait_for(lambda: load_of(server)[0] == 8)
            wait_for(lambda: load_of(server) == (0, 0), 60)
            assert server.http.get("/v1/cache/stats").json()["paged_blocks_live"] == 0
            assert server.log.read_text().count("has not read for 1 s") == 1
            assert ask(server, STORY | {"max_tokens": 5}).status_code == 200
            counts = server.http.get("/metrics").text
            assert 'mlxcel_batch_sequences_completed_total{reason="cancelled"} 8.0' in counts
            assert server.signal_and_wait(signal.SIGTERM, 5) == 0
        assert "Traceback" not in server.log.read_text()


def test_a_client_that_half_closes_holds_no_slot(tiny_model_dir: Path, tmp_path: Path) -> None:
    body = STORY | {"max_tokens": 50, "stream": True}
    with tiny(tmp_path, tiny_model_dir) as server, stalled(server, body) as connection:
        assert connection.recv(1)
        connection.shutdown(socket.SHUT_WR)
        wait_for(lambda: server.http.get("/health").json()["batch"]["total_completed"] == 1)
        assert load_of(server) == (0, 0)
