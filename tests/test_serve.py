"""The server process with a stand-in runtime: signals, exit codes, the busy port, and chunks that leave at once."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.errors import StartError
from app.serve import serve
from app.settings import Settings

# A runtime whose "model" counts: /stream sends a chunk every few milliseconds, as many as the path says.
PROGRAM = """
import asyncio, logging, sys, time
from app.errors import StartError
from app.serve import leave, serve
from app.settings import load

class Counting:
    def __init__(self, settings):
        self.failed, self.draining, self.cancelled = asyncio.Event(), False, asyncio.Event()
        self.open = 0

    async def start(self):
        if mode == "unloadable":
            raise StartError("no such model: x")

    async def drain(self, timeout_s):
        self.draining = True
        deadline = time.monotonic() + timeout_s
        while self.open and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    async def stop(self):
        self.cancelled.set()
        if mode == "stuck":
            await asyncio.sleep(60)

    def close(self, timeout_s):
        pass

    def record(self):
        print("recorded", flush=True)

    async def app(self, scope, receive, send):
        if scope["path"] == "/fail":
            self.failed.set()
        status = 503 if self.draining else 200
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"text/plain")]})
        if status == 200 and scope["path"].startswith("/stream/"):
            _, _, num_chunks, pause_s = scope["path"].split("/")
            self.open += 1
            for _ in range(int(num_chunks)):
                if self.cancelled.is_set():
                    break
                await send({"type": "http.response.body", "body": b"%f\\n" % time.time(), "more_body": True})
                await asyncio.sleep(float(pause_s))
            self.open -= 1
        await send({"type": "http.response.body", "body": b"end\\n"})

mode = sys.argv[1]
logging.basicConfig(level="INFO", format="%(message)s")
try:
    code = serve(load(), Counting, lambda: print("ready", flush=True))
except StartError as error:
    print(error, file=sys.stderr)
    code = 1
leave(code)
"""


class Server:
    def __init__(self, mode: str, port: int, settings: dict[str, str]) -> None:
        environ = {name: value for name, value in os.environ.items() if not name.startswith("MLXCEL_")}
        self.port = port
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, mode],
            env=environ | {"MLXCEL_PORT": str(port), "MLXCEL_DRAIN_TIMEOUT": "20"} | settings,
            cwd=Path(__file__).parent.parent,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_ready(self) -> Server:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"
        deadline = time.monotonic() + 5
        while True:
            try:
                self.connect().close()
                return self
            except ConnectionRefusedError:
                assert time.monotonic() < deadline
                time.sleep(0.02)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def get(self, path: str) -> socket.socket:
        connection = self.connect()
        connection.sendall(f"GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        return connection

    def end(self, timeout_s: float = 10) -> tuple[int, str]:
        """Exit code and stderr."""
        _, errors = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, errors


def read_all(connection: socket.socket) -> str:
    with connection:
        return b"".join(iter(lambda: connection.recv(65536), b"")).decode()


@pytest.fixture
def start() -> Iterator[Callable[..., Server]]:
    servers: list[Server] = []

    def start_one(mode: str = "plain", port: int = 0, **settings: str) -> Server:
        if not port:
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                port = probe.getsockname()[1]
        servers.append(Server(mode, port, {f"MLXCEL_{name}": value for name, value in settings.items()}))
        return servers[-1]

    yield start_one
    for server in servers:
        server.process.kill()
        server.process.communicate()


def test_sigterm_lets_a_stream_end_and_refuses_new_work(start: Callable[..., Server]) -> None:
    server = start().wait_ready()
    stream = server.get("/stream/20/0.05")
    first = stream.recv(65536).decode()
    server.process.send_signal(signal.SIGTERM)
    time.sleep(0.2)
    assert read_all(server.get("/")).startswith("HTTP/1.1 503 ")
    body = first + read_all(stream)
    assert body.count(".") >= 20
    assert "end\n" in body
    code, errors = server.end()
    assert code == 0, errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("mode", "signals"),
    [
        ("plain", [signal.SIGINT]),
        ("stuck", [signal.SIGINT]),
        ("plain", [signal.SIGTERM, signal.SIGTERM]),
        ("plain", [signal.SIGTERM, signal.SIGINT]),
    ],
)
def test_interrupt_and_hurry_leave_within_two_seconds(
    start: Callable[..., Server], mode: str, signals: list[signal.Signals]
) -> None:
    server = start(mode).wait_ready()
    stream, idle = server.get("/stream/1000/0.05"), server.connect()
    stream.recv(65536)
    began = time.monotonic()
    for number in signals:
        server.process.send_signal(number)
        time.sleep(0.1)
    code, errors = server.end()
    assert time.monotonic() - began < 2
    assert code == 0, errors
    assert "Traceback" not in errors
    assert "end\n" in read_all(stream), "the stream's last event was lost"
    idle.close()


def test_hangup_and_usr2_do_nothing_and_usr1_records(start: Callable[..., Server]) -> None:
    server = start().wait_ready()
    server.process.send_signal(signal.SIGHUP)
    server.process.send_signal(signal.SIGUSR2)
    server.process.send_signal(signal.SIGUSR1)
    assert server.process.stdout is not None
    assert server.process.stdout.readline() == "recorded\n"
    assert "end" in read_all(server.get("/"))


def test_a_busy_port_is_one_line(start: Callable[..., Server]) -> None:
    first = start().wait_ready()
    code, errors = start(port=first.port).end()
    assert code == 1
    assert errors == f"127.0.0.1:{first.port} is in use: stop what listens there, or set MLXCEL_PORT\n"


@pytest.fixture(scope="module")
def pem(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with cert.pem and key.pem, other.pem (another key), locked.pem (the key with a passphrase), junk.pem."""
    folder = tmp_path_factory.mktemp("pem")
    if shutil.which("openssl") is None:
        pytest.skip("there is no openssl to make a certificate with")
    for command in (
        "req -x509 -newkey rsa:2048 -nodes -keyout key.pem -out cert.pem -days 2 -subj /CN=localhost",
        "genrsa -out other.pem 2048",
        "rsa -aes128 -passout pass:word -in key.pem -out locked.pem",
    ):
        subprocess.run(["openssl", *command.split()], cwd=folder, check=True, capture_output=True)
    (folder / "junk.pem").write_text("junk")
    return folder


