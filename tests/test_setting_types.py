"""What a setting can be: texts read, values shown."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from app.setting_types import Bytes, CountOrAuto, FilePath, Names, nearest, parse_budget, show


def read(kind: object, text: str) -> object:
    return TypeAdapter(kind).validate_python(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(("text", "value"), [("0", 0), ("7", 7), ("4K", 4096), ("16 m", 2**24), (" 2G ", 2**31)])
def test_bytes(text: str, value: int) -> None:
    assert read(Bytes, text) == value


@pytest.mark.parametrize("text", ["", "K", "-1", "1.5G", "1T", "1KK", "0x10"])
def test_what_is_no_number_of_bytes(text: str) -> None:
    with pytest.raises(ValidationError, match="powers of 1024"):
        read(Bytes, text)


@pytest.mark.parametrize(("text", "value"), [("AUTO", "auto"), ("none", "none"), ("0", "none"), ("1K", 1024)])
def test_budget(text: str, value: object) -> None:
    assert parse_budget(text) == value
    with pytest.raises(ValueError, match="or auto, or none"):
        parse_budget("much")


def test_names_counts_and_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert read(Names, "a, b,,c") == ("a", "b", "c")
    assert read(CountOrAuto, "Auto") is None
    assert read(CountOrAuto, "3") == 3
    assert read(FilePath, "~/keys") == Path("/home/me/keys")
    with pytest.raises(ValidationError, match="home folder"):
        read(FilePath, "~nobody-of-this-name/keys")


def test_values_are_shown_as_people_write_them() -> None:
    assert [show(value) for value in (None, (), ("a", "b"), True, 0.5, Path("/x"))] == [
        "unset",
        "unset",
        "a,b",
        "true",
        "0.5",
        "/x",
    ]


def test_the_nearest_name_is_offered() -> None:
    assert nearest("MLXCEL_PROT", ["MLXCEL_PORT", "MLXCEL_HOST"]) == " (did you mean MLXCEL_PORT?)"
    assert nearest("Q", ["MLXCEL_PORT"]) == ""
