"""Log lines: their form, where they go, rotation, and that nothing a client has sent gets into them."""

from __future__ import annotations

import asyncio
import io
import json
import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app import errors, logs
from app.errors import StartError
from app.logs import JsonLines, TextLines
from app.settings import Settings
from tests.scripted import HI, Client, ScriptedCompletion, ScriptedService, call, make_app

CHAT = "/v1/chat/completions"
PROMPT, KEY = "ZEBRA-PROMPT", "KEY-SECRET"


@pytest.fixture(autouse=True)
def _loggers_as_they_were() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("mlxcel")
    handlers, level, our_level = root.handlers[:], root.level, ours.level
    yield
    for handler in root.handlers:
        if handler not in handlers:
            handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    ours.setLevel(our_level)
    logging.captureWarnings(False)


def record(message: str, *args: object, name: str = "mlxcel.api", exc: Exception | None = None, **extra: Any) -> Any:
    info = None if exc is None else (type(exc), exc, exc.__traceback__)
    made = logging.LogRecord(name, logging.WARNING, __file__, 1, message, args, info)
    vars(made).update(extra)
    return made


def raised(error: Exception, cause: Exception | None = None) -> Exception:
    try:
        raise error from cause
    except Exception as caught:
        return caught


def test_a_json_line_is_one_object() -> None:
    line = JsonLines().format(record("to %s\nor not", "be", status=200, where=Path("/x"), queue_s=None))
    assert "\n" not in line
    body = json.loads(line)
    assert body.pop("time").endswith("+00:00")
    assert body == {
        "level": "warning",
        "logger": "mlxcel.api",
        "message": "to be\nor not",
        "status": 200,
        "where": "/x",
        "queue_s": None,
    }


def test_a_text_entry_has_one_line_at_the_margin() -> None:
    line = TextLines().format(record("to %s\nor not", "be", status=200, queue_s=None))
    assert line.endswith(" WARNING  to be\n  or not status=200")
    told = TextLines().format(record("failed", exc=raised(ValueError("a"))))
    assert all(line.startswith("  ") for line in told.splitlines()[1:])
    assert told.endswith("ValueError")


def test_half_a_character_does_not_cost_the_line() -> None:
    for form in (JsonLines(), TextLines()):
        form.format(record("file %s", "a\udce4b", name_="\ud800")).encode()


@pytest.mark.parametrize("form", [JsonLines(), TextLines()])
def test_an_exception_is_told_without_its_text(form: logging.Formatter) -> None:
    error = raised(ValueError(PROMPT), raised(KeyError(PROMPT)))
    for name in ("mlxcel.api", "asyncio", "_granian", "root"):
        line = form.format(record("unexpected failure", name=name, exc=error))
        assert PROMPT not in line
        assert line.index("KeyError") < line.index("ValueError")
        assert "in raised" in line
        assert line.count("Traceback") == 2
    assert "out of memory" in form.format(record("", name="mlxcel.worker", exc=raised(RuntimeError("out of memory"))))


def test_a_cause_that_leads_to_itself_ends() -> None:
    error = raised(ValueError("a"))
    error.__cause__ = raised(KeyError("b"), error)
    assert JsonLines().format(record("x", exc=error)).count("ValueError") == 1


@pytest.mark.parametrize(
    ("log_format", "on_terminal", "to_file", "form"),
    [
        (None, True, False, TextLines),
        (None, False, False, JsonLines),
        (None, True, True, JsonLines),
        ("json", True, False, JsonLines),
        ("text", False, True, TextLines),
    ],
)
def test_the_format_follows_where_lines_go(
    log_format: Any, on_terminal: bool, to_file: bool, form: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = io.StringIO()
    stream.isatty = lambda: on_terminal  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", stream)
    logs.configure(Settings(log_format=log_format, log_file=tmp_path / "log" if to_file else None))
    [handler] = logging.getLogger().handlers
    assert type(handler.formatter) is form
    logging.getLogger("mlxcel.x").info("here")
    assert ("here" in stream.getvalue()) == (not to_file)


def test_every_logger_goes_the_same_way_and_libraries_only_from_warnings_on(tmp_path: Path) -> None:
    file = tmp_path / "new folder" / "log"
    logs.configure(Settings(log_file=file, log_level="debug"))
    for name in ("mlxcel.x", "_granian", "asyncio", "httpcore"):
        logging.getLogger(name).debug("debug of %s", name)
        logging.getLogger(name).warning("warning of %s", name)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old ways", stacklevel=1)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    assert [line["logger"] for line in lines] == [
        "mlxcel.x",
        "mlxcel.x",
        "_granian",
        "asyncio",
        "httpcore",
        "py.warnings",
    ]
    logs.configure(Settings(log_file=file, log_level="error"))
    logging.getLogger("mlxcel.x").warning("no")
    logging.getLogger("asyncio").warning("no")
    assert len(file.read_text().splitlines()) == len(lines)


