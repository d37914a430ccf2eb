"""A real server process on loopback, as an operator starts it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parent.parent
START_S = 120.0


@dataclass(frozen=True)
class ServerProcess:
    """A running server. ``http`` talks to it; ``log`` is the file that both its outputs go to."""

    process: subprocess.Popen[bytes]
    url: str
    http: httpx.Client
    log: Path

    def post(self, path: str, body: dict[str, Any], **more: Any) -> httpx.Response:
        return self.http.post(path, json=body, **more)

    def signal_and_wait(self, number: signal.Signals, timeout_s: float) -> int:
        """Send a signal; give the exit code. Fails if the process is still there after ``timeout_s``."""
        self.process.send_signal(number)
        return self.process.wait(timeout_s)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def serving(
    folder: Path, wait: bool = True, command: Sequence[str] = ("-m", "app", "serve"), **settings: str
) -> Iterator[ServerProcess]:
    """Start ``mlxcel serve`` with ``settings`` (names without the prefix), wait until it is ready, kill it at last.

    ``command`` is what Python runs; another one may break something first.
    """
    port = free_port()
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MLXCEL_")}
    chosen = {"PORT": str(port), "KV_CACHE_BUDGET": "256M", **settings}
    log = folder / f"server-{port}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=clean | {f"MLXCEL_{name}": value for name, value in chosen.items()},
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
        )
    url = f"http://127.0.0.1:{port}"
    with httpx.Client(base_url=url, timeout=120.0) as http:
        server = ServerProcess(process, url, http, log)
        try:
            if wait:
                wait_ready(server)
            yield server
        finally:
            process.kill()
            process.wait()


def wait_ready(server: ServerProcess) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        assert server.process.poll() is None, server.log.read_text()
        try:
            if server.http.get("/health/ready").status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"not ready after {START_S} s:\n{server.log.read_text()}")


@contextmanager
def filled(server: ServerProcess, num_places: int) -> Iterator[None]:
    """Have long streams take ``num_places`` of a server, past whatever stands in front of it."""
    body = {"prompt": "Once upon a time", "max_tokens": 14000, "ignore_eos": True, "stream": True}
    with ExitStack() as stack:
        for _ in range(num_places):
            # Its headers are sent when a request takes its place.
            stack.enter_context(httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=120))
        yield


def wait_for_load(server: ServerProcess, num_running: int) -> None:
    """Return when so many requests run on a server."""
    deadline = time.monotonic() + 60
    while server.http.get("/health").json()["batch"]["active_sequences"] != num_running:
        assert time.monotonic() < deadline
        time.sleep(0.02)
