"""Request bodies of Anthropic's API: what is refused, what is let through, and what a chat is asked."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest
from anthropic.types import (
    OutputConfigParam,
    ThinkingConfigParam,
    ToolChoiceParam,
    message_count_tokens_params,
    message_create_params,
)
from anthropic.types.beta import message_count_tokens_params as beta_count_tokens_params
from anthropic.types.beta import message_create_params as beta_create_params

from app.api.fields import Limits
from app.api.message_body import INERT, NEUTRAL, CountBody, MessageBody, OutputConfig, Thinking, ToolChoice
from app.api.parse import parse, unknown_fields
from app.errors import InvalidRequest
from app.request import SamplingParams
from ops.api_page import fate
from tests.test_message_blocks import kinds

NEEDED = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]}
TOOL = {"name": "add", "input_schema": {"type": "object", "properties": {}}}
SCHEMA = {"type": "object"}


def body(**fields: Any) -> MessageBody:
    return parse(MessageBody, NEEDED | fields)


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        (MessageBody, message_create_params.MessageCreateParamsNonStreaming),
        (MessageBody, message_create_params.MessageCreateParamsStreaming),
        (MessageBody, beta_create_params.MessageCreateParamsNonStreaming),
        (MessageBody, beta_create_params.MessageCreateParamsStreaming),
        (CountBody, message_count_tokens_params.MessageCountTokensParams),
        (CountBody, beta_count_tokens_params.MessageCountTokensParams),
    ],
)
def test_every_field_of_the_anthropic_package_is_honoured_inert_or_refused(kind: type[CountBody], params: type) -> None:
    fields = get_type_hints(params)
    assert len(fields) > 8
    assert [name for name in fields if not fate(kind, name)] == []


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        (OutputConfig, (OutputConfigParam,)),
        (Thinking, get_args(ThinkingConfigParam)),
        (ToolChoice, get_args(ToolChoiceParam)),
    ],
)
def test_objects_have_the_members_of_the_anthropic_package(kind: Any, params: tuple[type, ...]) -> None:
    assert {name for one in params for name in get_type_hints(one)} == set(kind.model_fields)


@pytest.mark.parametrize(
    ("name", "union", "refused"),
    [("thinking", ThinkingConfigParam, {"between_tools"}), ("tool_choice", ToolChoiceParam, set())],
)
def test_every_type_of_the_anthropic_package_is_taken_or_refused(name: str, union: Any, refused: set[str]) -> None:
    for kind in kinds(union):
        given = {name: {"type": kind, **({"name": "add"} if kind == "tool" else {})}}
        if kind in refused:
            with pytest.raises(InvalidRequest, match=rf"{name}\.type"):
                body(**given)
        else:
            body(**given)


@pytest.mark.parametrize("kind", [MessageBody, CountBody])
def test_what_the_table_calls_refused_is_refused(kind: type[CountBody]) -> None:
    for name, neutral in NEUTRAL.items():
        with pytest.raises(InvalidRequest) as caught:
            parse(kind, NEEDED | {name: {"some": "thing"}})
        assert caught.value.param == name
        for value in neutral:
            parse(kind, NEEDED | {name: value})
    for name in INERT:
        parse(kind, NEEDED | {name: {"some": "thing"}})


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"max_tokens": None}, "max_tokens: is required"),
        ({"max_tokens": 0}, "max_tokens: must be at least 1, got 0"),
        ({"messages": None}, "messages: is required"),
        ({"temperature": 1.5}, "temperature: must be at most 1, got 1.5"),
        ({"top_p": 0}, "top_p: must be greater than 0, got 0"),
        ({"top_k": -1}, "top_k: must be at least 0, got -1"),
        ({"stop_sequences": "END"}, "stop_sequences: must be a list"),
        ({"stop_sequences": [""]}, "stop_sequences[0]: must not be empty"),
        ({"stop_sequences": ["a"] * 17}, "stop_sequences: must have at most 16 entries"),
        ({"stream": 1}, "stream: must be true or false, got 1"),
        ({"thinking": True}, "thinking: must be an object"),
        ({"thinking": {}}, "thinking.type: is required"),
        ({"thinking": {"type": "on"}}, "thinking.type: must be one of 'enabled', 'disabled' or 'adaptive'"),
        ({"thinking": {"type": "enabled", "hidden": 1}}, "thinking.hidden: is not supported by this server, got 1"),
        ({"tool_choice": "auto"}, "tool_choice: must be an object"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name: is required"),
        ({"output_config": {"effort": "none"}}, "output_config.effort: must be one of"),
        ({"output_config": {"task_budget": {}}}, "output_config.task_budget: is not supported by this server"),
        ({"output_config": {"format": {"type": "json_schema"}}}, "output_config.format.schema: is required"),
        ({"container": "c"}, "container: this value is not supported by this server"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers: this value is not supported by this server"),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "tools": [TOOL]},
            "output_config.format: leaves no way to call tools; send tool_choice none",
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {"const": "x" * 70_000}}}},
            "output_config.format: the schema has",
        ),
    ],
)
def test_a_wrong_value_is_refused_in_plain_words(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        body(**fields)
    assert str(caught.value).startswith(text)
    assert caught.value.param == text.partition(":")[0]


def test_null_is_absent_for_every_optional_field() -> None:
    names = MessageBody.known_fields() - NEEDED.keys()
    assert body(**dict.fromkeys(names)) == body()


def test_fields_of_other_apis_are_unknown() -> None:
    given = NEEDED | {"stream_options": {"x": 1}, "n": 2, "top_logprobs": 1}
    assert unknown_fields(MessageBody, given) == ["n", "stream_options", "top_logprobs"]
    assert unknown_fields(CountBody, NEEDED) == ["max_tokens"]


def test_a_message_asks_what_a_chat_would() -> None:
    chat = body(
        system=[{"type": "text", "text": "s"}],
        temperature=0.5,
        top_p=0.9,
        top_k=0,
        stop_sequences=["END"],
        tools=[TOOL],
        tool_choice={"type": "auto", "disable_parallel_tool_use": True},
        output_config={"effort": "low"},
        thinking={"type": "enabled", "budget_tokens": 1024},
    ).chat
    ask = chat.ask(SamplingParams(min_p=0.2, top_k=7), Limits(100))
    assert [message["role"] for message in chat.messages] == ["system", "user"]
    assert (ask.max_tokens, ask.stop, ask.many_calls, ask.shape) == (9, ("END",), False, None)
    sampling = ask.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 0, 0.2)
    assert [tool["function"]["name"] for tool in ask.tools] == ["add"]
    assert chat.template == {"tools": list(ask.tools), "reasoning_effort": "low", "enable_thinking": True}


@pytest.mark.parametrize(
    ("thinking", "enabled"),
    [
        (None, False),
        ({"type": "disabled"}, False),
        ({"type": "adaptive", "display": "omitted"}, True),
        ({"type": "enabled", "budget_tokens": 1024}, True),
    ],
)
def test_thinking_is_off_unless_it_is_asked_for(thinking: Any, enabled: bool) -> None:
    assert body(thinking=thinking).chat.template == {"enable_thinking": enabled}


def test_a_conversation_that_ends_with_the_assistant_is_continued() -> None:
    begun = [*NEEDED["messages"], {"role": "assistant", "content": "The"}]  # type: ignore[misc]
    template = body(messages=begun).chat.template
    assert template == {"enable_thinking": False, "add_generation_prompt": False, "continue_final_message": True}


def test_tools_are_not_shown_where_none_may_be_called() -> None:
    assert body(tools=[TOOL], tool_choice={"type": "none"}).chat.offered == []


@pytest.mark.parametrize(
    ("choice", "of_chat"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
        ({"type": "any"}, "required"),
        ({"type": "tool", "name": "add"}, {"type": "function", "function": {"name": "add"}}),
    ],
)
def test_each_choice_of_tools_is_one_of_chat(choice: dict[str, Any], of_chat: Any) -> None:
    given = body(tools=[TOOL], tool_choice=choice).tool_choice
    assert given is not None
    assert given.of_chat == of_chat


@pytest.mark.parametrize("kind", ["any", "tool"])
@pytest.mark.parametrize(
    ("schema", "text"),
    [
        ({"type": "array"}, "must describe an object, for a call to be forced"),
        ({"title": "x" * 70_000}, "the schema has"),
    ],
)
def test_a_tool_that_cannot_be_forced_is_told_by_its_own_fields(kind: str, schema: Any, text: str) -> None:
    choice = {"type": kind, **({"name": "b"} if kind == "tool" else {})}
    given = body(tools=[TOOL, {"name": "b", "input_schema": schema}], tool_choice=choice)
    with pytest.raises(InvalidRequest) as caught:
        given.ask(SamplingParams(), Limits(100))
    assert str(caught.value).startswith(f"tools[1].input_schema: {text}")
    assert caught.value.param == "tools[1].input_schema"


@pytest.mark.parametrize("tools", [[], [TOOL]])
def test_a_choice_of_a_tool_that_is_not_there_is_told_by_its_name(tools: list[Any]) -> None:
    given = body(tools=tools, tool_choice={"type": "tool", "name": "b"})
    with pytest.raises(InvalidRequest) as caught:
        _ = given.chat
    assert str(caught.value) == "tool_choice.name: 'b' is not among the tools"
    assert caught.value.param == "tool_choice.name"


def test_a_call_of_no_tool_is_told_of_the_choice() -> None:
    given = body(tool_choice={"type": "any"})
    with pytest.raises(InvalidRequest) as caught:
        _ = given.chat
    assert (str(caught.value), caught.value.param) == ("tool_choice: there are no tools to be called", "tool_choice")


def test_a_shape_names_the_field_that_it_came_with() -> None:
    shape = body(output_config={"format": {"type": "json_schema", "schema": SCHEMA}}).shape
    assert shape is not None
    assert (shape.kind, shape.source, shape.param) == ("json_schema", '{"type":"object"}', "output_config.format")


@pytest.mark.parametrize(
    ("template", "unread"),
    [
        ("", []),
        ("{{ messages }}", ["tools", "thinking", "output_config.effort"]),
        ("{{ tools }} {{ enable_thinking }} {{ reasoning_effort }}", []),
        ("{{ tools }} {{ thinking }}", ["output_config.effort"]),
    ],
)
def test_fields_that_a_template_does_not_read_are_known(template: str, unread: list[str]) -> None:
    given = body(tools=[TOOL], thinking={"type": "adaptive"}, output_config={"effort": "max"})
    assert given.unread(template) == unread
    assert body().unread(template) == []