def test_tls(start: Callable[..., Server], pem: Path) -> None:
    files = {"SSL_CERT_FILE": str(pem / "cert.pem"), "SSL_KEY_FILE": str(pem / "key.pem")}
    server = start(**files).wait_ready()
    context = ssl.create_default_context(cafile=pem / "cert.pem")
    context.check_hostname = False
    with context.wrap_socket(server.connect()) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 200 ")
    assert "HTTP/1.1 200" not in read_all(server.get("/")), "answered without TLS"


@pytest.mark.parametrize(
    ("cert", "key", "part"),
    [
        ("cert", "other", "key values mismatch"),
        ("cert", "locked", "passphrase"),
        ("cert", "junk", "no PEM file"),
        ("junk", "key", "no PEM file"),
        ("none", "key", "MLXCEL_SSL_CERT_FILE={}/none.pem cannot be read: No such file"),
        ("cert", "none", "MLXCEL_SSL_KEY_FILE={}/none.pem cannot be read: No such file"),
    ],
)
def test_a_certificate_that_cannot_be_used_is_one_line(pem: Path, cert: str, key: str, part: str) -> None:
    settings = Settings(ssl_cert_file=pem / f"{cert}.pem", ssl_key_file=pem / f"{key}.pem")
    with pytest.raises(StartError) as error:
        serve(settings, lambda _: pytest.fail("built"), lambda: pytest.fail("announced"))
    assert part.format(pem).lower() in str(error.value).lower()
    assert "MLXCEL_SSL_KEY_FILE" in str(error.value) or cert == "none"
    assert "\n" not in str(error.value)


def test_a_model_that_cannot_be_loaded_is_one_line(start: Callable[..., Server]) -> None:
    code, errors = start("unloadable").end()
    assert code == 1
    assert errors.splitlines()[-1] == "no such model: x"
    assert "Traceback" not in errors


def test_a_dead_engine_exits_70(start: Callable[..., Server]) -> None:
    server = start().wait_ready()
    read_all(server.get("/fail"))
    code, errors = server.end()
    assert code == 70, errors


def test_kill_leaves_nothing_listening(start: Callable[..., Server]) -> None:
    server = start().wait_ready()
    server.process.kill()
    server.process.wait()
    with pytest.raises(ConnectionRefusedError):
        server.connect()


def test_each_chunk_leaves_at_once(start: Callable[..., Server]) -> None:
    """Small chunks a few milliseconds apart: with Nagle's algorithm on, they would come in lumps of 40 ms."""
    connection = start().wait_ready().get("/stream/100/0.004")
    lags_s = []
    with connection:
        while data := connection.recv(65536):
            now = time.time()
            lags_s += [now - float(line) for line in data.decode().split() if line.count(".") == 1 and len(line) == 17]
    assert len(lags_s) == 100
    assert sorted(lags_s)[50] < 0.01


def test_clients_that_leave_at_any_moment_are_no_error(start: Callable[..., Server]) -> None:
    server = start().wait_ready()
    for step in range(60):
        with server.get("/stream/3/0.005") as connection:
            time.sleep(step * 0.0004)
            if step % 2:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    assert "end" in read_all(server.get("/"))
    server.process.send_signal(signal.SIGTERM)
    code, errors = server.end()
    assert code == 0
    assert errors.splitlines()[1:] == ["draining for at most 20 s; a second SIGTERM hurries", "stopped"]
