"""Where log lines go and what they look like: text for a person, JSON lines for a machine, never a prompt or a key.

A line has the event, the facts that were given as ``extra``, and of an exception its kind and its frames. The text of
an exception is shown only where it comes from parts that see no text: elsewhere it may quote what a client has sent.
"""

from __future__ import annotations

import logging
import sys
import traceback
from datetime import UTC, datetime
from logging.handlers import RotatingFileHandler
from typing import Any, TextIO

import orjson

from app.errors import StartError
from app.settings import Settings

# These see ids and numbers only, or run before the first request.
TEXT_FREE = frozenset({"mlxcel.worker", "mlxcel.engine", "mlxcel.runtime", "mlxcel.serve"})
OURS = "mlxcel"
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLines(logging.Formatter):
    """One JSON object a line: time (UTC), level, logger, message, the extra fields, and ``exception`` where one is."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _message(record),
            **_extra(record),
        }
        if exception := _exception(record):
            line["exception"] = exception
        return orjson.dumps({name: _encodable(value) for name, value in line.items()}, default=str).decode()


class TextLines(logging.Formatter):
    """Local time, level and message, the extra fields as ``name=value``, and the frames of an exception. What goes on
    below the first line is set in, so that only a new entry begins at the margin."""

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created).strftime("%Y-%m-%d %H:%M:%S")
        facts = [f"{name}={value}" for name, value in _extra(record).items() if value is not None]
        line = " ".join([at, f"{record.levelname:8}", _message(record), *facts])
        exception = _exception(record)
        return str(_encodable(f"{line}\n{exception}" if exception else line)).replace("\n", "\n  ")


def configure(settings: Settings) -> None:
    """Send every logger of the process to the one place that the settings name, in the one format.

    ``MLXCEL_LOG_LEVEL`` is for this program's own loggers; of libraries only warnings and worse are shown, because
    their finer levels may write down whole requests.

    Raises:
        StartError: the log file cannot be written.
    """
    handler = _handler(settings)
    handler.setFormatter(_formatter(settings, sys.stderr))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
        old.close()
    root.addHandler(handler)
    level = getattr(logging, settings.log_level.upper())
    root.setLevel(max(level, logging.WARNING))
    logging.getLogger(OURS).setLevel(level)
    logging.captureWarnings(True)


def _handler(settings: Settings) -> logging.Handler:
    if settings.log_file is None:
        return logging.StreamHandler()
    try:
        settings.log_file.parent.mkdir(parents=True, exist_ok=True)
        return RotatingFileHandler(
            settings.log_file, maxBytes=settings.log_max_bytes, backupCount=settings.log_backups, encoding="utf-8"
        )
    except OSError as error:
        raise StartError(f"MLXCEL_LOG_FILE={settings.log_file} cannot be written: {error.strerror}") from None


def _formatter(settings: Settings, stream: TextIO) -> logging.Formatter:
    on_terminal = settings.log_file is None and stream.isatty()
    kind = settings.log_format or ("text" if on_terminal else "json")
    return TextLines() if kind == "text" else JsonLines()


def _message(record: logging.LogRecord) -> str:
    """asyncio's own reports go on with the arguments and results of what failed: only their beginning is kept."""
    message = record.getMessage()
    return message.partition("\n")[0].partition("(")[0].strip() if record.name == "asyncio" else message


def _extra(record: logging.LogRecord) -> dict[str, Any]:
    return {name: value for name, value in vars(record).items() if name not in _STANDARD}


def _exception(record: logging.LogRecord) -> str:
    """Kind and frames of the exception and of what caused it, the first cause first."""
    error = record.exc_info[1] if record.exc_info else None
    parts: list[str] = []
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        kind = type(error).__qualname__
        frames = "".join(traceback.format_tb(error.__traceback__))
        frames = frames and f"Traceback (most recent call last):\n{frames}"
        parts.append(f"{frames}{kind}: {error}" if record.name in TEXT_FREE else f"{frames}{kind}")
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    return "\n".join(reversed(parts))


def _encodable(value: Any) -> Any:
    """Half a character in a name or path must not cost the line."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
