"""Which API keys are good now: those of the settings, and those of a file that may change while the server runs."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from pathlib import Path

from app.errors import StartError

log = logging.getLogger("mlxcel.keys")

CHECK_INTERVAL_S = 1.0
COMMENT = re.compile(rb"(?:^|\s)#")  # within a key, # is a character like any other

# What tells one state of a file from another: inode, size in bytes, time of the last change in ns.
_Stamp = tuple[int, int, int]


class Keys:
    """The accepted keys, as bytes. A key never leaves this object and the request that brought it."""

    def __init__(
        self, fixed: tuple[str, ...] = (), file: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``fixed`` and the keys of ``file`` add up.

        Raises:
            StartError: the file cannot be read or has no key in it.
        """
        self._fixed = tuple(key.encode() for key in fixed)
        self._file = file
        self._clock = clock
        self._checked_s = clock()
        self._stamp: _Stamp | None = None
        self._is_bad = False
        self._current = self._fixed
        if file is not None:
            try:
                self._stamp = _stamp(file)
                self._current += _read(file)
            except OSError as error:
                raise StartError(f"MLXCEL_API_KEY_FILE={file} cannot be read: {error.strerror}") from None
            except ValueError as error:
                raise StartError(f"MLXCEL_API_KEY_FILE={file} {error}") from None

    def __bool__(self) -> bool:
        """Whether a key is asked for at all; this never changes."""
        return bool(self._fixed) or self._file is not None

    def current(self) -> tuple[bytes, ...]:
        """The keys that are good now. A file that has become unreadable or empty leaves the last good ones."""
        if self._file is not None and self._clock() - self._checked_s >= CHECK_INTERVAL_S:
            self._checked_s = self._clock()
            self._refresh(self._file)
        return self._current

    def _refresh(self, file: Path) -> None:
        try:
            stamp = _stamp(file)
            if stamp == self._stamp:
                return
            found = _read(file)
        except (OSError, ValueError) as error:
            self._stamp = None  # whatever comes next is new
            if not self._is_bad:
                reason = error.strerror if isinstance(error, OSError) else error
                log.warning("%s: %s; the last good keys stay in use", file, reason)
            self._is_bad = True
            return
        self._stamp, self._is_bad = stamp, False
        self._current = self._fixed + found
        log.info("%s has been read again: %d keys", file, len(found))


def _stamp(file: Path) -> _Stamp:
    found = file.stat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _read(file: Path) -> tuple[bytes, ...]:
    """Raises OSError, and ValueError when there is no key."""
    lines = file.read_bytes().removeprefix(b"\xef\xbb\xbf").splitlines()
    keys = tuple(key for line in lines if (key := COMMENT.split(line, 1)[0].strip()))
    if not keys:
        raise ValueError("has no key in it")
    return keys
