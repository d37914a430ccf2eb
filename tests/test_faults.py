"""Faults in a real server process, asked over HTTP: who is hit, who is not, and how the process ends."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.serving import ServerProcess, serving

# The server with traps. A file in the folder that is the first argument springs one of the first three, once;
# the others lie in wait for a request: its seed, its stop string, its tokens.
PROGRAM = """
import os, sys, time
import mlx.core as mx
from app.engine import engine, sampler
from app.kv.prefix_cache import PrefixCache
from app.text.stop import StopStrings

folder = sys.argv.pop(1)

def sprung(name):
    try:
        os.remove(os.path.join(folder, name))
    except FileNotFoundError:
        return False
    return True

evaluate, submit, logits = engine._evaluate, engine.Engine.submit, engine.Engine.logits
uniform, feed, insert = sampler.uniform, StopStrings.feed, PrefixCache.insert

def bad_evaluate(arrays):
    if sprung("evaluate"):
        raise RuntimeError("out of memory")
    evaluate(arrays)

def bad_submit(self, plan):
    if sprung("die"):
        raise MemoryError("no more")
    if sprung("stick"):
        time.sleep(3600)
    return submit(self, plan)

def bad_logits(self, rows, before=None):
    out = logits(self, rows, before)
    nan = [[float("nan") if row.sampling.seed == 99 else 0.0] for row in rows if row.draws]
    return out + mx.array(nan) if any(row.sampling.seed == 99 for row in rows) else out

def bad_uniform(seed, position):
    if seed == 13:
        raise ValueError("ZEBRA")
    return uniform(seed, position)

def bad_feed(self, text):
    if any("BOOM" in stop for stop in self._stops):
        raise ValueError("ZEBRA")
    return feed(self, text)

def bad_insert(self, salt, parent, tokens, block):
    if tokens[:3] == (77, 77, 77):
        raise ValueError("ZEBRA")
    return insert(self, salt, parent, tokens, block)

engine._evaluate, engine.Engine.submit, engine.Engine.logits = bad_evaluate, bad_submit, bad_logits
sampler.uniform, StopStrings.feed, PrefixCache.insert = bad_uniform, bad_feed, bad_insert

from app.cli import entry
entry()
"""
TEXT = "/v1/completions"
STORY = {"prompt": "Once upon a time", "max_tokens": 60, "temperature": 0, "ignore_eos": True}
FAILED = {"message": "inference backend error", "type": "server_error", "param": None, "code": None}


def trapped(folder: Path, model: Path, **settings: str) -> Any:
    command = ("-c", PROGRAM, str(folder), "serve")
    return serving(folder, command=command, MODEL=str(model), BLAS="none", N_PARALLEL="8", **settings)


@pytest.fixture(scope="module", params=["off", "on"], ids=["step by step", "lookahead"])
def survivor(
    request: pytest.FixtureRequest, tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server that outlives what is done to it."""
    folder = tmp_path_factory.mktemp("survivor")
    with trapped(folder, tiny_model_dir, DECODE_LOOKAHEAD=request.param) as process:
        yield process


def spring(server: ServerProcess, name: str) -> None:
    (server.log.parent / name).touch()


def stream_of(server: ServerProcess, body: dict[str, Any], on_event: dict[int, Any] | None = None) -> list[Any]:
    """The data of all events, or the one refusal in place of a stream; ``on_event`` holds what to do after so many."""
    found: list[Any] = []
    with httpx.stream("POST", server.url + TEXT, json=body | {"stream": True}, timeout=60) as response:
        if response.status_code != 200:
            return [json.loads(response.read())]
        for line in response.iter_lines():
            if line.startswith("data: "):
                found.append(line if line == "data: [DONE]" else json.loads(line[6:]))
                if on_event and len(found) in on_event:
                    on_event[len(found)]()
    return found


def text_of(events: list[Any]) -> str:
    return "".join(event["choices"][0]["text"] for event in events if isinstance(event, dict) and event.get("choices"))


def assert_all_is_free(server: ServerProcess) -> None:
    deadline = time.monotonic() + 10
    while server.http.get("/v1/cache/stats").json()["paged_blocks_live"]:
        assert time.monotonic() < deadline, "blocks are still held"
        time.sleep(0.05)
    assert not any(slot["is_processing"] for slot in server.http.get("/slots").json())
    assert server.http.get("/health/live").status_code == server.http.get("/health/ready").status_code == 200


