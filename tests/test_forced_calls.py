"""Calls that `tool_choice` forces, over HTTP: of models that say what is written down, of random weights, and real."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jsonschema
import openai
import pytest

from tests.serving import ServerProcess, serving
from tests.spoken import HERMES, QWEN, TOOLS, Control
from tests.talking import tokens_of
from tests.test_call_form import WRITTEN
from tests.test_live import CHAT, answer, text_of
from tests.test_reader import spelled
from tests.test_structured import SCHEMAS
from tests.test_tool_calls import both, streamed, whole
from tests.test_tool_choice import allowed, named

ADD, GET = ("function", "add", '{"a": 2}'), ("function", "get.it", "{}")
EVERY = pytest.mark.parametrize("family", WRITTEN)
ASK = {"messages": [{"role": "user", "content": "Use a tool."}], "max_tokens": 400}


@EVERY
def test_a_forced_call_is_a_call_like_any_other(family: str) -> None:
    """Whole and streamed. The player would be stopped where the grammar did not let it go on."""
    dialect, first, second = WRITTEN[family]
    calls = [ADD, GET] if second else [ADD]
    got = both(dialect, (*first, *second), tools=list(TOOLS), tool_choice="required")
    assert got == ("", "", calls, "tool_calls")


@EVERY
def test_a_named_function_is_called_once(family: str) -> None:
    dialect, first, _ = WRITTEN[family.removesuffix("-two")]
    got = both(dialect, first, tools=list(TOOLS), tool_choice=named("add"))
    assert got == ("", "", [ADD], "tool_calls")


@EVERY
def test_a_forced_call_that_is_cut_off_is_text_and_length(family: str) -> None:
    dialect, first, second = WRITTEN[family]
    count = len(tokens_of((*first, *second)))
    for max_tokens in (count - 1, len(tokens_of(first)) // 2, 1):
        _, _, calls, reason = both(
            dialect, (*first, *second), tools=list(TOOLS), tool_choice="required", max_tokens=max_tokens
        )
        assert reason == "length"
        assert calls in ([], [ADD])  # a call whose end is marked was complete
        assert calls == [] or max_tokens > len(tokens_of(first))


def test_a_prompt_that_has_begun_to_reason_does_not_hide_the_call() -> None:
    _, first, _ = WRITTEN["qwen"]
    ending = {"chat_template_kwargs": {"ending": "<think>\n"}}
    got = both(QWEN, first, tools=list(TOOLS), tool_choice="required", extra_body=ending)
    assert got == ("", "", [ADD], "tool_calls")


def test_marks_in_the_arguments_are_text_of_theirs() -> None:
    for family in ("qwen", "llama", "mistral", "mistral-new", "gpt-oss", "none"):
        dialect, first, _ = WRITTEN[family]
        arguments = '{"b": "</tool_call> <tool_call>[TOOL_CALLS]add[ARGS]{} <|call|>\\n</tool_call>"}'
        said = [piece if isinstance(piece, Control) else piece.replace('{"a": 2}', arguments) for piece in first]
        got = both(dialect, spelled(said), tools=list(TOOLS), tool_choice="required")
        assert got == ("", "", [("function", "add", arguments)], "tool_calls")


def test_only_an_allowed_function_is_taken_for_called() -> None:
    _, first, second = WRITTEN["hermes"]
    for choice, forced in ((allowed("auto", "get.it"), False), (allowed("required", "get.it"), True)):
        said = [piece.lstrip() for piece in second] if forced else (*first, *second)
        text, _, calls, reason = both(HERMES, said, tools=list(TOOLS), tool_choice=choice)
        assert (calls, reason) == ([GET], "tool_calls")
        assert text == ("" if forced else "".join(first))


def tool(name: str, parameters: dict[str, Any] | None, **more: Any) -> dict[str, Any]:
    given = {} if parameters is None else {"parameters": parameters}
    return {"type": "function", "function": {"name": name, **given, **more}}


def thing(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}


OFFERED = {
    "town": thing(
        **{name: SCHEMAS[name] for name in ("enum", "integer", "pattern", "date", "text", "tuple", "nested")}
    ),
    "get.list": thing(array=SCHEMAS["array"], choice=SCHEMAS["choice"]),
    "get": {"$defs": SCHEMAS["recursive"]["$defs"], "$ref": "#/$defs/node"},
    "nothing": None,
}
OFFER = [tool(name, parameters, strict=True, description="Does things.") for name, parameters in OFFERED.items()]


def check(calls: list[Any]) -> None:
    for call in calls:
        arguments = json.loads(call["function"]["arguments"])
        jsonschema.validate(arguments, OFFERED[call["function"]["name"]] or {"const": {}})
        assert call["id"].startswith("call_")


@pytest.fixture(scope="module")
def random(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A model of random weights, whose calls are valid because it can say nothing else."""
    folder = tmp_path_factory.mktemp("server")
    more = {"N_PARALLEL": "8", "SDPA_DETERMINISTIC": "true", "BLAS_THREADS": "1", "DRAFT_KIND": "prompt-lookup"}
    with serving(folder, MODEL=str(tiny_model_dir), CACHE_DIR=str(folder), **more) as process:
        yield process