def test_the_file_is_rotated_by_size(tmp_path: Path) -> None:
    logs.configure(Settings(log_file=tmp_path / "log", log_max_bytes="2K", log_backups=2))
    for i in range(100):
        logging.getLogger("mlxcel.x").info("line %d", i)
    files = sorted(tmp_path.iterdir())
    assert [file.name for file in files] == ["log", "log.1", "log.2"]
    assert max(file.stat().st_size for file in files) <= 2048
    assert "line 99" in files[0].read_text()


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for target in (tmp_path, tmp_path / "file" / "log"):
        with pytest.raises(StartError, match=r"^MLXCEL_LOG_FILE=.* cannot be written: [^\n]*$"):
            logs.configure(Settings(log_file=target))


def bodies() -> Iterator[bytes]:
    """The mark in every place of a request, sound and broken."""
    whole = {"messages": [{"role": "user", "content": PROMPT}]}
    yield json.dumps(whole).encode()
    yield json.dumps(whole).encode()[:-1]
    yield json.dumps(PROMPT).encode()
    yield b"\xff" + PROMPT.encode()
    for fields in (
        {"messages": PROMPT},
        {"messages": [PROMPT]},
        {"messages": [{"role": PROMPT, "content": PROMPT}]},
        {"messages": [{"role": "user", "content": {"type": PROMPT}}]},
        {"model": PROMPT},
        {"temperature": PROMPT},
        {"max_tokens": {PROMPT: PROMPT}},
        {"stop": [PROMPT] * 99},
        {PROMPT: PROMPT},
        {"stream": True},
        {"stream_options": {PROMPT: 1}},
        {"response_format": {"type": PROMPT}},
    ):
        yield json.dumps(whole | fields).encode()


FAILURES: tuple[Exception | None, ...] = (
    None,
    errors.InvalidRequest(f"The template said {PROMPT}", "messages"),
    errors.BackendError(),
    errors.Overloaded(),
    RuntimeError(PROMPT),
    KeyError(PROMPT),
    UnicodeEncodeError("utf-8", PROMPT, 0, 1, PROMPT),
)


@pytest.mark.parametrize("log_format", ["json", "text"])
def test_no_prompt_and_no_key_in_any_line(tmp_path: Path, log_format: Any) -> None:
    file = tmp_path / "log"
    logs.configure(Settings(log_file=file, log_level="debug", log_format=log_format))
    key_file = tmp_path / "keys"
    key_file.write_text(KEY + "\n")
    good = {"authorization": f"Bearer {KEY}", "content-type": "application/json"}
    for failure in FAILURES:
        service = ScriptedService()
        app = make_app(service, api_key_file=key_file, rate_limit_requests=2 * len(list(bodies())) - 1)
        for body in bodies():
            service.refused, service.completion = failure, ScriptedCompletion()
            call(app, "POST", CHAT, content=body, headers=good)
            service.refused, service.completion = None, ScriptedCompletion(*([failure] if failure else HI))
            call(app, "POST", CHAT, content=body, headers=good)
    app = make_app(api_key_file=key_file)
    for headers in ({"authorization": f"Basic {KEY}"}, {"authorization": f"Bearer {KEY}x"}, {"content-type": PROMPT}):
        call(app, "POST", CHAT, content=PROMPT, headers=headers)
    for method, path in (("GET", f"/{PROMPT}"), ("GET", f"/v1/models/{PROMPT}"), (PROMPT, f"/v1/models?key={KEY}")):
        call(app, method, path, headers={"authorization": f"Bearer {KEY}"})
    written = file.read_text()
    assert len(written.splitlines()) > 100
    assert "unexpected failure" in written
    assert PROMPT not in written
    assert KEY not in written


def test_a_failure_that_nobody_fetched_is_told_without_its_text(tmp_path: Path) -> None:
    """asyncio reports it with the repr of the future, which has the exception and so the prompt in it."""
    file = tmp_path / "log"
    logs.configure(Settings(log_file=file, log_level="debug"))

    async def go() -> None:
        async def fail() -> None:
            raise ValueError(PROMPT)

        def fail_with(text: str) -> None:
            raise ValueError(text)

        task = asyncio.ensure_future(fail())
        asyncio.get_running_loop().call_soon(fail_with, PROMPT)
        await asyncio.sleep(0.01)
        del task

    asyncio.run(go())
    written = file.read_text()
    assert "Task exception was never retrieved" in written
    assert "Exception in callback" in written
    assert PROMPT not in written


def test_a_client_that_leaves_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "log"
    logs.configure(Settings(log_file=file))

    async def go() -> None:
        app = make_app(ScriptedService(ScriptedCompletion(None)))
        client = Client(app, CHAT, {"messages": [{"role": "user", "content": PROMPT}]})
        await asyncio.sleep(0.01)
        await client.leave()

    asyncio.run(go())
    [line] = [json.loads(line) for line in file.read_text().splitlines()]
    assert (line["status"], line["finish_reason"]) == (499, "cancelled")
