"""What a person sees on a terminal: answers as they come, and how far a start has got."""

from __future__ import annotations

import logging
import shutil
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from app.logs import OURS

if TYPE_CHECKING:
    from app.completion import Delta

_SPELLED = {code: f"\\x{code:02x}" for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


def printable(text: str) -> str:
    """``text`` with every control character but newline and tab spelled out, so that it cannot steer a terminal."""
    return text.translate(_SPELLED)


class Screen:
    """One answer as it comes: its text on stdout and, where a terminal is there to read it, its reasoning on stderr."""

    def __init__(self) -> None:
        self._stream: TextIO = sys.stdout
        self._is_at_margin = True

    def show(self, delta: Delta) -> None:
        if delta.reasoning and sys.stderr.isatty():
            self._write(sys.stderr, delta.reasoning)
        if delta.text:
            self._write(sys.stdout, delta.text)

    def end(self, finish_reason: str = "stop") -> None:
        """End the last line, and tell a person why an answer is not whole."""
        if not self._is_at_margin:
            self._write(self._stream, "\n")
        if finish_reason != "stop" and sys.stderr.isatty():
            print(f"[{finish_reason}]", file=sys.stderr)

    def _write(self, stream: TextIO, text: str) -> None:
        if stream is not self._stream and not self._is_at_margin:
            self._stream.write("\n")
            self._stream.flush()
        self._stream = stream
        stream.write(printable(text))
        stream.flush()
        self._is_at_margin = text.endswith("\n")


class LoadingLine(logging.Handler):
    """The step that a start has come to, and its age, on one line of stderr that is gone in the end. There is no such
    line where stderr is no terminal, or where the log itself tells the steps."""

    def __init__(self) -> None:
        super().__init__(logging.INFO)
        self._ours = logging.getLogger(OURS)
        self._log_level = self._ours.level
        self._is_on = sys.stderr.isatty() and self._log_level > logging.INFO
        self._began_s = time.monotonic()
        self._step = "starting"
        self._width = 0

    def __enter__(self) -> LoadingLine:
        if self._is_on:
            for handler in logging.getLogger().handlers:
                handler.setLevel(self._log_level)
            self._ours.setLevel(logging.INFO)
            self._ours.addHandler(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_on:
            self._ours.removeHandler(self)
            self._ours.setLevel(self._log_level)
            self._clear()

    def emit(self, record: logging.LogRecord) -> None:
        """Remember a step; make room for what the log has to say."""
        if record.levelno > logging.INFO:
            self._clear()
        else:
            self._step = " ".join(record.getMessage().split())

    def paint(self) -> None:
        """Bring the line up to date."""
        if self._is_on:
            age = f" ({time.monotonic() - self._began_s:.0f} s)"
            room = shutil.get_terminal_size().columns - len(age) - 1
            line = printable(self._step)[:room] + age
            sys.stderr.write("\r" + line.ljust(self._width))
            sys.stderr.flush()
            self._width = len(line)

    def _clear(self) -> None:
        sys.stderr.write("\r" + " " * self._width + "\r")
        sys.stderr.flush()
        self._width = 0