@pytest.mark.parametrize("choice", ["required", *map(named, OFFERED), allowed("required", "get", "nothing")])
def test_random_calls_are_valid(random: ServerProcess, choice: Any) -> None:
    body = answer(random, CHAT, ASK | {"tools": OFFER, "tool_choice": choice, "n": 6, "seed": 1})
    reasons = [each["finish_reason"] for each in body["choices"]]
    assert "tool_calls" in reasons
    for each in body["choices"]:
        calls = each["message"].get("tool_calls", [])
        check(calls)
        assert len(calls) == (each["finish_reason"] == "tool_calls")
        assert (each["message"]["content"] is None) == bool(calls)


def test_forced_and_free_answers_side_by_side(random: ServerProcess) -> None:
    """The free ones are what they are alone."""
    plain = ASK | {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "cache_prompt": False}
    before = text_of(answer(random, CHAT, plain))

    def ask(index: int) -> str:
        if index % 4 == 1:
            body = answer(random, CHAT, ASK | {"tools": OFFER, "tool_choice": named("get"), "seed": index})
            check(body["choices"][0]["message"].get("tool_calls", []))
            return ""
        return text_of(answer(random, CHAT, plain))

    with ThreadPoolExecutor(8) as clients:
        together = list(clients.map(ask, range(8)))
    assert together == ["" if index % 4 == 1 else before for index in range(8)]


@pytest.mark.parametrize("stream", [False, True])
def test_parameters_that_cannot_be_kept_to_are_a_400_that_names_the_tool(random: ServerProcess, stream: bool) -> None:
    bad = {"type": "object", "properties": {"a": {"not": {"type": "string"}}}}
    body = ASK | {"tools": [*OFFER, tool("odd", bad)], "stream": stream}
    response = random.post(CHAT, body | {"tool_choice": "required"})
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["message"].startswith("tools: odd: Unimplemented keys")
    assert (error["type"], error["param"]) == ("invalid_request_error", "tools")
    assert random.post(CHAT, body | {"tool_choice": named("nothing")}).status_code == 200
    assert random.post(CHAT, body | {"max_tokens": 1}).status_code == 200


WEATHER = tool(
    "get_weather",
    thing(city={"type": "string", "pattern": "^[A-Z][a-z]{2,12}$"}, unit={"enum": ["celsius", "fahrenheit"]}),
    strict=True,
)
QUESTION = [
    {"role": "system", "content": "To look up the weather, answer with the name of the function and its arguments."},
    {"role": "user", "content": "What is the weather like in Paris, in celsius?"},
]


def test_the_embedded_model_is_forced_to_call_with_the_openai_client(server: ServerProcess) -> None:
    """Its template has no place for tools, and it has never learned to call any."""
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    given: dict[str, Any] = {"model": server.http.get("/v1/models").json()["data"][0]["id"], "messages": QUESTION}
    given |= {"tools": [WEATHER, tool("nothing", None)], "temperature": 0, "max_tokens": 100}
    for choice in ("required", named("get_weather"), allowed("required", "get_weather")):
        done = client.chat.completions.create(**given, tool_choice=choice)
        text, _, ((_, name, arguments),), reason, _ = whole(done)
        assert (text, reason) == ("", "tool_calls")
        if choice != "required" or name == "get_weather":
            jsonschema.validate(json.loads(arguments), WEATHER["function"]["parameters"])
        usage = {"stream": True, "stream_options": {"include_usage": True}}
        assert streamed(list(client.chat.completions.create(**given, tool_choice=choice, **usage))) == whole(done)
    with pytest.raises(openai.BadRequestError, match="'fly' is not among the tools"):
        client.chat.completions.create(**given, tool_choice=named("fly"))
    short = client.chat.completions.create(**(given | {"max_tokens": 5}), tool_choice="required")
    assert (short.choices[0].finish_reason, short.choices[0].message.tool_calls) == ("length", None)
    headers = server.post(CHAT, given | {"tool_choice": "required"}).headers
    assert "x-mlxcel-ignored-fields" not in headers
