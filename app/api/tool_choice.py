"""Which of the tools may be called, and whether one has to be: OpenAI's ``tool_choice``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from app.errors import InvalidRequest

WORDS = ("none", "auto", "required")
MODES = ("auto", "required")


@dataclass(frozen=True, slots=True)
class CallRule:
    """``names`` are the functions that may be called, None for all. ``must_call``: at least one of them, or with
    ``only_once`` exactly one, and the answer is nothing else."""

    names: frozenset[str] | None = None
    must_call: bool = False
    only_once: bool = False

    def among(self, tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """The tools that may be called.

        Raises:
            InvalidRequest: a name that none of ``tools`` has, or none of them where one has to be called.
        """
        offered = {tool["function"]["name"] for tool in tools}
        for name in sorted((self.names or frozenset()) - offered):
            raise _fault(f"{name[:64]!r} is not among the tools")
        if self.must_call and not tools:
            raise _fault("there are no tools to be called")
        return [tool for tool in tools if self.names is None or tool["function"]["name"] in self.names]


def read_tool_choice(value: Any) -> CallRule:
    """Raises InvalidRequest for what is none of the ways to choose."""
    if isinstance(value, str) and value in WORDS:
        return CallRule(frozenset() if value == "none" else None, value == "required")
    if isinstance(value, dict):
        if value.get("type") == "function":
            return CallRule(frozenset([_name(value)]), must_call=True, only_once=True)
        if value.get("type") == "allowed_tools":
            return _allowed(value.get("allowed_tools"))
    raise _fault(f"must be {', '.join(WORDS)}, a function by its name, or allowed_tools")


def _allowed(value: Any) -> CallRule:
    if not isinstance(value, dict):
        raise _fault("allowed_tools must be an object of that name, with mode and tools")
    if value.get("mode") not in MODES:
        raise _fault(f"the mode of allowed_tools must be {' or '.join(MODES)}")
    tools = value.get("tools")
    if not isinstance(tools, list) or not tools:
        raise _fault("the tools of allowed_tools must be a list with a function in it")
    return CallRule(frozenset(map(_name, tools)), value["mode"] == "required")


def _name(value: Any) -> str:
    function = value.get("function") if isinstance(value, dict) and value.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise _fault("a function must be named as type function with its name in function")
    return name


def _fault(what: str) -> InvalidRequest:
    return InvalidRequest(f"tool_choice: {what}", "tool_choice")
