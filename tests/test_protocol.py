"""Request bodies: what is refused and in which words, what is let through, and what the service is asked."""

from __future__ import annotations

import contextlib
from typing import get_args, get_type_hints

import orjson
import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import ChatCompletionStreamOptionsParam
from openai.types.chat import completion_create_params as chat_completion_params
from openai.types.responses import response_create_params as response_params
from openai.types.shared_params import ReasoningEffort

from app.api.fields import Limits
from app.api.llama_protocol import InfillBody, LlamaBody
from app.api.message_body import CountBody, MessageBody
from app.api.parse import parse, unknown_fields
from app.api.protocol import ChatBody, CompletionBody, Generation, ModelBody, StreamOptions
from app.api.response_body import ResponseBody
from app.api.tokenizer_body import DetokenizeBody, TemplateBody, TokenizeBody
from app.errors import InvalidRequest
from app.request import SamplingParams
from app.service import Ask
from ops.api_page import BEGIN, END, PAGE, TABLES, fate, render_page

DEFAULT = SamplingParams(temperature=0.6, top_p=0.9)
LIMITS = Limits(vocab_size=100)
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def tool(**fields: object) -> dict[str, object]:
    return {"type": "function", "function": {"name": "f", **fields}}


def chat(**fields: object) -> ChatBody:
    return parse(ChatBody, {"messages": [{"role": "user", "content": "hi"}], **fields})


def ask(**fields: object) -> Ask:
    return chat(**fields).ask(DEFAULT, LIMITS)


