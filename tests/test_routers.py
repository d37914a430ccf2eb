"""Gateways that know prefix affinity, with the flags of ops/routers, in front of three real servers."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from tests.serving import ROOT, ServerProcess, filled, free_port, serving, wait_for_load, wait_ready

SEARCHED = f"{ROOT}/.routers/bin:{os.environ['PATH']}"
STORY = {"model": "tiny", "prompt": "Once upon a time", "temperature": 0, "ignore_eos": True}
PLACES = 2


@contextmanager
def routed(kind: str, folder: Path, servers: list[ServerProcess]) -> Iterator[str]:
    """Run one router in front of ``servers``; gives its address once it sends requests to all of them."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [ROOT / "ops/routers/router.sh", kind, str(port), *(server.url for server in servers)]
    with (folder / "router.log").open("wb") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        deadline = time.monotonic() + 60
        while not sees_all(url, len(servers)):
            assert process.poll() is None, (folder / "router.log").read_text()
            assert time.monotonic() < deadline, (folder / "router.log").read_text()
            time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()


def sees_all(url: str, num_servers: int) -> bool:
    try:
        response = httpx.get(f"{url}/readiness")
    except httpx.TransportError:
        return False
    return response.status_code == 200 and response.json()["healthy_workers"] == num_servers


def ask(url: str, prompt: str, num_tokens: int = 2) -> int:
    return httpx.post(
        f"{url}/v1/completions", json=STORY | {"prompt": prompt, "max_tokens": num_tokens}, timeout=120
    ).status_code


def stream(url: str, num_tokens: int) -> tuple[list[str], float]:
    """The data of every event, and the seconds between the first and the last."""
    body = STORY | {"max_tokens": num_tokens, "stream": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as response:
        assert response.status_code == 200, response.read()
        events, times = [], []
        for line in response.iter_lines():
            if line.startswith("data: "):
                events.append(line[6:])
                times.append(time.monotonic())
    return events, times[-1] - times[0]


def completed(servers: list[ServerProcess]) -> list[int]:
    return [server.http.get("/health").json()["batch"]["total_completed"] for server in servers]


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_a_router_keeps_prefixes_together_and_goes_round_servers_that_are_full_draining_or_dead(
    kind: str, tiny_model_dir: Path, tmp_path: Path
) -> None:
    if shutil.which(f"{kind}-router", path=SEARCHED) is None:
        pytest.skip(f"{kind}-router is not installed: make routers")
    settings = {"MODEL": str(tiny_model_dir), "MODEL_ALIAS": "tiny,unknown", "BLAS": "none", "DRAIN_TIMEOUT": "60"}
    settings |= {"N_PARALLEL": str(PLACES), "MAX_QUEUE_DEPTH": "0"}
    with ExitStack() as stack, ThreadPoolExecutor(1) as pool:
        servers = [stack.enter_context(serving(tmp_path, wait=False, **settings)) for _ in range(3)]
        for server in servers:
            wait_ready(server)
        url = stack.enter_context(routed(kind, tmp_path, servers))

        events, seconds = stream(url, 100)
        assert (len(events), events[-1]) == (102, "[DONE]")
        assert seconds > 0.05, "the events come one by one, and not all at the end"
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}  # without a model's name
        assert httpx.post(f"{url}/v1/chat/completions", json=chat, timeout=60).status_code == 200

        before = completed(servers)
        assert [ask(url, "The lion and the castle. " * 40 + str(number)) for number in range(6)] == [200] * 6
        counts = [now - then for now, then in zip(completed(servers), before, strict=True)]
        assert sorted(counts) == [0, 0, 6], "who begins alike meets at one server"

        favourite = servers[counts.index(6)]
        with filled(favourite, PLACES):
            assert ask(favourite.url, "Hi") == 503
            asked = [ask(url, "The lion and the castle. " * 40 + str(number)) for number in range(12)]
            assert asked == [200] * 12, "a full server is passed over"

        wait_for_load(favourite, 0)  # those who filled it have left
        running = pool.submit(stream, favourite.url, 400)
        wait_for_load(favourite, 1)
        favourite.process.send_signal(signal.SIGTERM)
        assert [ask(url, "The lion and the castle. " * 40 + str(number)) for number in range(12)] == [200] * 12
        assert running.result()[0][-1] == "[DONE]"
        assert favourite.process.wait(30) == 0

        next(server for server in servers if server is not favourite).process.kill()
        assert [ask(url, f"{number} knights") for number in range(12)] == [200] * 12
