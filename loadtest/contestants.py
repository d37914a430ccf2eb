"""The servers a benchmark compares: how each is started, on the same model directory, and what it took."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

ROOT = Path(__file__).parent.parent
START_S = 180.0
PRELOAD = "from app.engine.blas import preload; preload('auto', 'auto'); "
PEER = "import sys, runpy; sys.argv[0] = 'mlx_lm'; runpy.run_module('mlx_lm', run_name='__main__')"


@dataclass(frozen=True)
class Contestant:
    """A server by name: the Python arguments that start it on a port, its variables, what it calls its model (None: it
    tells), and the key it wants."""

    name: str
    arguments: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()
    model: str | None = None
    api_key: str | None = None


def ours(model: Path | str, rows: int, name: str = "mlxcel", api_key: str | None = None, **settings: str) -> Contestant:
    """This server with ``rows`` slots and a KV budget of 512 MiB."""
    chosen = {
        "MODEL": str(model),
        "N_PARALLEL": str(rows),
        "KV_CACHE_BUDGET": "512M",
        "LOG_LEVEL": "warning",
    } | settings
    variables = tuple((f"MLXCEL_{key}", value) for key, value in chosen.items())
    return Contestant(name, ("-m", "app", "serve", "--port", "{port}"), variables, api_key=api_key)


def peer(model: Path, rows: int, with_blas: bool) -> Contestant:
    """mlx-lm's own server, as it comes or with the BLAS that this server loads."""
    options = ("--model", str(model), "--port", "{port}", "--log-level", "ERROR")
    limits = ("--decode-concurrency", str(rows), "--prompt-concurrency", str(rows))
    program = (PRELOAD if with_blas else "") + PEER
    name = "mlx-lm with BLAS" if with_blas else "mlx-lm"
    return Contestant(name, ("-c", program, "server", *options, *limits), model="default_model")


@dataclass
class Running:
    """A server to be measured. ``pid`` is None for one that was not started here; ``peak_rss_bytes`` and ``exit_code``
    are known once it has ended."""

    name: str
    url: str
    model: str
    start_s: float
    peak_rss_bytes: int = 0
    pid: int | None = None
    exit_code: int | None = None
    _is_told: bool = False

    def terminate(self) -> None:
        """Ask it to end. Only the first call does: a second signal would hurry it."""
        if self.pid is not None and not self._is_told:
            self._is_told = True
            os.kill(self.pid, signal.SIGTERM)


@contextmanager
def running(contestant: Contestant, folder: Path) -> Iterator[Running]:
    """Start a contestant, wait until it answers, end it at last; what it prints goes to a file in ``folder``."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MLXCEL_")}
    arguments = [argument.format(port=port) for argument in contestant.arguments]
    began_s = time.monotonic()
    with (folder / f"{contestant.name.replace(' ', '-')}.log").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environ | dict(contestant.variables),
            stdout=output,
            stderr=output,
            stdin=subprocess.DEVNULL,
        )
    url = f"http://127.0.0.1:{port}"
    server = Running(contestant.name, url, "", 0.0, pid=process.pid)
    try:
        server.model = _wait_for_model(url, contestant, process, output.name)
        server.start_s = time.monotonic() - began_s
        yield server
    finally:
        if process.returncode is None:  # else it ended while it was waited for, and is gone
            server.terminate()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = server.exit_code = os.waitstatus_to_exitcode(status)
            # Linux counts kibibytes, macOS bytes.
            server.peak_rss_bytes = usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _wait_for_model(url: str, contestant: Contestant, process: subprocess.Popen[bytes], log: str) -> str:
    """The id under which the server offers its model, once it completes something."""
    deadline = time.monotonic() + START_S
    headers = {"authorization": f"Bearer {contestant.api_key}"} if contestant.api_key else {}
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the server ended at once; see {log}")
        try:
            model = contestant.model or _first_model(url, headers)
            body = {"model": model, "prompt": "a", "max_tokens": 1}
            if httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=60).status_code == 200:
                return model
        except (httpx.TransportError, KeyError, IndexError):
            pass
        time.sleep(0.2)
    raise RuntimeError(f"the server was not ready after {START_S} s; see {log}")


def _first_model(url: str, headers: dict[str, str]) -> str:
    return str(httpx.get(f"{url}/v1/models", headers=headers, timeout=5).json()["data"][0]["id"])