def complete(**fields: object) -> CompletionBody:
    return parse(CompletionBody, {"prompt": "hi", **fields})


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"max_tokens": -950}, "max_tokens: must be at least 1, got -950"),
        ({"max_tokens": 0}, "max_tokens: must be at least 1, got 0"),
        ({"max_tokens": True}, "max_tokens: must be an integer"),
        ({"max_tokens": "5"}, "max_tokens: must be an integer"),
        ({"max_tokens": 1.0}, "max_tokens: must be an integer, got 1.0"),
        ({"max_completion_tokens": 0}, "max_completion_tokens: must be at least 1, got 0"),
        ({"temperature": -1}, "temperature: must be at least 0, got -1"),
        ({"temperature": 2.5}, "temperature: must be at most 2, got 2.5"),
        ({"temperature": True}, "temperature: must be a number"),
        ({"temperature": float("inf")}, "temperature: must be a finite number, got inf"),
        ({"top_p": 0}, "top_p: must be greater than 0, got 0"),
        ({"top_p": 1.01}, "top_p: must be at most 1, got 1.01"),
        ({"top_k": -2}, "top_k: must be at least -1, got -2"),
        ({"min_p": 1.5}, "min_p: must be at most 1, got 1.5"),
        ({"seed": 2**64}, "seed: must be less than 18446744073709551616, got 18446744073709551616"),
        ({"repetition_penalty": 0}, "repetition_penalty: must be at least 0.01, got 0"),
        ({"repeat_penalty": 0}, "repeat_penalty: must be at least 0.01, got 0"),
        ({"presence_penalty": 2.1}, "presence_penalty: must be at most 2, got 2.1"),
        ({"frequency_penalty": -2.1}, "frequency_penalty: must be at least -2, got -2.1"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1: must be at most 100, got 101"),
        ({"logit_bias": []}, "logit_bias: must be an object"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias: must have at most 1024 entries"),
        ({"stop": ""}, "stop[0]: must not be empty"),
        ({"stop": ["a", ""]}, "stop[1]: must not be empty"),
        ({"stop": ["a"] * 17}, "stop: must have at most 16 entries"),
        ({"n": 0}, "n: must be at least 1, got 0"),
        ({"n": 129}, "n: must be at most 128, got 129"),
        ({"logprobs": 1}, "logprobs: must be true or false, got 1"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs: must be at most 20, got 21"),
        ({"stream": "yes"}, "stream: must be true or false"),
        ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage: must be true or false, got 1"),
        ({"model": 5}, "model: must be a string, got 5"),
        ({"tools": {}}, "tools: must be a list"),
        ({"tools": [[]]}, "tools[0]: must be an object"),
        ({"tools": [TOOL, {"type": "custom"}]}, "tools[1].type: only function tools are supported"),
        ({"tools": [{"type": "function"}]}, "tools[0].function: must be an object"),
        ({"tools": [tool(name=None)]}, "tools[0].function.name: must be 1 to 128 letters, digits, and any of _ . -"),
        ({"tools": [tool(name="a b")]}, "tools[0].function.name: must be 1 to 128 letters, digits, and any of _ . -"),
        ({"tools": [tool(parameters=[])]}, "tools[0].function.parameters: must be an object"),
        ({"tools": [tool(description=1)]}, "tools[0].function.description: must be a string"),
        ({"parallel_tool_calls": 1}, "parallel_tool_calls: must be true or false, got 1"),
        (
            {"reasoning_effort": "much"},
            "reasoning_effort: must be one of 'none', 'minimal', 'low', 'medium', 'high', 'xhigh' or 'max'",
        ),
        ({"priority": 2**31}, "priority: must be less than 2147483648, got 2147483648"),
        ({"moderation": {"model": "x"}}, "moderation: this value is not supported by this server"),
        ({"functions": [{}]}, "functions: this value is not supported by this server"),
        ({"modalities": ["text", "audio"]}, "modalities: this value is not supported by this server"),
        ({"audio": {"voice": "x"}}, "audio: this value is not supported by this server"),
        ({"store": True}, "store: this value is not supported by this server"),
        ({"store": 0}, "store: this value is not supported by this server"),
    ],
)
def test_a_wrong_value_is_refused_in_plain_words(fields: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert str(caught.value) == text
    assert caught.value.param == text.partition(":")[0]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"repetition_penalty": 1.1, "repeat_penalty": 1.2}, "repeat_penalty"),
        ({"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}, "reasoning_effort"),
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 0},
        {"echo": True, "logprobs": 0},
        {"echo": 1},
        {"suffix": "x"},
        {"best_of": 3, "n": 2},
        {"logprobs": 21},
        {"logprobs": True},
    ],
)
def test_text_completions_refuse_what_they_do_not_do(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidRequest) as caught:
        complete(**fields)
    assert caught.value.param == next(iter(fields))


@pytest.mark.parametrize("fields", [{"echo": False}, {"suffix": ""}, {"best_of": 1, "n": 2}, {"best_of": 2, "n": 2}])
def test_a_value_that_asks_for_nothing_is_fine(fields: dict[str, object]) -> None:
    complete(**fields)


def test_null_is_absent_for_every_optional_field() -> None:
    names = ChatBody.known_fields() - {"messages", "seed"}
    assert ask(**dict.fromkeys(names), seed=1) == ask(seed=1)
    assert not chat(stream_options={"include_usage": None}).wants_usage


def test_absent_sampling_fields_come_from_the_model() -> None:
    sampling = ask(seed=7).sampling
    assert sampling == SamplingParams(temperature=0.6, top_p=0.9, seed=7)


def test_zero_and_neutral_values_are_not_taken_for_absent() -> None:
    sampling = ask(temperature=0, top_p=1, min_p=0.0, presence_penalty=0, seed=0).sampling
    assert (sampling.temperature, sampling.top_p, sampling.seed) == (0, 1, 0)