BAD_ROWS: dict[str, dict[str, Any]] = {
    "sampler": {"seed": 13, "temperature": 1.0},
    "logits": {"seed": 99},
    "logits drawn": {"seed": 99, "temperature": 0.8, "top_p": 0.9},
    "text": {"stop": ["BOOM"]},
    "donation": {"prompt": [77] * 200},
    "donation at the end": {"prompt": [77] * 5, "max_tokens": 3},
}


@pytest.mark.parametrize("bad", BAD_ROWS.values(), ids=BAD_ROWS.keys())
def test_a_fault_in_one_row_ends_that_request_only(survivor: ServerProcess, bad: dict[str, Any]) -> None:
    alone = survivor.post(TEXT, STORY).json()["choices"][0]["text"]
    with ThreadPoolExecutor(6) as pool:
        good = [pool.submit(survivor.post, TEXT, STORY) for _ in range(2)]
        whole = pool.submit(survivor.post, TEXT, STORY | bad)
        stream = pool.submit(stream_of, survivor, STORY | bad)
        good += [pool.submit(survivor.post, TEXT, STORY) for _ in range(2)]
        assert whole.result().status_code == 500
        assert whole.result().json()["error"] == FAILED
        assert stream.result()[-1] == {"error": FAILED}
        for one in good:
            assert one.result().status_code == 200
            assert one.result().json()["choices"][0]["text"] == alone
    assert_all_is_free(survivor)
    assert survivor.post(TEXT, STORY).json()["choices"][0]["text"] == alone
    log = survivor.log.read_text()
    assert "failed" in log
    assert "ZEBRA" not in log
    assert "Traceback" not in log


def test_a_failed_evaluation_costs_no_stream_a_token(survivor: ServerProcess) -> None:
    bodies = [STORY | {"prompt": "Once upon a time " * n, "max_tokens": 120} for n in (1, 3, 12)]
    want = [text_of(stream_of(survivor, body)) for body in bodies]
    with ThreadPoolExecutor(3) as pool:
        fault = {20: lambda: spring(survivor, "evaluate")}
        got = [pool.submit(stream_of, survivor, body, fault if n == 0 else None) for n, body in enumerate(bodies)]
        for events, text in zip(got, want, strict=True):
            assert events.result()[-1] == "data: [DONE]"
            assert text_of(events.result()) == text
    assert "the block pool with it" in survivor.log.read_text()
    metrics = survivor.http.get("/metrics").text
    assert 'mlxcel_batch_preemptions_total{cause="fault"}' in metrics
    assert_all_is_free(survivor)


@pytest.mark.parametrize(
    ("trap", "settings"),
    [("die", {}), ("stick", {"TICK_TIMEOUT": "1"}), ("stick", {"TICK_TIMEOUT": "1", "DECODE_LOOKAHEAD": "on"})],
)
def test_a_dead_or_stuck_loop_answers_everybody_and_leaves(
    tiny_model_dir: Path, tmp_path: Path, trap: str, settings: dict[str, str]
) -> None:
    with trapped(tmp_path, tiny_model_dir, **settings) as server:
        time.sleep(1.5)
        assert server.http.get("/health/live").status_code == 200, "an idle engine is healthy however long it idles"
        with ThreadPoolExecutor(12) as pool:
            long = STORY | {"max_tokens": 3000}
            streams = [pool.submit(stream_of, server, long) for _ in range(4)]
            wholes = [pool.submit(httpx.post, server.url + TEXT, json=long, timeout=60) for _ in range(6)]
            while server.http.get("/health").json()["batch"]["active_sequences"] < 8:
                time.sleep(0.02)
            spring(server, trap)
            began_s = time.monotonic()
            lives = []
            while server.process.poll() is None:
                try:
                    lives.append(httpx.get(server.url + "/health/live", timeout=5).status_code)
                except httpx.TransportError:
                    break
                if lives[-1] == 503 and 503 not in lives[:-1]:
                    failed_s = time.monotonic()
                time.sleep(0.02)
            for one in streams:
                assert one.result(5)[-1] == {"error": FAILED}
            for whole in wholes:
                assert whole.result(5).status_code == 500
                assert whole.result().json()["error"] == FAILED
        assert 503 in lives, lives
        assert failed_s - began_s < 1.0 + float(settings.get("TICK_TIMEOUT", 0))
        assert server.process.wait(5) == 70
        assert "Traceback" not in server.log.read_text()
