"""The items of a response's input: checked, and turned into the messages of a chat."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from app.errors import InvalidRequest

ROLES = ("user", "assistant", "system", "developer")
TEXT_PARTS = ("input_text", "output_text", "text")
# What begins the id of an item, by its type.
PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}


def check_input(value: Any) -> list[dict[str, Any]]:
    """A string is one message of the user. Items come out with the members that are read here, and no others.

    Raises:
        InvalidRequest: naming the place, as in ``input[2].content``.
    """
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    if not isinstance(value, list):
        raise InvalidRequest("input: must be a string or a list of items", "input")
    if not value:
        raise InvalidRequest("input: must not be empty", "input")
    return [_item(item, f"input[{index}]") for index, item in enumerate(value)]


def item_id(kind: str, response_id: str, number: str) -> str:
    """The id of an item names its response, so that it can be found by it."""
    return f"{PREFIXES[kind]}_{response_id.removeprefix('resp_')}_{number}"


def response_of(item_id: str) -> str:
    """The response that an item's id names."""
    return "resp_" + item_id.partition("_")[2].rpartition("_")[0]


def with_ids(items: Iterable[dict[str, Any]], response_id: str) -> list[dict[str, Any]]:
    """Input items as they are listed: those that came without an id have one of this response."""
    return [
        {"id": item_id(item["type"], response_id, f"in{number}"), "status": "completed", **item}
        for number, item in enumerate(items)
    ]


def messages_of(items: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a chat that say the same. What an assistant did in one turn (reasoning, then text, then calls)
    becomes one message, since chat templates want it so."""
    messages: list[dict[str, Any]] = []
    for item in items:
        match item["type"]:
            case "message" if item["role"] == "assistant":
                _turn(messages, ("content", "tool_calls"))["content"] = _text(item["content"])
            case "message":
                messages.append({"role": item["role"], "content": _text(item["content"])})
            case "reasoning":
                said = _text(item["content"]) or _text(item["summary"])
                _turn(messages, ("reasoning_content", "content", "tool_calls"))["reasoning_content"] = said
            case "function_call":
                function = {"name": item["name"], "arguments": item["arguments"]}
                call = {"id": item["call_id"], "type": "function", "function": function}
                _turn(messages, ()).setdefault("tool_calls", []).append(call)
            case "function_call_output":
                output = item["output"]
                content = output if isinstance(output, str) else _text(output)
                messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
    return [{"content": "", **message} for message in messages]


def _turn(messages: list[dict[str, Any]], ended_by: Sequence[str]) -> dict[str, Any]:
    """The assistant's message that is going on, or a new one where it has a member of ``ended_by`` already."""
    if not messages or messages[-1]["role"] != "assistant" or any(name in messages[-1] for name in ended_by):
        messages.append({"role": "assistant"})
    return messages[-1]


def _text(parts: Iterable[dict[str, Any]]) -> str:
    return "".join(part["refusal"] if part["type"] == "refusal" else part["text"] for part in parts)


def _item(item: Any, where: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise InvalidRequest(f"{where}: must be an object", where)
    item = {name: value for name, value in item.items() if value is not None}
    kind = item.get("type", "message" if "role" in item else "item_reference" if "id" in item else None)
    own_id = {"id": _string(item, "id", where)} if "id" in item else {}
    match kind:
        case "message":
            read = _message(item, where)
        case "function_call":
            read = {name: _string(item, name, where) for name in ("call_id", "name", "arguments")}
        case "function_call_output":
            output = item.get("output")
            text = output if isinstance(output, str) else _parts(output, f"{where}.output", "input_text")
            read = {"call_id": _string(item, "call_id", where), "output": text}
        case "reasoning":
            read = _reasoning(item, where)
        case "item_reference":
            read = {"id": _string(item, "id", where)}
        case _:
            raise InvalidRequest(f"{where}.type: items of this type are not supported", f"{where}.type")
    return {"type": kind, **own_id, **read}


def _message(item: dict[str, Any], where: str) -> dict[str, Any]:
    role = item.get("role")
    if role not in ROLES:
        raise InvalidRequest(f"{where}.role: must be one of {', '.join(ROLES)}", f"{where}.role")
    kind = "output_text" if role == "assistant" else "input_text"
    content = item.get("content")
    parts = [{"type": kind, "text": content}] if isinstance(content, str) else content
    return {"role": role, "content": _parts(parts, f"{where}.content", kind)}


def _reasoning(item: dict[str, Any], where: str) -> dict[str, Any]:
    content = _parts(item.get("content", []), f"{where}.content", "reasoning_text", ("reasoning_text",))
    summary = _parts(item.get("summary", []), f"{where}.summary", "summary_text", ("summary_text",))
    if "encrypted_content" in item and not content and not summary:
        at = f"{where}.encrypted_content"
        raise InvalidRequest(f"{at}: cannot be read here; reasoning is given and taken as content", at)
    return {"summary": summary, "content": content}


def _parts(value: Any, where: str, kind: str, allowed: Sequence[str] = TEXT_PARTS) -> list[dict[str, Any]]:
    """Parts of text, all of them as ``kind``; an assistant's refusal stays one."""
    if not isinstance(value, list):
        raise InvalidRequest(f"{where}: must be a list of parts" + " or a string" * (allowed is TEXT_PARTS), where)
    parts = []
    for index, part in enumerate(value):
        at = f"{where}[{index}]"
        if not isinstance(part, dict):
            raise InvalidRequest(f"{at}: must be an object", at)
        if part.get("type") == "refusal" and kind == "output_text":
            parts.append({"type": "refusal", "refusal": _string(part, "refusal", at)})
            continue
        if part.get("type") not in allowed:
            raise InvalidRequest(f"{at}.type: only text parts are supported", f"{at}.type")
        more: dict[str, Any] = {"annotations": []} if kind == "output_text" else {}
        parts.append({"type": kind, "text": _string(part, "text", at), **more})
    return parts


def _string(item: dict[str, Any], name: str, where: str) -> str:
    if not isinstance(item.get(name), str):
        raise InvalidRequest(f"{where}.{name}: must be a string", f"{where}.{name}")
    value: str = item[name]
    return value
