"""What `tool_choice` may be, and what the service is asked then."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest
from openai.types.chat.chat_completion_allowed_tools_param import ChatCompletionAllowedToolsParam

from app.api.answer_shape import MAX_FORCED_BYTES
from app.api.tool_choice import MODES
from app.errors import InvalidRequest
from tests.test_protocol import DEFAULT, LIMITS, ask, chat, tool

PLAIN, LINKED = tool(name="a"), tool(name="b", parameters={"$ref": "#/x"}, strict=True)
TOOLS = [PLAIN, LINKED]
FORCED = {
    "a": '{"type":"object","properties":{},"additionalProperties":false}',
    "b": '{"type":"object","$ref":"#/x"}',
}
HOW = "tool_choice: must be none, auto, required, a function by its name, or allowed_tools"
NAMED = "tool_choice: a function must be named as type function with its name in function"


def named(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


def allowed(mode: Any, *names: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [named(name) for name in names]}}


@pytest.mark.parametrize(
    ("choice", "names", "many"),
    [
        ("required", "ab", True),
        (named("b"), "b", False),
        (allowed("required", "a"), "a", True),
        (allowed("required", "b", "a", "b"), "ab", True),
    ],
)
def test_a_call_is_forced(choice: Any, names: str, many: bool) -> None:
    given = chat(tools=TOOLS, tool_choice=choice)
    asked = given.ask(DEFAULT, LIMITS)
    assert asked.forced == tuple((name, FORCED[name]) for name in names)
    assert [each["function"]["name"] for each in asked.tools] == list(names)
    assert asked.many_calls == many
    assert given.template == {"tools": TOOLS}


@pytest.mark.parametrize("choice", ["required", allowed("required", "a")])
def test_one_call_at_most_where_that_is_asked(choice: Any) -> None:
    assert not ask(tools=TOOLS, tool_choice=choice, parallel_tool_calls=False).many_calls


@pytest.mark.parametrize(("choice", "names"), [("auto", "ab"), (None, "ab"), ("none", ""), (allowed("auto", "b"), "b")])
def test_nothing_is_forced(choice: Any, names: str) -> None:
    given = chat(tools=TOOLS, tool_choice=choice)
    asked = given.ask(DEFAULT, LIMITS)
    assert (asked.forced, asked.many_calls) == ((), True)
    assert [each["function"]["name"] for each in asked.tools] == list(names)
    assert given.template == ({"tools": TOOLS} if names else {})


def test_the_modes_are_those_of_openai() -> None:
    assert get_args(get_type_hints(ChatCompletionAllowedToolsParam)["mode"]) == MODES


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ("any", HOW),
        (["auto"], HOW),
        (5, HOW),
        ({}, HOW),
        ({"type": "custom", "custom": {"name": "a"}}, HOW),
        ({"type": ["function"]}, HOW),
        ({"type": "function"}, NAMED),
        (named(5), NAMED),
        (named(None), NAMED),
        (named("c"), "tool_choice: 'c' is not among the tools"),
        (named("c" * 999), f"tool_choice: {'c' * 64!r} is not among the tools"),
        ({"type": "allowed_tools"}, "tool_choice: allowed_tools must be an object of that name, with mode and tools"),
        (allowed(["auto"], "a"), "tool_choice: the mode of allowed_tools must be auto or required"),
        (allowed("auto"), "tool_choice: the tools of allowed_tools must be a list with a function in it"),
        (allowed("auto", "a", 5), NAMED),
        (allowed("required", "a", "c"), "tool_choice: 'c' is not among the tools"),
    ],
)
def test_what_is_no_choice_is_refused_in_plain_words(choice: Any, text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ask(tools=TOOLS, tool_choice=choice)
    assert (str(caught.value), caught.value.param) == (text, "tool_choice")


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "tool_choice"),
        ({"tools": TOOLS, "ignore_eos": True}, "ignore_eos"),
        ({"tools": TOOLS, "json_schema": {}}, "json_schema"),
        ({"tools": [PLAIN, tool(parameters={"type": "string"})]}, "tools[1].function.parameters"),
        ({"tools": [PLAIN, tool(parameters={"type": None})]}, "tools[1].function.parameters"),
        ({"tools": [PLAIN, tool(parameters=deep(400))]}, "tools[1].function.parameters"),
        ({"tools": [PLAIN, tool(parameters={"title": "x" * (1 << 16)})]}, "tools[1].function.parameters"),
        ({"tools": [tool(parameters={"title": "x" * 60_000})] * (MAX_FORCED_BYTES // 60_000 + 1)}, "tools"),
    ],
)
def test_a_call_that_cannot_be_forced_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ask(tool_choice="required", **fields)
    assert str(caught.value).startswith(f"{param}: ")
    assert caught.value.param == param


def test_tools_that_are_not_forced_may_have_any_parameters() -> None:
    tools = [PLAIN, tool(parameters={"type": "string"})]
    assert ask(tools=tools, tool_choice=named("a")).forced == (("a", FORCED["a"]),)
    assert ask(tools=tools).tools == tuple(tools)
