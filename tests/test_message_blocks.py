"""Conversations in content blocks: what they are as messages of a chat, and what is refused in which words."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest
from anthropic.types import ContentBlockParam, ToolUnionParam

from app.api.message_blocks import BLOCKS, chat_messages, chat_tools, system_text
from app.errors import InvalidRequest

TOOL = {"name": "add", "description": "adds", "input_schema": {"type": "object", "properties": {}}}
USE = {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 1}}
RESULT = {"type": "tool_result", "tool_use_id": "call_1", "content": "2"}
CALL = {"id": "call_1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value, "cache_control": {"type": "ephemeral"}}


def said(role: str, *content: Any) -> dict[str, Any]:
    return {"role": role, "content": list(content)}


@pytest.mark.parametrize(
    ("given", "messages"),
    [
        ([{"role": "user", "content": "hi"}], [{"role": "user", "content": "hi"}]),
        ([said("user", text("a"), text("b"))], [{"role": "user", "content": "ab"}]),
        (
            [said("user", text("a")), {"role": "user", "content": "b"}, said("assistant", text("c"))],
            [{"role": "user", "content": "a\n\nb"}, {"role": "assistant", "content": "c"}],
        ),
        (
            [{"role": "system", "content": "s"}, {"role": "user", "content": ""}],
            [{"role": "system", "content": "s"}, {"role": "user", "content": ""}],
        ),
        (
            [
                said(
                    "assistant",
                    {"type": "thinking", "thinking": "Hm", "signature": "x"},
                    {"type": "redacted_thinking", "data": "x"},
                    text("Well."),
                    USE,
                ),
                said("assistant", USE | {"id": "call_2"}),
                said("user", RESULT, RESULT | {"tool_use_id": "call_2", "content": [text("3"), text("4")]}, text("?")),
            ],
            [
                {
                    "role": "assistant",
                    "content": "Well.",
                    "reasoning_content": "Hm",
                    "tool_calls": [CALL, CALL | {"id": "call_2"}],
                },
                {"role": "tool", "content": "2", "tool_call_id": "call_1"},
                {"role": "tool", "content": "34", "tool_call_id": "call_2"},
                {"role": "user", "content": "?"},
            ],
        ),
        (
            [said("user", {"type": "tool_result", "tool_use_id": "x", "is_error": True, "content": "no"})],
            [{"role": "tool", "content": "Error: no", "tool_call_id": "x"}],
        ),
        (
            [said("user", {"type": "tool_result", "tool_use_id": "x", "is_error": False})],
            [{"role": "tool", "content": "", "tool_call_id": "x"}],
        ),
    ],
)
def test_a_conversation_as_a_chat(given: list[Any], messages: list[Any]) -> None:
    assert chat_messages(given) == messages


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("hi", "messages: must be a list with something in it"),
        ([], "messages: must be a list with something in it"),
        ([1], "messages[0]: must be an object"),
        ([{"role": "tool", "content": ""}], "messages[0].role: must be one of user, assistant, system"),
        ([{"role": "user"}], "messages[0].content: must be a list with something in it"),
        ([said("user")], "messages[0].content: must be a list with something in it"),
        ([said("user", "hi")], "messages[0].content[0]: must be an object"),
        ([said("user", {"type": "text"})], "messages[0].content[0].text: must be a string"),
        (
            [said("user", text("a"), {"type": "image", "source": {}})],
            "messages[0].content[1].type: a message of user may have text, tool_result, not image",
        ),
        ([said("user", {"type": 1})], "messages[0].content[0].type: a message of user may have text, tool_result"),
        ([said("user", {"type": []})], "messages[0].content[0].type: a message of user may have text, tool_result"),
        (
            [said("user", USE)],
            "messages[0].content[0].type: a message of user may have text, tool_result, not tool_use",
        ),
        ([said("assistant", RESULT)], "messages[0].content[0].type: a message of assistant may have text, tool_use"),
        ([said("assistant", USE)], "messages: a tool_use needs its tool_result after it"),
        ([said("assistant", USE | {"input": "{}"})], "messages[0].content[0].input: must be an object"),
        ([said("assistant", USE | {"id": None})], "messages[0].content[0].id: must be a string"),
        ([said("assistant", USE | {"name": 1})], "messages[0].content[0].name: must be a string"),
        ([said("assistant", {"type": "thinking"})], "messages[0].content[0].thinking: must be a string"),
        ([said("user", {"type": "tool_result"})], "messages[0].content[0].tool_use_id: must be a string"),
        ([said("user", RESULT | {"is_error": 1})], "messages[0].content[0].is_error: must be true or false"),
        (
            [said("user", RESULT | {"content": [{"type": "image"}]})],
            "messages[0].content[0].content[0].type: only text blocks are supported here",
        ),
    ],
)
def test_what_is_wrong_with_a_conversation_is_said_with_its_place(given: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat_messages(given)
    assert str(caught.value).startswith(message)
    assert caught.value.param == message.partition(":")[0]


def test_a_system_prompt_is_text_or_text_blocks() -> None:
    assert system_text("s") == "s"
    assert system_text([text("a"), text("b")]) == "ab"
    with pytest.raises(InvalidRequest, match=r"system\[0\]\.type: only text blocks"):
        system_text([{"type": "image"}])


def test_a_tool_is_a_function() -> None:
    given = [TOOL | {"strict": True, "cache_control": None, "allowed_callers": ["direct"]}, {**TOOL, "type": "custom"}]
    function = {"name": "add", "description": "adds", "parameters": TOOL["input_schema"]}
    assert chat_tools(given) == [
        {"type": "function", "function": function | {"strict": True}},
        {"type": "function", "function": function},
    ]


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        ({}, "tools: must be a list"),
        ([[]], "tools[0]: must be an object"),
        ([TOOL, {"type": "web_search_20250305", "name": "web_search"}], "tools[1].type: only custom tools"),
        ([TOOL | {"name": "a b"}], "tools[0].name: must be 1 to 128 letters"),
        ([TOOL | {"name": None}], "tools[0].name: must be 1 to 128 letters"),
        ([TOOL | {"input_schema": None}], "tools[0].input_schema: must be an object"),
        ([TOOL | {"description": 1}], "tools[0].description: must be a string"),
        ([TOOL | {"allowed_callers": ["code_execution_20250825"]}], "tools[0].allowed_callers: only direct calls"),
    ],
)
def test_what_is_wrong_with_a_tool_is_said_with_its_place(tools: Any, message: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat_tools(tools)
    assert str(caught.value).startswith(message)
    assert caught.value.param == message.partition(":")[0]


def kinds(union: Any) -> dict[str, type]:
    """The types of the package that a union has, by the value of their ``type``."""
    found: dict[str, type] = {}
    for params in get_args(union):
        found |= dict.fromkeys(literals(get_type_hints(params)["type"]), params)
    return found


def literals(hint: Any) -> list[str]:
    """The strings that a type allows."""
    return [hint] if isinstance(hint, str) else [one for part in get_args(hint) for one in literals(part)]


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_every_block_of_the_anthropic_package_is_taken_or_refused_by_its_name(role: str) -> None:
    names = kinds(ContentBlockParam)
    assert len(names) > 8
    assert set(BLOCKS[role]) <= set(names)
    for name in set(names) - set(BLOCKS[role]):
        with pytest.raises(InvalidRequest, match=rf"messages\[0\]\.content\[0\]\.type: .*, not {name}$"):
            chat_messages([said(role, {"type": name})])


def test_every_tool_of_the_anthropic_package_but_ones_own_is_refused() -> None:
    names = set(kinds(ToolUnionParam)) - {"custom"}
    assert len(names) > 5
    for name in names:
        with pytest.raises(InvalidRequest, match=r"tools\[0\]\.type"):
            chat_tools([TOOL | {"type": name}])
