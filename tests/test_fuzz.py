"""The fuzzer: that it finds what is wrong with a server, and that it finds nothing wrong with ours."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import hypothesis
import pytest

from app.api.app import routes
from app.api.openapi import document
from loadtest.contestants import Running
from loadtest.fuzz import aftermath, documented
from loadtest.fuzz.__main__ import ROWS, SETTINGS, WINDOW, attack
from loadtest.fuzz.aftermath import Watched, log_faults
from loadtest.fuzz.bodies import Literal, Pairs, broken, nested, written
from loadtest.fuzz.documented import narrowed, shots
from loadtest.fuzz.judge import Judge
from loadtest.fuzz.shot import Ask, request
from loadtest.fuzz.wire import Answer, Broken, Connection
from loadtest.tiny_model import build_tiny_model
from tests.serving import ServerProcess, serving

NUM_REQUESTS = 1000
CHAT = Ask("POST", "/v1/chat/completions")
JSON = {"content-type": "application/json", "x-request-id": "a"}
STREAM = JSON | {"content-type": "text/event-stream; charset=utf-8"}
DOCUMENT = document(routes())
ERROR = {"error": {"message": "no", "type": "invalid_request_error"}}


def fault(answer: Answer, ask: Ask | None = CHAT) -> str | None:
    return Judge(DOCUMENT).fault(ask, answer)


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (Answer(500, JSON, json.dumps(ERROR).encode()), "status 500"),
        (Answer(501, JSON), "status 501"),
        (Answer(503, JSON, json.dumps(ERROR).encode()), "without Retry-After"),
        (Answer(400, {"content-type": "application/json"}, json.dumps(ERROR).encode()), "no x-request-id"),
        (Answer(418, JSON, json.dumps(ERROR).encode()), "not in the document"),
        (Answer(400, JSON | {"content-type": "text/html"}, b"<p>"), "content type 'text/html'"),
        (Answer(400, JSON, b"{"), "not JSON"),
        (Answer(400, JSON, b"{}"), "'error' is a required property"),
        (Answer(200, JSON, b'{"id": "a"}'), "required property"),
        (Answer(200, STREAM, b"data: {}\n\ndata: [DONE]\n\n"), "required property"),
        (Answer(200, STREAM, b"event: x\n\n"), "something else"),
        (Answer(200, STREAM, b'data: {"error": {"type": "server_error"}}\n\n'), "server_error"),
    ],
)
def test_the_judge_finds(answer: Answer, found: str) -> None:
    assert found in str(fault(answer))


def test_the_judge_passes_what_may_be() -> None:
    busy = json.dumps({"error": {"message": "busy", "type": "overloaded"}}).encode()
    assert fault(Answer(503, JSON | {"retry-after": "1"}, busy)) is None
    assert fault(Answer(503, JSON, busy), Ask("GET", "/health")) is None
    assert fault(Answer(400, JSON, json.dumps(ERROR).encode())) is None
    assert fault(Answer(200, STREAM, b': ping\n\ndata: {"error": {"type": "overloaded"}}\n\n')) is None
    assert fault(Answer(404, {}), None) is None
    assert fault(Answer(502, {}), None) is not None


def answered(sent: bytes) -> Answer:
    """What is read from a server that sends this and closes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(10)
                connection.sendall(sent)

        thread = threading.Thread(target=answer)
        thread.start()
        connection = Connection(listener.getsockname(), 5.0)
        connection.send(b"GET")
        thread.join()
        try:
            return connection.read()
        finally:
            connection.close()


@pytest.mark.parametrize(
    ("sent", "status", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhirest", 200, b"hi"),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n", 404, b""),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n4\r\n you\r\n0\r\n\r\n", 200, b"hi you"),
        (b"HTTP/1.0 200 OK\r\n\r\nto the end", 200, b"to the end"),
    ],
)
def test_answers_are_read_from_the_wire(sent: bytes, status: int, body: bytes) -> None:
    answer = answered(sent)
    assert (answer.status, answer.body) == (status, body)


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"SSH-2.0\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhi",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhi",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n",
    ],
)
def test_answers_that_break_off_are_told(sent: bytes) -> None:
    with pytest.raises(Broken) as error:
        answered(sent)
    assert error.value.is_silent == (not sent)


