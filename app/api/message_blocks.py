"""Conversations and tools as Anthropic's API has them, in blocks, turned into those of a chat."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from app.api.fields import check_function
from app.errors import InvalidRequest

# The blocks that a message of each role may have; all others are refused. What has no effect in them: cache_control,
# citations, caller and toolset_name of a call, the signature of thoughts, and redacted_thinking, which only its author
# can read.
BLOCKS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking", "redacted_thinking"),
    "system": ("text",),
}
FAILED = "Error: "  # chat templates have no other way to say that a call failed


@dataclass(slots=True)
class _Turn:
    """What one role says before another does. ``paragraphs`` are the texts of each message that makes it up."""

    role: str
    call_id: str = ""
    paragraphs: list[list[str]] = field(default_factory=lambda: [[]])
    thoughts: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)

    def message(self) -> dict[str, Any]:
        """The turn as a message of a chat."""
        message: dict[str, Any] = {"role": self.role}
        message["content"] = "\n\n".join(filter(None, map("".join, self.paragraphs)))
        if self.thoughts:
            message["reasoning_content"] = "".join(self.thoughts)
        if self.calls:
            message["tool_calls"] = self.calls
        if self.role == "tool":
            message["tool_call_id"] = self.call_id
        return message


def chat_messages(value: Any) -> list[dict[str, Any]]:
    """The messages of a chat. Neighbours of one role become one turn, and each result of a tool a turn of its own.

    Raises:
        InvalidRequest: naming the place, as in ``messages[2].content[0].type``.
    """
    turns: list[_Turn] = []
    for index, item in enumerate(_listed(value, "messages")):
        _add_message(turns, item, f"messages[{index}]")
    if turns[-1].calls:
        raise InvalidRequest("messages: a tool_use needs its tool_result after it", "messages")
    return [turn.message() for turn in turns]


def system_text(value: Any) -> str:
    """A system prompt, which is text or text blocks. Raises InvalidRequest."""
    return _text(value, "system")


def chat_tools(value: Any) -> list[dict[str, Any]]:
    """The functions of a chat. Raises InvalidRequest, naming the place."""
    if not isinstance(value, list):
        raise InvalidRequest("tools: must be a list", "tools")
    return [_function(item, f"tools[{index}]") for index, item in enumerate(value)]


def _add_message(turns: list[_Turn], item: Any, where: str) -> None:
    if not isinstance(item, dict):
        raise InvalidRequest(f"{where}: must be an object", where)
    role = item.get("role")
    if not isinstance(role, str) or role not in BLOCKS:
        raise InvalidRequest(f"{where}.role: must be one of {', '.join(BLOCKS)}", f"{where}.role")
    if turns and turns[-1].role == role:
        turns[-1].paragraphs.append([])
    for block, at in _blocks(item.get("content"), f"{where}.content"):
        kind = block.get("type")
        if kind not in BLOCKS[role]:
            shown = f", not {kind[:64]}" if isinstance(kind, str) else ""
            allowed = ", ".join(BLOCKS[role])
            raise InvalidRequest(f"{at}.type: a message of {role} may have {allowed}{shown}", f"{at}.type")
        if kind == "tool_result":
            turns.append(_result(block, at))
            continue
        turn = _turn_of(turns, role)
        if kind == "text":
            turn.paragraphs[-1].append(_string(block, "text", at))
        elif kind == "thinking":
            turn.thoughts.append(_string(block, "thinking", at))
        elif kind == "tool_use":
            turn.calls.append(_call(block, at))


def _turn_of(turns: list[_Turn], role: str) -> _Turn:
    """The last turn, if it is of that role, or else a new one."""
    if not turns or turns[-1].role != role:
        turns.append(_Turn(role))
    return turns[-1]


def _call(block: dict[str, Any], at: str) -> dict[str, Any]:
    name, arguments = _string(block, "name", at), block.get("input")
    if not isinstance(arguments, dict):
        raise InvalidRequest(f"{at}.input: must be an object", f"{at}.input")
    return {"id": _string(block, "id", at), "type": "function", "function": {"name": name, "arguments": arguments}}


def _result(block: dict[str, Any], at: str) -> _Turn:
    content, failed = block.get("content"), block.get("is_error")
    if not isinstance(failed, bool | None):
        raise InvalidRequest(f"{at}.is_error: must be true or false", f"{at}.is_error")
    text = "" if content is None else _text(content, f"{at}.content")
    return _Turn("tool", _string(block, "tool_use_id", at), [[FAILED + text if failed else text]])


def _function(item: Any, where: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise InvalidRequest(f"{where}: must be an object", where)
    tool = {name: value for name, value in item.items() if value is not None}
    if tool.get("type", "custom") != "custom":
        raise InvalidRequest(
            f"{where}.type: only custom tools are supported: none is run by this server, and none known to the model",
            f"{where}.type",
        )
    if tool.get("allowed_callers", ["direct"]) != ["direct"]:
        raise InvalidRequest(f"{where}.allowed_callers: only direct calls are supported", f"{where}.allowed_callers")
    check_function(tool, where)
    if not isinstance(tool.get("input_schema"), dict):
        raise InvalidRequest(f"{where}.input_schema: must be an object", f"{where}.input_schema")
    given = {member: tool[member] for member in ("name", "description", "strict") if member in tool}
    return {"type": "function", "function": {**given, "parameters": tool["input_schema"]}}


def _text(value: Any, where: str) -> str:
    """Text, or blocks of it, which are joined."""
    texts = []
    for block, at in _blocks(value, where):
        if block.get("type") != "text":
            raise InvalidRequest(f"{at}.type: only text blocks are supported here", f"{at}.type")
        texts.append(_string(block, "text", at))
    return "".join(texts)


def _blocks(content: Any, where: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Each block with its place. Text alone is short for one block of it."""
    if isinstance(content, str):
        yield {"type": "text", "text": content}, where
        return
    for index, block in enumerate(_listed(content, where)):
        at = f"{where}[{index}]"
        if not isinstance(block, dict):
            raise InvalidRequest(f"{at}: must be an object", at)
        yield block, at


def _listed(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise InvalidRequest(f"{where}: must be a list with something in it", where)
    return value


def _string(block: dict[str, Any], name: str, at: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{at}.{name}: must be a string", f"{at}.{name}")
    return value
