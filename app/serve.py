"""The life of the server process: embedded granian on our own event loop, every signal and exit code ours.

SIGTERM drains and a second one hurries, SIGINT cancels everything and is gone within two seconds, SIGHUP and SIGUSR2 do
nothing, SIGUSR1 writes the last ticks to a file, SIGQUIT the stack of every thread to stderr. There is one process, so
nothing can outlive it.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import errno
import faulthandler
import logging
import os
import signal
import socket
import ssl
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any, NoReturn, Protocol

from granian.constants import HTTPModes, Interfaces, SSLProtocols
from granian.http import HTTP1Settings
from granian.log import LogLevels
from granian.server.embed import Server

from app.errors import AddressInUse, StartError
from app.settings import Settings

log = logging.getLogger("mlxcel.serve")

EXIT_OK = 0
EXIT_ENGINE = 70
BACKLOG = 1024
# Of a request line with its headers; above: 431. It is looked at between two reads, so up to twice as much may pass.
MAX_HEAD_BYTES = 1 << 15
# After SIGINT these follow one another: the sum, with its three flushes, stays under two seconds.
STOP_S = 1.2
FLUSH_S = 0.2
# How long a failed server still answers: probes and clients are told so, rather than to find the port closed. And how
# long the last traces may take where there is no hurry.
LAST_WORDS_S = 1.0

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Runtime(Protocol):
    """What is served. ``serve`` builds it inside the event loop."""

    @property
    def app(self) -> App:
        """The HTTP application; it answers "Loading model" until ``start`` has returned."""

    @property
    def failed(self) -> asyncio.Event:
        """Set once the engine is dead or stuck."""

    async def start(self) -> None:
        """Return when the model is ready. Raises StartError."""

    async def drain(self, timeout_s: float) -> None:
        """Refuse new work; return when what runs has ended, at the latest after ``timeout_s``."""

    async def stop(self) -> None:
        """Cancel everything and free the engine."""

    def close(self, timeout_s: float) -> None:
        """Called once nothing is answered any more: give away what is left to give, in at most so long."""

    def record(self) -> None:
        """Write down what happened last. Called on a thread of its own."""


class _Door:
    """The application, with a count of the requests it is answering: the process waits for their last bytes."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._num_open = 0
        self._empty = asyncio.Event()
        self._empty.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._num_open += 1
        self._empty.clear()
        try:
            await self._app(scope, receive, send)
        finally:
            self._num_open -= 1
            if self._num_open == 0:
                self._empty.set()

    async def wait_empty(self, timeout_s: float) -> None:
        """Return when no request is open, or after ``timeout_s``."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._empty.wait(), timeout_s)


class _End(enum.Enum):
    """What can end the run. Each happens once, TERMINATE any number of times."""

    TERMINATE = enum.auto()
    INTERRUPT = enum.auto()
    DRAINED = enum.auto()
    NOT_LOADED = enum.auto()
    FAILED = enum.auto()


def serve(settings: Settings, build: Callable[[Settings], Runtime], announce: Callable[[], None]) -> int:
    """Serve until a signal or a failure ends it; ``announce`` is called when the model is ready. Returns the exit code.

    Raises:
        StartError: the address, the certificate or the API key file cannot be used, or the model cannot be loaded.
    """
    check_certificate(settings)
    address = free_address(settings.host, settings.port)
    log.info("starting on %s:%d with model %s", settings.host, settings.port, settings.model)
    return asyncio.run(_serve(settings, build, announce, address))


async def _serve(
    settings: Settings, build: Callable[[Settings], Runtime], announce: Callable[[], None], address: str
) -> int:
    loop = asyncio.get_running_loop()
    ends: asyncio.Queue[_End] = asyncio.Queue()
    loop.add_signal_handler(signal.SIGTERM, ends.put_nowait, _End.TERMINATE)
    loop.add_signal_handler(signal.SIGINT, ends.put_nowait, _End.INTERRUPT)
    for harmless in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(harmless, signal.SIG_IGN)
    faulthandler.register(signal.SIGQUIT, file=sys.__stderr__ or sys.stderr)

    runtime = build(settings)
    loop.add_signal_handler(signal.SIGUSR1, loop.run_in_executor, None, runtime.record)
    door = _Door(runtime.app)
    server = _build_server(door, address, settings)

    async def load() -> None:
        try:
            await runtime.start()
        except BaseException:
            ends.put_nowait(_End.NOT_LOADED)
            raise
        announce()

    serving, loading = asyncio.create_task(server.serve()), asyncio.create_task(load())
    failing = asyncio.create_task(runtime.failed.wait())
    for task in (serving, failing):
        task.add_done_callback(lambda _: ends.put_nowait(_End.FAILED))

    end = await ends.get()
    if end is _End.TERMINATE:
        log.info("draining for at most %g s; a second SIGTERM hurries", settings.drain_timeout)
        draining = asyncio.create_task(runtime.drain(settings.drain_timeout))
        draining.add_done_callback(lambda _: ends.put_nowait(_End.DRAINED))
        end = await ends.get()
    if end is _End.FAILED:
        cause = serving.exception() if serving.done() else None
        log.critical("the engine or the HTTP server has failed: leaving with exit code %d", EXIT_ENGINE, exc_info=cause)
        await asyncio.wait({serving}, timeout=LAST_WORDS_S)
    code = EXIT_ENGINE if end is _End.FAILED else EXIT_OK

    stopping = asyncio.create_task(runtime.stop())
    await asyncio.wait({stopping}, timeout=STOP_S)
    await door.wait_empty(FLUSH_S)
    server.stop()  # type: ignore[no-untyped-call]
    await asyncio.wait({serving}, timeout=FLUSH_S)
    runtime.close(FLUSH_S if end is _End.INTERRUPT else LAST_WORDS_S)
    if end is _End.NOT_LOADED:
        loading.result()
    if not stopping.done():
        # It is inside a long computation that nothing can interrupt: to wait for its thread could take minutes.
        log.warning("leaving without waiting for the engine")
        leave(code)
    stopping.result()
    log.info("stopped")
    return code


def leave(code: int) -> NoReturn:
    """End the process now. Granian's threads outlive the loop, and panic when they find the interpreter taken apart."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def _build_server(app: App, address: str, settings: Settings) -> Server:
    server = Server(
        app,
        address=address,
        port=settings.port,
        interface=Interfaces.ASGINL,
        http=HTTPModes.http1,
        http1_settings=HTTP1Settings(max_buffer_size=MAX_HEAD_BYTES),
        websockets=False,
        backlog=BACKLOG,
        ssl_cert=settings.ssl_cert_file,
        ssl_key=settings.ssl_key_file,
        ssl_protocol_min=SSLProtocols.tls12,
        log_level=LogLevels.warning,
        # Incremental: take the level, and leave every logger's handlers as the process has set them.
        log_dictconfig={"incremental": True, "handlers": {}, "loggers": {}},
    )
    logging.getLogger("_granian").addFilter(lambda record: "experimental" not in record.getMessage())
    return server


