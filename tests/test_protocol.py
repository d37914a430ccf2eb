"""Request bodies: what is refused and in which words, what is let through, and what the service is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.api.fields import INERT, NEUTRAL, Limits
from app.api.parse import parse, unknown_fields
from app.api.protocol import ChatBody, CompletionBody, DetokenizeBody, TokenizeBody
from app.errors import InvalidRequest
from app.request import SamplingParams
from app.service import Ask

DEFAULT = SamplingParams(temperature=0.6, top_p=0.9)
LIMITS = Limits(vocab_size=100)


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
        ({"tools": [[]]}, "tools[0]: must be an object"),
        ({"priority": 2**31}, "priority: must be less than 2147483648, got 2147483648"),
        ({"tool_choice": "required"}, "tool_choice: this value is not supported by this server"),
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
    ],
)
def test_fields_that_contradict_each_other_are_refused(fields: dict[str, object], param: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        chat(**fields)
    assert caught.value.param == param


@pytest.mark.parametrize(
    "fields",
    [{"max_tokens": 0}, {"echo": True}, {"suffix": "x"}, {"best_of": 3, "n": 2}, {"logprobs": 21}, {"logprobs": True}],
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
    tools = [{"type": "function"}]
    assert chat(tools=tools, chat_template_kwargs={"a": 1}).template == {"tools": tools, "a": 1}
    assert chat(tools=tools, tool_choice="none").template == {}
    assert chat(tools=[]).template == {}


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


def test_the_api_page_names_every_field() -> None:
    page = (Path(__file__).parent.parent / "docs" / "api.md").read_text()
    known = {*ChatBody.model_fields, *CompletionBody.model_fields, *INERT, *NEUTRAL["chat"], *NEUTRAL["completion"]}
    assert [name for name in sorted(known) if f"`{name}`" not in page] == []
