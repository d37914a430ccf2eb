"""Writes the tables of fields in docs/api.md out of the request bodies: ``python -m ops.api_page``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson

from app.api.llama_protocol import InfillBody, LlamaBody
from app.api.message_body import CountBody, MessageBody
from app.api.protocol import ChatBody, CompletionBody, ModelBody
from app.api.response_body import ResponseBody

PAGE = Path(__file__).parent.parent / "docs" / "api.md"
BEGIN = "<!-- {}: written by `make docs`; a test keeps them equal to app/api -->\n"
END = "<!-- end of {} -->\n"
WORDS = {"array": "list", "boolean": "true or false"}
# The name of each table, and its columns.
TABLES: dict[str, dict[str, type[ModelBody]]] = {
    "fields": {"in chat completions": ChatBody, "in text completions": CompletionBody, "in responses": ResponseBody},
    "fields of messages": {"in messages": MessageBody, "in count_tokens": CountBody},
    "fields of llama-server": {"in /completion": LlamaBody, "in /infill": InfillBody},
}


def render_page(page: str) -> str:
    """``page`` with the tables as the code has them now."""
    for name, columns in TABLES.items():
        before, begin, rest = page.partition(BEGIN.format(name))
        _, end, after = rest.partition(END.format(name))
        page = before + begin + "\n".join(_table(columns)) + "\n" + end + after
    return page


def fate(kind: type[ModelBody], name: str) -> str:
    """What happens to a field; empty for one that is unknown in this kind of request."""
    if name in kind.model_fields:
        return _shape(kind.model_json_schema()["properties"][name])
    if name in kind.neutral:
        neutral = ", ".join(f"`{orjson.dumps(value).decode()}`" for value in kind.neutral[name])
        return f"refused, but {neutral}" if neutral else "refused"
    return "no effect" if name in kind.inert else ""


def _table(columns: dict[str, type[ModelBody]]) -> list[str]:
    kinds = tuple(columns.values())
    names = [name for kind in kinds for name in (*kind.model_fields, *kind.neutral)]
    inert = {name: reason for kind in kinds for name, reason in kind.inert.items()}
    lines = [f"| field | {' | '.join(columns)} | |", "|---|" + "---|" * len(columns) + "---|"]
    for name in dict.fromkeys([*names, *inert]):
        fates = " | ".join(fate(kind, name) or "unknown" for kind in kinds)
        notes = [kind.model_fields[name].description or "" for kind in kinds if name in kind.model_fields]
        note = "; ".join(dict.fromkeys(filter(None, notes))) or inert.get(name, "")
        lines.append(f"| `{name}` | {fates} | {note} |")
    return lines


def _shape(schema: dict[str, Any]) -> str:
    """The type and the range of a JSON schema, in words."""
    if "anyOf" in schema:
        return " or ".join(_shape(option) for option in schema["anyOf"] if option.get("type") != "null")
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