def test_bodies_are_written_as_they_are_meant() -> None:
    assert written(Pairs([("a", 1), ("a", Literal("1e999"))])) == '{"a":1,"a":1e999}'
    assert written({"a": ["é", "\ud83d", None, True]}, escapes=False) == '{"a":["é","\\ud83d",null,true]}'
    body: dict[str, Any] = {"prompt": "hi", "n": 1}
    mutants = {broken(Random(seed), body) for seed in range(500)}
    assert len(mutants) > 200
    assert mutants == {broken(Random(seed), body) for seed in range(500)}, "a seed says it all"
    assert max(len(nested(Random(seed), body)) for seed in range(50)) > 100_000


def test_shots_fit_the_document_or_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documented, "SETTINGS", hypothesis.settings(documented.SETTINGS, max_examples=10))
    model = narrowed(DOCUMENT, "tiny")["components"]["schemas"]["ChatBody"]["properties"]["model"]
    assert model == {"const": "tiny"}
    paths = {path: DOCUMENT["paths"][path] for path in ("/health", "/slots", "/tokenize")}
    made = shots(DOCUMENT | {"paths": paths}, "tiny", Random(1))
    found = [next(made) for _ in range(30)]
    asks = {Ask("GET", "/health"), Ask("GET", "/slots"), Ask("POST", "/tokenize")}
    assert {ask for shot in found for ask in shot.asks} == asks
    assert all(shot.data.startswith(shot.asks[0].method.encode()) for shot in found)


def test_growth_is_told_from_warming_up() -> None:
    watched = Watched.__new__(Watched)
    watched._rss_bytes = [10, 50, 90, *[100] * 40]
    assert watched.growth_bytes == 0
    watched._rss_bytes = list(range(100))
    assert watched.growth_bytes is not None
    assert 50 < watched.growth_bytes < 70
    watched._rss_bytes = [1, 2]
    assert watched.growth_bytes is None


def test_a_log_with_a_failure_is_found(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text('{"level":"info","message":"ready"}\n')
    assert log_faults(log) == []
    log.write_text('{"level":"info","message":"ready"}\n{"level":"error","message":"unexpected failure"}\n')
    assert "unexpected failure" in log_faults(log)[0]


@pytest.fixture(scope="module")
def target(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("target")
    model = build_tiny_model(model_dir, folder / "tiny", WINDOW)
    with serving(folder, MODEL=str(model), MODEL_ALIAS="tiny", N_PARALLEL=str(ROWS), **SETTINGS) as server:
        yield server


def test_what_is_left_behind_is_found(target: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aftermath, "SETTLE_S", 0.0)
    monkeypatch.setattr(aftermath, "MORE_FILES", 2)
    host, port = target.url.removeprefix("http://").split(":")
    body = {"prompt": "a", "max_tokens": 90, "ignore_eos": True, "stream": True}
    with Watched(target.url, target.process.pid) as watched:
        idle = [Connection((host, int(port)), 30.0) for _ in range(8)]
        streaming = [Connection((host, int(port)), 30.0) for _ in range(4 * ROWS)]
        for connection in streaming:
            connection.send(request("POST", "/v1/completions", json.dumps(body).encode()))
        streaming[0].peek()
        found = " ".join(watched.faults())
        for connection in (*idle, *streaming):
            connection.close()
        assert "is taken" in found
        assert "mlxcel_batch_current_size" in found
        assert "sockets are open" in found
        monkeypatch.setattr(aftermath, "SETTLE_S", 30.0)
        assert watched.faults() == []


def test_a_sample_of_everything_finds_nothing(target: ServerProcess) -> None:
    """Each run has a seed of its own, unless FUZZ_SEED is set; it is told when something is found."""
    seed = int(os.environ.get("FUZZ_SEED", time.time_ns() % 2**32))
    running = Running("mlxcel", target.url, "tiny", 0.0, pid=target.process.pid)
    tally, faults, _ = attack(running, seed, NUM_REQUESTS)
    assert faults == [], f"FUZZ_SEED={seed}: {[finding.shot.data for finding in tally.findings]}"
    assert log_faults(target.log) == [], f"FUZZ_SEED={seed}"
    assert tally.num_requests >= NUM_REQUESTS
    assert len(tally.kinds) == 11
    assert {200, 400, 404} <= tally.statuses.keys()
    assert tally.statuses[200] > NUM_REQUESTS / 10
