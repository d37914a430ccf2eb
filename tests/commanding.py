"""The ``mlxcel`` command as a process: run to its end, or typed at on a terminal of its own."""

from __future__ import annotations

import asyncio
import codecs
import os
import pty
import select
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from app.request import SamplingParams
from app.runtime import Runtime
from app.service import Ask
from app.settings import Settings
from tests.serving import ROOT

PATIENCE_S = 120.0
ENTER, CTRL_C, CTRL_D, CTRL_P = "\r", "\x03", "\x04", "\x10"
# The new session has no terminal yet: make this one its own, so that Ctrl-C is a signal to it.
TAKE_TERMINAL = (
    "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0);"
    " os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)


def environment(settings: dict[str, str]) -> dict[str, str]:
    """That of this process with no other settings. A dumb terminal keeps readline from steering it."""
    others = {name: value for name, value in os.environ.items() if not name.startswith("MLXCEL_")}
    return others | {"TERM": "dumb"} | {f"MLXCEL_{name}": value for name, value in settings.items()}


def mlxcel(*arguments: str, piped: bytes | None = None, **settings: str) -> subprocess.CompletedProcess[bytes]:
    """Run a command away from any terminal; ``settings`` are variables without their prefix."""
    given = {"stdin": subprocess.DEVNULL} if piped is None else {"input": piped}
    return subprocess.run(
        [sys.executable, "-m", "app", *arguments],
        cwd=ROOT,
        env=environment(settings),
        capture_output=True,
        timeout=PATIENCE_S,
        check=False,
        **given,  # type: ignore[call-overload]
    )


class Terminal:
    """A command on a terminal. ``seen`` is all that it has written there."""

    def __init__(self, *arguments: str, term: str = "dumb", **settings: str) -> None:
        self._ours, theirs = pty.openpty()
        self.process = subprocess.Popen(
            [sys.executable, "-c", TAKE_TERMINAL, "-m", "app", *arguments],
            cwd=ROOT,
            env=environment(settings) | {"TERM": term},
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        self.seen = ""
        self._num_read = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    def __enter__(self) -> Terminal:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)

    def type(self, keys: str) -> None:
        os.write(self._ours, keys.encode())

    def expect(self, text: str) -> str:
        """Wait until ``text`` is written; gives what was written before it since the last call."""
        deadline = time.monotonic() + PATIENCE_S
        while (at := self.seen.find(text, self._num_read)) < 0:
            assert self._read(deadline), f"{text!r} never came, but:\n{self.seen[self._num_read :]!r}"
        before, self._num_read = self.seen[self._num_read : at], at + len(text)
        return before

    def expect_more(self, num_chars: int) -> None:
        """Wait until so much was written since the last call, whatever it is."""
        deadline = time.monotonic() + PATIENCE_S
        while len(self.seen) - self._num_read < num_chars:
            assert self._read(deadline), f"no more came than {self.seen[self._num_read :]!r}"
        self._num_read = len(self.seen)

    def exit_code(self) -> int:
        """Wait for the end of the process, and read what is left."""
        deadline = time.monotonic() + PATIENCE_S
        while self._read(deadline):
            pass
        return self.process.wait(PATIENCE_S)

    def _read(self, deadline: float) -> bool:
        """Read some more; False at the end, or when time is up."""
        ready, _, _ = select.select([self._ours], [], [], max(deadline - time.monotonic(), 0))
        try:
            data = os.read(self._ours, 65536) if ready else b""
        except OSError:  # as Linux tells that nobody has the other end open
            data = b""
        self.seen += self._decoder.decode(data)
        return bool(data)


def greedy(model: Path, num_new: int, *asked: str | list[dict[str, str]]) -> list[str]:
    """What a model answers to conversations, and how it goes on with texts, asked through the service."""

    async def body() -> list[str]:
        started = Runtime(Settings(model=str(model), n_parallel=1, kv_cache_budget="64M", blas="none"))
        await started.start()
        ask, said = Ask(SamplingParams(temperature=0.0), max_tokens=num_new), []
        for one in asked:
            service = started.service
            completion = await (service.complete([one], ask) if isinstance(one, str) else service.chat(one, ask, {}))
            said.append("".join([delta.text async for delta in completion]))
        await started.stop()
        return said

    return asyncio.run(body())
