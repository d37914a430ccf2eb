"""Bodies of requests for a response: what is refused and in which words, and the chat that they come down to."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest
from openai.types.responses import ResponseIncludable, ResponseTextConfigParam
from openai.types.responses.response_create_params import StreamOptions
from openai.types.shared_params import Reasoning as ReasoningParam

from app.api.fields import Limits
from app.api.parse import parse, unknown_fields
from app.api.protocol import Body, ChatBody
from app.api.response_body import Reasoning, ResponseBody, ResponseStreamOptions, TextOptions
from app.errors import InvalidRequest
from app.request import SamplingParams
from app.service import Ask

DEFAULT = SamplingParams(temperature=0.6, top_p=0.9)
LIMITS = Limits(vocab_size=100)
FLAT = {"type": "function", "name": "add", "parameters": {"type": "object", "properties": {}}, "strict": True}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
LOGPROBS = "message.output_text.logprobs"


def body(**fields: Any) -> ResponseBody:
    return parse(ResponseBody, {"input": "hi", **fields})


def ask(**fields: Any) -> Ask:
    return body(**fields).ask(DEFAULT, LIMITS)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"input": None}, "input: is required"),
        ({"max_output_tokens": 0}, "max_output_tokens: must be at least 1, got 0"),
        ({"temperature": 2.5}, "temperature: must be at most 2, got 2.5"),
        ({"instructions": ["x"]}, "instructions: must be a string"),
        ({"store": 1}, "store: must be true or false, got 1"),
        ({"metadata": {"a": 1}}, "metadata.a: must be a string, got 1"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a: "),
        ({"metadata": {f"{i}": "x" for i in range(17)}}, "metadata: must have at most 16 entries"),
        ({"include": ["file_search_call.results"]}, "include[0]: must be one of 'message.output_text.logprobs' or"),
        ({"top_logprobs": 3}, f"top_logprobs: needs {LOGPROBS} in include"),
        ({"top_logprobs": 21, "include": [LOGPROBS]}, "top_logprobs: must be at most 20, got 21"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort: must be one of 'none', 'minimal'"),
        ({"reasoning": {"context": "all_turns"}}, "reasoning.context: must be one of 'auto'"),
        ({"reasoning": {"mode": "pro"}}, "reasoning.mode: must be one of 'standard'"),
        ({"text": {"verbosity": "low"}}, "text.verbosity: must be one of 'medium'"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format.type: must be one of text, json_object, json_schema"),
        ({"text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema: is required"),
        ({"text": {"format": {"type": "json_schema", "schema": {}, "x": 1}}}, "text.format: 'x' is not known here"),
        ({"text": {"format": {"type": "json_schema", "schema": nested(300)}}}, "text.format.schema: must be an object"),
        ({"text": {"format": {"type": "json_schema", "schema": {"a": nested(300)}}}}, "text.format: the schema is"),
        ({"text": {"format": {"type": "json_object"}}, "tools": [FLAT]}, "text.format: leaves no way to call tools"),
        ({"tools": {}}, "tools: must be a list"),
        ({"tools": [5]}, "tools[0]: must be an object"),
        ({"tools": [FLAT, {"type": "web_search"}]}, "tools[1].type: only function tools are supported"),
        ({"tools": [{**FLAT, "name": "a b"}]}, "tools[0].name: must be 1 to "),
        ({"tools": [{**FLAT, "parameters": []}]}, "tools[0].parameters: must be an object"),
        ({"tools": [{**FLAT, "defer_loading": True}]}, "tools[0].defer_loading: is not supported by this server"),
        ({"tools": [{**FLAT, "parameters": {"a": nested(252)}}]}, "tools: is nested too deeply"),
        ({"tool_choice": "maybe"}, "tool_choice: "),
        ({"tool_choice": {"type": "web_search"}}, "tool_choice: "),
        ({"tool_choice": 5}, "tool_choice: "),
        (
            {"tool_choice": {"type": "function", "function": {"name": "look"}}},
            "tool_choice: a function must be named as ",
        ),
        ({"repetition_penalty": 1, "repeat_penalty": 2}, "repeat_penalty: differs from repetition_penalty"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        ask(**fields)
    assert str(caught.value).startswith(text)
    assert caught.value.param == text.partition(":")[0]


def test_absent_and_null_mean_the_model_s_defaults() -> None:
    nulls = {"temperature": None, "tools": None, "text": None, "reasoning": None, "max_output_tokens": None}
    for given in (body(), body(**nulls)):
        asked = given.ask(DEFAULT, LIMITS)
        assert (asked.sampling.temperature, asked.sampling.top_p) == (0.6, 0.9)
        assert (asked.max_tokens, asked.tools, asked.shape, asked.sampling.num_logprobs) == (None, (), None, None)
        assert (given.store, given.stream, given.chat.template) == (True, False, {})


def test_what_chat_has_under_the_same_name_is_handed_on() -> None:
    asked = ask(temperature=0.1, top_p=0.5, top_k=3, seed=7, stop="x", cache_salt="s", priority=2, cache_prompt=False)
    sampling = asked.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.1, 0.5, 3, 7)
    assert (asked.stop, asked.cache_salt, asked.priority, asked.use_prefix_cache, asked.n) == (("x",), "s", 2, False, 1)


def test_limits_and_log_probabilities() -> None:
    asked = ask(max_output_tokens=5, include=[LOGPROBS], top_logprobs=2)
    assert (asked.max_tokens, asked.sampling.num_logprobs) == (5, 2)
    assert ask(include=[LOGPROBS]).sampling.num_logprobs == 0
    assert ask(top_logprobs=0).sampling.num_logprobs is None


def test_flat_functions_are_those_of_chat() -> None:
    given = body(tools=[{**FLAT, "description": None, "defer_loading": False}], parallel_tool_calls=False)
    (tool,) = given.chat.tools
    assert tool["type"] == "function"
    assert tool["function"] == {"name": "add", "parameters": FLAT["parameters"], "strict": True}
    asked = given.ask(DEFAULT, LIMITS)
    assert (asked.tools, asked.many_calls) == ((tool,), False)
    assert given.chat.template == {"tools": [tool]}
    assert ask(tools=[FLAT], tool_choice="none").tools == ()


ADD = {"name": "add"}


@pytest.mark.parametrize(
    ("flat", "choice"),
    [
        ("required", "required"),
        ({"type": "function", **ADD}, {"type": "function", "function": ADD}),
        ({"type": "function", "name": "sub"}, {"type": "function", "function": {"name": "sub"}}),
        (
            {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", **ADD}]},
            {
                "type": "allowed_tools",
                "allowed_tools": {"mode": "auto", "tools": [{"type": "function", "function": ADD}]},
            },
        ),
        ({"type": "allowed_tools", "tools": "all"}, {"type": "allowed_tools", "allowed_tools": {"tools": "all"}}),
        ({"type": "custom", **ADD}, {"type": "custom", **ADD}),
    ],
)
def test_a_flat_choice_of_tools_is_honoured_or_refused_as_in_chat(flat: Any, choice: Any) -> None:
    nested_tool = {"type": "function", "function": {name: value for name, value in FLAT.items() if name != "type"}}

    def outcome(kind: Any, **fields: Any) -> Any:
        try:
            return parse(kind, {"seed": 1, **fields}).ask(DEFAULT, LIMITS)
        except InvalidRequest as error:
            return str(error), error.param

    messages = [{"role": "user", "content": "hi"}]
    assert outcome(ResponseBody, input="hi", tools=[FLAT], tool_choice=flat) == outcome(
        ChatBody, messages=messages, tools=[nested_tool], tool_choice=choice
    )


def test_a_format_is_the_shape_that_chat_makes_of_it() -> None:
    shape = ask(text={"format": {"type": "json_schema", "name": "a", "strict": True, "schema": SCHEMA}}).shape
    assert shape is not None
    assert '"integer"' in shape.source
    loose = ask(text={"format": {"type": "json_object"}}).shape
    assert loose is not None
    assert loose.source == '{"type":"object"}'
    assert ask(text={"format": {"type": "text"}, "verbosity": "medium"}).shape is None


def test_effort_goes_to_the_template_and_is_named_where_it_has_no_place() -> None:
    given = body(reasoning={"effort": "none", "summary": "auto"}, tools=[FLAT])
    assert given.chat.template["reasoning_effort"] == "none"
    assert given.chat.template["enable_thinking"] is False
    assert given.unread("{{ messages }}") == ["tools", "reasoning.effort"]
    assert given.unread("{{ tools }}{{ enable_thinking }}") == []


def test_unknown_fields_are_named_also_inside_of_others() -> None:
    value = {"input": "x", "flab": 1, "text": {"x": 1}, "reasoning": {"effort": "low", "y": 1}, "stop": "x"}
    assert unknown_fields(ResponseBody, value) == ["flab", "text.x", "reasoning.y"]


@pytest.mark.parametrize(
    ("part", "params"),
    [(TextOptions, ResponseTextConfigParam), (Reasoning, ReasoningParam), (ResponseStreamOptions, StreamOptions)],
)
def test_parts_are_those_of_the_openai_package(part: type[Body], params: type) -> None:
    assert get_type_hints(params).keys() == part.model_fields.keys()


def test_every_include_of_the_openai_package_is_taken_or_refused_by_name() -> None:
    taken = {LOGPROBS, "reasoning.encrypted_content"}
    assert taken < set(get_args(ResponseIncludable))
    assert body(include=sorted(taken)).wants_logprobs
    for value in set(get_args(ResponseIncludable)) - taken:
        with pytest.raises(InvalidRequest, match=r"^include\[1\]: must be one of"):
            body(include=[LOGPROBS, value])
