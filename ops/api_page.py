"""Writes the table of fields in docs/api.md out of the request bodies: ``python -m ops.api_page``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from app.api.protocol import ChatBody, CompletionBody, Generation
from app.api.response_body import ResponseBody

PAGE = Path(__file__).parent.parent / "docs" / "api.md"
BEGIN = "<!-- fields: written by `make docs`; a test keeps them equal to app/api -->\n"
END = "<!-- end of fields -->\n"
WORDS = {"array": "list", "boolean": "true or false"}
KINDS: tuple[type[Generation], ...] = (ChatBody, CompletionBody, ResponseBody)


def render_page(page: str) -> str:
    """``page`` with the table as the code has it now."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return before + BEGIN + "\n".join(_table()) + "\n" + END + after


def fate(kind: type[Generation], name: str) -> str:
    """What happens to a field; empty for one that is unknown in this kind of request."""
    if name in kind.model_fields:
        return _shape(kind.model_json_schema()["properties"][name])
    if name in kind.neutral:
        neutral = ", ".join(f"`{orjson.dumps(value).decode()}`" for value in kind.neutral[name])
        return f"refused, but {neutral}" if neutral else "refused"
    return "no effect" if name in kind.inert else ""


def _table() -> list[str]:
    names = [name for kind in KINDS for name in (*kind.model_fields, *kind.neutral)]
    reasons = {name: why for kind in KINDS for name, why in kind.inert.items()}
    lines = ["| field | in chat completions | in text completions | in responses | |", "|---|---|---|---|---|"]
    for name in dict.fromkeys([*names, *reasons]):
        fates = " | ".join(fate(kind, name) or "unknown" for kind in KINDS)
        notes = [kind.model_fields[name].description or "" for kind in KINDS if name in kind.model_fields]
        note = "; ".join(dict.fromkeys(filter(None, [*notes, reasons.get(name)])))
        lines.append(f"| `{name}` | {fates} | {note} |")
    return lines


def _shape(schema: dict[str, Any]) -> str:
    """The type and the range of a JSON schema, in words."""
    for option in schema.get("anyOf", ()):
        if option.get("type") != "null":
            return _shape(option)
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    words = [WORDS.get(schema.get("type", "object"), schema.get("type", "object"))]
    for name, text in (
        ("minimum", "from {}"),
        ("exclusiveMinimum", "above {}"),
        ("maximum", "to {}"),
        ("exclusiveMaximum", "below {}"),
        ("maxItems", "of at most {}"),
        ("maxLength", "of at most {} characters"),
        ("maxProperties", "of at most {} entries"),
    ):
        if name in schema:
            words.append(text.format(_number(schema[name])))
    return " ".join(words)


def _number(value: float) -> str:
    power = int(abs(value)).bit_length() - 1
    if power >= 31 and abs(value) == 2**power:
        return f"{'-' if value < 0 else ''}2^{power}"
    return f"{value:g}"


if __name__ == "__main__":
    PAGE.write_text(render_page(PAGE.read_text()))
