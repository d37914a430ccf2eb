"""What a setting can be: how its text is read, and how its value is shown."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

_UNITS = {"": 1, "K": 1024, "M": 1024**2, "G": 1024**3}


def parse_bytes(value: object) -> object:
    """Bytes of a text such as ``64M``; what is no text is left as it is. Raises ValueError."""
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+)\s*([KMG]?)", value.strip().upper())
    if match is None:
        raise ValueError("must be a number of bytes, plain or with K, M or G (powers of 1024)")
    return int(match[1]) * _UNITS[match[2]]


def parse_budget(value: object) -> object:
    """Bytes, ``auto`` or ``none``; 0 is ``none`` too. Raises ValueError."""
    word = lower(value)
    if word in ("auto", "none"):
        return word
    try:
        return parse_bytes(value) or "none"
    except ValueError as error:
        raise ValueError(f"{error}, or auto, or none") from None


def lower(value: object) -> object:
    """A word without regard to case; what is no text is left as it is."""
    return value.strip().lower() if isinstance(value, str) else value


def _split_list(value: object) -> object:
    return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def _unset_if_auto(value: object) -> object:
    return None if lower(value) == "auto" else value


def _expand_home(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError:
        raise ValueError("the home folder that it names is not known") from None


def refused_until_built(*words: str) -> BeforeValidator:
    """Refuses by name the choices that are known to operators and that this server does not offer yet."""

    def refuse(value: object) -> object:
        if value in words:
            raise ValueError(f"{value} does not exist yet")
        return value

    return BeforeValidator(refuse)


WORD = BeforeValidator(lower)
Bytes = Annotated[int, BeforeValidator(parse_bytes)]
Names = Annotated[tuple[str, ...], BeforeValidator(_split_list)]
Seconds = Annotated[float, Field(allow_inf_nan=False)]
CountOrAuto = Annotated[int | None, BeforeValidator(_unset_if_auto)]
FilePath = Annotated[Path, AfterValidator(_expand_home)]
StorageBackend = Annotated[Literal["auto", "dense", "paged"], WORD]
Victim = Annotated[Literal["longest-first", "lowest-priority"], WORD]
DraftKind = Annotated[Literal["none", "prompt-lookup"], refused_until_built("mtp", "dflash"), WORD]
LogFormat = Annotated[Literal["text", "json"], WORD]
LogLevel = Annotated[Literal["debug", "info", "warning", "error"], WORD]


def show(value: object) -> str:
    """A value as people write it."""
    if value is None or value == ():
        return "unset"
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)


def nearest(name: str, known: Iterable[str]) -> str:
    """`` (did you mean X?)`` for the known name most like ``name``, or nothing when none is like it."""
    # What all names begin with says nothing of how much two of them are alike.
    names = {other.removeprefix("MLXCEL_").lstrip("-"): other for other in known}
    close = difflib.get_close_matches(name.removeprefix("MLXCEL_").lstrip("-"), names, n=1)
    return f" (did you mean {names[close[0]]}?)" if close else ""