def test_the_ask_carries_every_field() -> None:
    made = ask(
        temperature=1,
        top_k=5,
        min_p=0.1,
        seed=-1,
        repeat_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias={"7": -100, "0": 2},
        logprobs=True,
        top_logprobs=2,
        stop="END",
        n=3,
        max_completion_tokens=9,
        ignore_eos=True,
        cache_prompt=False,
        priority=-4,
    )
    assert made == Ask(
        sampling=SamplingParams(
            temperature=1.0,
            top_p=0.9,
            top_k=5,
            min_p=0.1,
            seed=2**63 - 1,
            repetition_penalty=1.2,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            logit_bias=((7, -100.0), (0, 2.0)),
            num_logprobs=2,
        ),
        max_tokens=9,
        stop=("END",),
        n=3,
        priority=-4,
        use_prefix_cache=False,
        ignore_eos=True,
    )


def test_without_a_seed_each_request_draws_its_own() -> None:
    seeds = {ask().sampling.seed for _ in range(8)}
    assert len(seeds) == 8
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize(("given", "meant"), [(-1, 0), (0, 0), (99, 99), (100, 0), (10**6, 0)])
def test_top_k_of_the_whole_vocabulary_is_off(given: int, meant: int) -> None:
    assert ask(top_k=given).sampling.top_k == meant


@pytest.mark.parametrize("key", ["100", "9191222", "-1", "x", "", "\u0663", "1.0", "9" * 30])
def test_logit_bias_names_the_id_that_is_no_token(key: str) -> None:
    with pytest.raises(InvalidRequest, match="logit_bias") as caught:
        ask(logit_bias={"5": 1, key: 1})
    assert repr(key) in str(caught.value)


@pytest.mark.parametrize(
    ("logprobs", "top", "meant"), [(True, None, 0), (True, 20, 20), (False, None, None), (None, None, None)]
)
def test_chat_logprobs(logprobs: bool | None, top: int | None, meant: int | None) -> None:
    assert ask(logprobs=logprobs, top_logprobs=top).sampling.num_logprobs == meant


def test_text_completions_have_their_own_defaults() -> None:
    assert complete().ask(DEFAULT, LIMITS).max_tokens == 16
    assert ask().max_tokens is None
    assert complete(logprobs=0).ask(DEFAULT, LIMITS).sampling.num_logprobs == 0


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("", [""]),
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1], [2, 3]], [[1], [2, 3]]),
    ],
)
def test_prompt_shapes(prompt: object, prompts: list[object]) -> None:
    assert complete(prompt=prompt).prompt == prompts


@pytest.mark.parametrize("prompt", [[], [[]], [1, "a"], [True], {}, 5, [[1], []], [None], [1.0], None])
def test_a_prompt_of_no_known_shape_is_refused(prompt: object) -> None:
    with pytest.raises(InvalidRequest) as caught:
        complete(prompt=prompt)
    assert caught.value.param == "prompt"


