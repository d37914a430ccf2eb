"""Calls of functions, as a model writes them down."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

# The text between the marks of a call, and the tools of the request -> one call or a list of them, as mlx-lm's tool
# parsers have it. May raise anything.
ParseCalls = Callable[[str, Sequence[dict[str, Any]]], Any]

# Parsers made of regular expressions take time with the square of the length on odd text: up to seconds for so much.
MAX_CALL_CHARS = 65_536
# What newer Mistral models put before the arguments of a call. Some of them give it an id there.
HEADER = re.compile(r"\s*(?:\[TOOL_CALLS\])?\s*([\w.-]+)(?:\[CALL_ID\]\w*)?\[ARGS\]\s*")


@dataclass(frozen=True, slots=True)
class ToolCall:
    """``arguments`` is the text of a JSON object."""

    id: str
    name: str
    arguments: str


def json_calls(text: str, tools: Sequence[dict[str, Any]]) -> list[Any]:
    """JSON objects one after the other, apart by white space, commas or semicolons, or in a list.

    Raises ValueError for anything else.
    """
    decoder = json.JSONDecoder()
    found: list[Any] = []
    rest = text.strip()
    while rest:
        value, end = decoder.raw_decode(rest)
        found += value if isinstance(value, list) else [value]
        rest = rest[end:].lstrip(" \t\r\n,;")
    return found


def headed_calls(text: str, tools: Sequence[dict[str, Any]]) -> list[Any]:
    """``name[ARGS]{...}``, one after the other, or what ``json_calls`` reads. Raises as that does."""
    decoder = json.JSONDecoder()
    found: list[Any] = []
    at = 0
    while header := HEADER.match(text, at):
        arguments, at = decoder.raw_decode(text, header.end())
        found.append({"name": header[1], "arguments": arguments})
    return found + json_calls(text[at:], tools)


def read_calls(parse: ParseCalls, text: str, tools: Sequence[dict[str, Any]]) -> tuple[ToolCall, ...]:
    """The calls that ``text`` spells; none where any of them is malformed or calls what ``tools`` do not offer, or
    where there is too much of it.

    Whatever ``parse`` does with a text that a model has made up is caught here.
    """
    if len(text) > MAX_CALL_CHARS:
        return ()
    offered = {tool["function"]["name"] for tool in tools}
    try:
        parsed = parse(text, tools)
        return tuple(_call(item, offered) for item in (parsed if isinstance(parsed, list) else [parsed]))
    except Exception:
        return ()


def _call(item: Any, offered: set[str]) -> ToolCall:
    """Raises ValueError or TypeError if this is no call."""
    name = item["name"]
    arguments = item.get("arguments", item.get("parameters"))
    if isinstance(arguments, str):
        arguments = json.loads(arguments)
    if name not in offered or not isinstance(arguments, dict | None):
        raise ValueError
    written = json.dumps(arguments or {}, ensure_ascii=False, allow_nan=False)
    written.encode()  # half of a surrogate pair cannot be sent
    given = item.get("id")
    call_id = given if isinstance(given, str) and given.isprintable() and given.isascii() and given else ""
    return ToolCall(call_id or f"call_{uuid.uuid4().hex}", name, written)
