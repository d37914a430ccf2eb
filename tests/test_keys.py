"""API keys: variable and file add up, the file is read again when it changes, and a bad file never opens the server."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from app.api.keys import Keys
from app.errors import StartError


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def later(clock: Clock, keys: Keys) -> tuple[bytes, ...]:
    clock.now_s += 1.0
    return keys.current()


def test_variable_and_file_add_up(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_bytes("\ufeff# staff\r\n\r\n  one # of two\r\n#two\r\nschlüssel\nla#st".encode())
    assert Keys(("zero",), file).current() == (b"zero", b"one", "schlüssel".encode(), b"la#st")
    assert Keys(("zero",)).current() == (b"zero",)
    assert bool(Keys((), file))
    assert not Keys()


@pytest.mark.parametrize("content", [None, b"", b"# only a comment\n\n"])
def test_a_file_without_a_key_refuses_the_start(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(StartError) as error:
        Keys(("zero",), file)
    assert str(error.value).startswith(f"MLXCEL_API_KEY_FILE={file} ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("how", ["in place", "renamed over", "same size and time"])
def test_a_changed_file_is_read_again(tmp_path: Path, clock: Clock, how: str) -> None:
    file, new = tmp_path / "keys", tmp_path / "new"
    file.write_text("old\n")
    keys = Keys((), file, clock)
    new.write_text("new\n")
    if how == "in place":
        file.write_text("new\nmore\n")
    else:
        if how == "same size and time":
            found = file.stat()
            os.utime(new, ns=(found.st_atime_ns, found.st_mtime_ns))
        new.rename(file)
    assert keys.current() == (b"old",), "looked before a second had passed"
    assert later(clock, keys)[0] == b"new"


def test_an_unchanged_file_is_not_read_again(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("old\n")
    keys = Keys((), file, clock)
    monkeypatch.setattr(Path, "read_bytes", lambda _: pytest.fail("read again"))
    assert later(clock, keys) == (b"old",)


def test_a_file_gone_bad_leaves_the_last_good_keys(
    tmp_path: Path, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mlxcel.keys")
    file = tmp_path / "keys"
    file.write_text("good-SECRET\n")
    keys = Keys((), file, clock)
    for spoil in (lambda: file.write_text(""), file.unlink, file.mkdir):
        spoil()
        assert later(clock, keys) == later(clock, keys) == (b"good-SECRET",)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    file.rmdir()
    file.write_text("better-SECRET\n")
    assert later(clock, keys) == (b"better-SECRET",)
    file.unlink()
    later(clock, keys)
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "WARNING"]
    assert "SECRET" not in caplog.text