def check_certificate(settings: Settings) -> None:
    """Load certificate and key once here, where a fault can be told in one line. Raises StartError."""
    if settings.ssl_cert_file is None or settings.ssl_key_file is None:
        return
    for name, file in (("CERT", settings.ssl_cert_file), ("KEY", settings.ssl_key_file)):
        try:
            file.read_bytes()
        except OSError as error:
            raise StartError(f"MLXCEL_SSL_{name}_FILE={file} cannot be read: {error.strerror}") from None
    try:
        # An empty password, because without one OpenSSL would ask the terminal for it.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(settings.ssl_cert_file, settings.ssl_key_file, "")
    except (ssl.SSLError, ValueError) as error:
        told = getattr(error, "reason", None)
        reason = told.replace("_", " ").lower() if told else "no PEM file, or a key with a passphrase"
        raise StartError(
            f"MLXCEL_SSL_CERT_FILE={settings.ssl_cert_file} with MLXCEL_SSL_KEY_FILE={settings.ssl_key_file} cannot be"
            f" used: {reason}"
        ) from None


def free_address(host: str, port: int) -> str:
    """The numeric address of ``host``. Granian shares busy ports (SO_REUSEPORT), so bind once without that first.

    Raises:
        AddressInUse: something listens there.
        StartError: it is no address of this machine, or not for this user.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise AddressInUse(f"{host}:{port} is in use: stop what listens there, or set MLXCEL_PORT") from None
        raise StartError(f"{host}:{port} cannot be used (MLXCEL_HOST, MLXCEL_PORT): {error.strerror}") from None
    return str(address[0])
