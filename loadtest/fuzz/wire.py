"""HTTP/1.1 from below: bytes out, answers in, without a client library that would forbid what is to be tried."""

from __future__ import annotations

import contextlib
import socket
import struct
from dataclasses import dataclass

MAX_BODY_BYTES = 64 << 20
RESET = struct.pack("ii", 1, 0)  # linger for zero seconds


class Broken(Exception):
    """The connection ended, or what came is no HTTP. ``is_silent``: not a byte of an answer has come."""

    def __init__(self, reason: str, is_silent: bool = False) -> None:
        super().__init__(reason)
        self.is_silent = is_silent


@dataclass(frozen=True, slots=True)
class Answer:
    """``headers`` by their names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes = b""

    @property
    def closes(self) -> bool:
        return self.headers.get("connection", "").lower() == "close"


class Connection:
    """One TCP connection to ``address``. All waits raise Broken after ``timeout_s``."""

    def __init__(self, address: tuple[str, int], timeout_s: float) -> None:
        self._socket = socket.create_connection(address, timeout=timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._file = self._socket.makefile("rb")

    def send(self, data: bytes) -> None:
        """A server may answer and close before it has read everything, so a broken pipe is left to ``read`` to tell."""
        with contextlib.suppress(OSError):
            self._socket.sendall(data)

    def read(self, is_head: bool = False) -> Answer:
        """The next final answer. Raises Broken."""
        try:
            while True:
                answer = self._read(is_head)
                if answer.status >= 200:
                    return answer
        except TimeoutError:
            raise Broken("no answer in time") from None
        except (OSError, ValueError) as error:
            raise Broken(f"{type(error).__name__}: {error}") from None

    def peek(self) -> None:
        """Wait for the first bytes of an answer; it does not matter if none come."""
        with contextlib.suppress(OSError):
            self._socket.recv(1)

    def shut(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self, with_reset: bool = False) -> None:
        if with_reset:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        self._file.close()
        self._socket.close()

    def set_timeout(self, timeout_s: float) -> None:
        self._socket.settimeout(timeout_s)

    def _read(self, is_head: bool) -> Answer:
        line = self._line()
        if not line:
            raise Broken("closed without an answer", is_silent=True)
        version, status, *_ = line.split(b" ", 2)
        if version not in (b"HTTP/1.1", b"HTTP/1.0") or len(status) != 3:
            raise ValueError(f"a status line of {line[:80]!r}")
        headers: dict[str, str] = {}
        while line := self._line().rstrip(b"\r\n"):
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        number = int(status)
        has_body = not (is_head or number < 200 or number in (204, 304))
        return Answer(number, headers, self._body(headers) if has_body else b"")

    def _body(self, headers: dict[str, str]) -> bytes:
        if headers.get("transfer-encoding", "").lower() == "chunked":
            parts = []
            while size := int(self._line(), 16):
                parts.append(self._exactly(size))
                self._line()
            self._line()
            return b"".join(parts)
        if "content-length" in headers:
            return self._exactly(int(headers["content-length"]))
        return self._file.read(MAX_BODY_BYTES)

    def _line(self) -> bytes:
        return self._file.readline(1 << 16)

    def _exactly(self, size: int) -> bytes:
        data = self._file.read(size)
        if len(data) != size:
            raise ValueError(f"an answer that broke off after {len(data)} of {size} bytes")
        return data