@pytest.mark.parametrize("token", [100, -1, 5279552648203111001])
def test_prompt_ids_must_be_in_the_vocabulary(token: int) -> None:
    with pytest.raises(InvalidRequest, match=str(token)):
        complete(prompt=[1, token]).ask(DEFAULT, LIMITS)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ("string", "messages"),
        ([], "messages"),
        (None, "messages"),
        (["x"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": 123, "content": "x"}], "messages[0].role"),
        ([{"role": "wizard", "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "assistant", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": ["x"]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0].type"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": "x"}, {"role": "user", "content": "x", "name": 3}], "messages[1].name"),
        ([{"role": "assistant", "tool_calls": "x"}], "messages[0].tool_calls"),
        ([{"role": "assistant", "tool_calls": ["x"]}], "messages[0].tool_calls"),
    ],
)
def test_bad_messages_are_refused_by_place(messages: object, param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(messages=messages)
    assert caught.value.param == param


def test_null_content_beside_tool_calls_becomes_empty_text() -> None:
    call = {"type": "function", "id": "1", "function": {"name": "f", "arguments": "{}"}}
    given = [{"role": "assistant", "content": None, "refusal": None, "tool_calls": [call]}]
    assert chat(messages=given).messages == [{"role": "assistant", "content": "", "tool_calls": [call]}]


def test_tools_and_template_options_reach_the_template() -> None:
    given = chat(tools=[TOOL], chat_template_kwargs={"a": 1})
    assert given.template == {"tools": [TOOL], "a": 1}
    assert given.ask(DEFAULT, LIMITS).tools == (TOOL,)
    assert chat(tools=[]).template == {}


def test_tools_that_may_not_be_called_are_neither_shown_nor_read() -> None:
    given = chat(tools=[TOOL], tool_choice="none")
    assert (given.template, given.ask(DEFAULT, LIMITS).tools) == ({}, ())


def test_null_members_of_a_function_are_absent() -> None:
    given = chat(tools=[tool(parameters=None, strict=None, description=None)])
    assert given.tools == [{"type": "function", "function": {"name": "f"}}]


def test_one_call_at_a_time_reaches_the_service() -> None:
    assert ask().many_calls
    assert not ask(parallel_tool_calls=False).many_calls


@pytest.mark.parametrize(
    ("fields", "template"),
    [
        ({"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
        ({"reasoning_effort": "none"}, {"reasoning_effort": "none", "enable_thinking": False}),
        (
            {"reasoning_effort": "none", "chat_template_kwargs": {"enable_thinking": True}},
            {"reasoning_effort": "none", "enable_thinking": True},
        ),
        ({"reasoning_effort": None}, {}),
    ],
)
def test_reasoning_effort_is_an_option_of_the_template(fields: dict[str, object], template: dict[str, object]) -> None:
    assert chat(**fields).template == template


@pytest.mark.parametrize(
    ("fields", "template", "unread"),
    [
        ({"tools": [TOOL]}, "{{ messages }}", ["tools"]),
        ({"tools": [TOOL]}, "{{ tools }}", []),
        ({"tools": [TOOL], "reasoning_effort": "low"}, "", []),
        ({"tools": [TOOL], "tool_choice": "none"}, "{{ messages }}", []),
        ({"reasoning_effort": "low"}, "{{ enable_thinking }}", ["reasoning_effort"]),
        ({"reasoning_effort": "none"}, "{{ enable_thinking }}", []),
        ({"reasoning_effort": "low"}, "{{ reasoning_effort }}", []),
        ({"tools": [TOOL], "reasoning_effort": "none"}, "{{ messages }}", ["tools", "reasoning_effort"]),
        ({"tools": [TOOL], "tool_choice": "required"}, "{{ messages }}", []),
        ({}, "{{ messages }}", []),
    ],
)
def test_a_field_is_unread_where_the_template_has_no_place_for_it(
    fields: dict[str, object], template: str, unread: list[str]
) -> None:
    assert chat(**fields).unread(template) == unread


def test_unknown_fields_are_named_in_a_form_fit_for_a_header() -> None:
    inert = dict.fromkeys(["user", "metadata", "service_tier", "reasoning_effort", "parallel_tool_calls"], 1)
    assert unknown_fields(ChatBody, {**inert, "flab": 10, "store": False, "messages": []}) == ["flab"]
    assert unknown_fields(ChatBody, {"stream_options": {"zap": 1, "include_usage": True}}) == ["stream_options.zap"]
    assert unknown_fields(ChatBody, {"a\r\nSet-Cookie: é,b": 1}) == ["a??Set-Cookie:??" + "?b"]
    many = unknown_fields(ChatBody, {"x" * 1000 + str(i): 1 for i in range(500)})
    assert len(many) == 20
    assert {len(name) for name in many} == {64}


def test_tokenize_takes_either_name() -> None:
    assert parse(TokenizeBody, {"prompt": "a"}).text == "a"
    assert parse(TokenizeBody, {"content": "", "prompt": "a"}).text == ""
    with pytest.raises(InvalidRequest, match="content: is required"):
        parse(TokenizeBody, {"content": None})


def test_token_ids_are_integers() -> None:
    with pytest.raises(InvalidRequest, match=r"tokens\[1\]: must be an integer"):
        parse(DetokenizeBody, {"tokens": [1, True]})


@pytest.mark.parametrize(
    ("kind", "params"),
    [
        (ChatBody, chat_completion_params.CompletionCreateParamsNonStreaming),
        (ChatBody, chat_completion_params.CompletionCreateParamsStreaming),
        (CompletionBody, completion_params.CompletionCreateParamsNonStreaming),
        (CompletionBody, completion_params.CompletionCreateParamsStreaming),
        (ResponseBody, response_params.ResponseCreateParamsNonStreaming),
        (ResponseBody, response_params.ResponseCreateParamsStreaming),
    ],
)
def test_every_field_of_the_openai_package_is_honoured_inert_or_refused(kind: type[Generation], params: type) -> None:
    fields = get_type_hints(params)
    assert len(fields) > 15
    assert [name for name in fields if not fate(kind, name)] == []


def test_stream_options_are_those_of_the_openai_package() -> None:
    assert get_type_hints(ChatCompletionStreamOptionsParam).keys() == StreamOptions.model_fields.keys()


def test_every_effort_of_the_openai_package_is_taken() -> None:
    (efforts,) = (option for option in get_args(ReasoningEffort) if option is not type(None))
    assert [chat(reasoning_effort=effort).reasoning_effort for effort in get_args(efforts)] == list(get_args(efforts))


def test_the_tables_of_fields_are_up_to_date() -> None:
    page = PAGE.read_text()
    assert page == render_page(page), "run `make docs`"
    for name, columns in TABLES.items():
        assert page.count(BEGIN.format(name)) == page.count(END.format(name)) == 1
        table = page.partition(BEGIN.format(name))[2].partition(END.format(name))[0]
        for kind in columns.values():
            assert [field for field in sorted(kind.known_fields()) if f"\n| `{field}` |" not in table] == []


@pytest.mark.parametrize("kind", [kind for columns in TABLES.values() for kind in columns.values()])
def test_what_the_table_calls_refused_is_refused(kind: type[ModelBody]) -> None:
    values = {
        "messages": [{"role": "user", "content": "hi"}],
        "prompt": "hi",
        "input": "hi",
        "input_prefix": "a",
        "input_suffix": "b",
        "max_tokens": 5,
    }
    needed = {name: value for name, value in values.items() if name in kind.model_fields}
    refused = [name for name in kind.known_fields() if fate(kind, name).startswith("refused")]
    assert refused
    for name in refused:
        with pytest.raises(InvalidRequest) as caught:
            parse(kind, {**needed, name: {"some": "thing"}})
        assert caught.value.param == name
        for value in kind.neutral[name]:
            parse(kind, {**needed, name: value})
    for name in kind.inert:
        parse(kind, {**needed, name: {"some": "thing"}})


BODIES = (
    *(ChatBody, CompletionBody, ResponseBody, MessageBody, CountBody, LlamaBody, InfillBody),
    *(TokenizeBody, DetokenizeBody, TemplateBody),
)
WHOLE = {"messages": [{"role": "user", "content": "Hi"}], "prompt": "Hi", "input": "Hi", "content": "Hi", "tokens": [1]}
DEEP = (
    *(orjson.loads("[" * depth + "]" * depth) for depth in (300, 1000)),
    *(orjson.loads('{"a":' * depth + "1" + "}" * depth) for depth in (300, 1000)),
    orjson.loads('[{"type":' * 500 + "1" + "}]" * 500),
)


@pytest.mark.parametrize("deep", DEEP, ids=["lists", "deeper lists", "objects", "deeper objects", "both"])
@pytest.mark.parametrize("kind", BODIES, ids=lambda kind: kind.__name__)
def test_what_is_nested_deeply_is_taken_or_refused_in_every_field(kind: type[ModelBody], deep: object) -> None:
    for name in sorted(kind.known_fields()):
        for value in (deep, [deep], {"a": deep}):
            with contextlib.suppress(InvalidRequest):
                parse(kind, {**WHOLE, "max_tokens": 1, name: value})
