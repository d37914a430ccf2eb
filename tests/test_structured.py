"""Answers in a given shape from running servers, as clients ask for them: always valid, and in nobody's way."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import openai
import pytest
from pydantic import BaseModel

from tests.serving import ServerProcess, serving
from tests.test_live import CHAT, TEXT, answer, events, num_busy, num_live_blocks, streamed_text, text_of, wait_until

ASK = {"messages": [{"role": "user", "content": "Tell me about a town."}], "max_tokens": 300}
SCHEMAS: dict[str, dict[str, Any]] = {
    "enum": {"enum": ["red", "green", 7, None, {"a": 1}]},
    "integer": {"type": "integer", "minimum": -5, "maximum": 1234},
    "number": {"type": "number", "minimum": 0, "exclusiveMaximum": 1},
    "pattern": {"type": "string", "pattern": "^[a-z]{2,4}-[0-9]{2}$"},
    "date": {"type": "string", "format": "date"},
    "text": {"type": "string", "minLength": 3, "maxLength": 6},
    "array": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 4},
    "tuple": {"type": "array", "prefixItems": [{"const": "a"}, {"type": "integer", "maximum": 99}], "items": False},
    "choice": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2}]},
    "nested": {
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 8},
            "place": {
                "type": "object",
                "properties": {"x": {"type": "integer", "maximum": 99}, "unit": {"enum": ["m", "km"]}},
                "required": ["x", "unit"],
                "additionalProperties": False,
            },
        },
        "required": ["name", "place"],
        "additionalProperties": False,
    },
    "recursive": {
        "$defs": {
            "node": {
                "type": "object",
                "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
                "required": ["next"],
                "additionalProperties": False,
            }
        },
        "$ref": "#/$defs/node",
    },
}


@pytest.fixture(scope="module")
def tiny(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A model of random weights, which has no notion of JSON: what it says is valid because it can say nothing else. It
    is deterministic, so that a difference would be the shape's doing and not that of the company."""
    folder = tmp_path_factory.mktemp("server")
    more = {"N_PARALLEL": "8", "SDPA_DETERMINISTIC": "true", "BLAS_THREADS": "1", "DRAFT_KIND": "prompt-lookup"}
    with serving(folder, MODEL=str(tiny_model_dir), CACHE_DIR=str(folder), **more) as process:
        yield process


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}}


def check(schema: dict[str, Any], text: str, reason: str) -> None:
    """Valid if it came to its end; else the reason says that it did not, and it is the beginning of something."""
    if reason == "stop":
        jsonschema.validate(json.loads(text), schema)
    else:
        assert reason == "length"


@pytest.mark.parametrize("name", SCHEMAS)
def test_whole_and_streamed_answers_are_valid(tiny: ServerProcess, name: str) -> None:
    schema = SCHEMAS[name]
    body = answer(tiny, CHAT, ASK | strict(schema) | {"n": 4, "seed": 1})
    for choice in body["choices"]:
        check(schema, choice["message"]["content"], choice["finish_reason"])
    assert "stop" in {choice["finish_reason"] for choice in body["choices"]}
    chunks = events(tiny, CHAT, ASK | strict(schema) | {"seed": 1})
    assert streamed_text(chunks) == text_of(body)
    text = answer(tiny, TEXT, {"prompt": ["a", "b"], "max_tokens": 300, "seed": 2, **strict(schema)})
    for choice in text["choices"]:
        check(schema, choice["text"], choice["finish_reason"])


def test_json_object(tiny: ServerProcess) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 9}}, "additionalProperties": False}
    body = answer(tiny, CHAT, ASK | {"n": 4, "response_format": {"type": "json_object"}, "temperature": 1.5})
    for choice in body["choices"]:
        assert choice["message"]["content"].startswith("{")
        check({"type": "object"}, choice["message"]["content"], choice["finish_reason"])
    body = answer(tiny, CHAT, ASK | {"response_format": {"type": "json_object", "schema": schema}})
    check(schema, text_of(body), "stop")


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"grammar": 'root ::= ("yes" | "no") [0-9]+ "."'}, r"(yes|no)[0-9]+\."),
        ({"grammar": "start: /[a-c]{3}-[0-9]{2}/"}, r"[a-c]{3}-[0-9]{2}"),
        ({"json_schema": {"const": [1, "x"]}}, r'\[\s*1\s*,\s*"x"\s*\]'),
    ],
)
def test_the_fields_of_llama_server(tiny: ServerProcess, fields: dict[str, Any], pattern: str) -> None:
    for path, ask in ((CHAT, ASK), (TEXT, {"prompt": "Well", "max_tokens": 300})):
        body = answer(tiny, path, ask | fields | {"seed": 5})
        if body["choices"][0]["finish_reason"] == "stop":
            assert re.fullmatch(pattern, text_of(body))
        else:
            assert re.fullmatch(r"(yes|no)[0-9]+", text_of(body))


def test_text_and_null_ask_for_nothing(tiny: ServerProcess) -> None:
    plain = ASK | {"temperature": 0, "max_tokens": 8}
    want = text_of(answer(tiny, CHAT, plain))
    nothing = {"response_format": {"type": "text"}, "json_schema": None, "grammar": ""}
    assert text_of(answer(tiny, CHAT, plain | nothing)) == want


def test_an_answer_without_room_says_so(tiny: ServerProcess) -> None:
    body = answer(tiny, CHAT, ASK | strict(SCHEMAS["nested"]) | {"max_tokens": 3})
    assert body["choices"][0]["finish_reason"] == "length"
    assert body["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_its_grammar_cannot_follow_further_says_so(tiny: ServerProcess, stream: bool) -> None:
    """In the words of every route, with what has come until then, and not as a fault of the server."""
    fields = {"grammar": 'root ::= ("x" | "y") tail\ntail ::= "abc" tail', "stream": stream}

    def said(path: str, ask: dict[str, Any]) -> list[dict[str, Any]]:
        response = tiny.post(path, ask | fields)
        assert response.status_code == 200, response.text
        if not stream:
            return [response.json()]
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
        return [json.loads(line) for line in lines]

    for path, ask in ((CHAT, ASK), (TEXT, {"prompt": "Well", "max_tokens": 300})):
        end = [body["choices"][0] for body in said(path, ask) if body.get("choices")][-1]
        assert (end["finish_reason"], end["stop_reason"]) == ("length", "grammar_limit")
    last = said("/completion", {"prompt": "Well", "n_predict": 300})[-1]
    assert (last["stop_type"], last["truncated"]) == ("limit", False)
    assert 'reason="grammar_limit"' in tiny.http.get("/metrics").text


def test_the_end_of_the_grammar_ends_the_answer(tiny: ServerProcess) -> None:
    """Whatever the model, its bias and its penalties would rather have."""
    more = {"logit_bias": {"2": -100, "0": -100, "100": 100}, "repetition_penalty": 1.5, "top_p": 0.2}
    body = answer(tiny, CHAT, ASK | strict({"enum": ["red", "green"]}) | more)
    assert text_of(body) in ('"red"', '"green"')
    assert body["choices"][0]["finish_reason"] == "stop"


def test_logprobs_are_the_models_own(tiny: ServerProcess) -> None:
    fields = {"logprobs": True, "top_logprobs": 2, "temperature": 0}
    (free,) = answer(tiny, CHAT, ASK | fields | {"max_tokens": 1})["choices"][0]["logprobs"]["content"]
    kept = answer(tiny, CHAT, ASK | fields | strict({"const": "red"}))["choices"][0]["logprobs"]["content"]
    assert "".join(entry["token"] for entry in kept) == '"red"'
    assert kept[0]["top_logprobs"] == free["top_logprobs"]
    assert kept[0]["logprob"] < free["logprob"]


def deep(levels: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {"items": schema}
    return schema


BAD: list[tuple[dict[str, Any], str]] = [
    ({"response_format": {"type": "wish"}}, "response_format.type"),
    ({"response_format": {}}, "response_format.type"),
    ({"response_format": {"type": ["text"]}}, "response_format.type"),
    ({"response_format": "json"}, "response_format"),
    ({"response_format": {"type": "text", "schema": {}}}, "response_format"),
    ({"response_format": {"type": "json_object", "schema": 5}}, "response_format.schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ({"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}}, "response_format.json_schema.schema"),
    (strict([]), "response_format.json_schema.schema"),  # type: ignore[arg-type]
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": 5, "schema": {}}}},
        "response_format.json_schema.name",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "strict": "yes", "schema": {}}}},
        "response_format.json_schema.strict",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "shema": {}}}},
        "response_format.json_schema",
    ),
    (strict({"not": {}}), "response_format"),
    (strict({"type": "wish"}), "response_format"),
    (strict({"$ref": "#/$defs/gone"}), "response_format"),
    (strict({"type": "string", "pattern": "("}), "response_format"),
    (strict({"enum": []}), "response_format"),
    (strict(deep(130)), "response_format"),
    (strict(deep(400)), "response_format"),
    (strict({"enum": ["x" * 1000 + str(i) for i in range(70)]}), "response_format"),
    (
        strict({"$defs": {str(i): {"$ref": f"#/$defs/{i + 1}"} for i in range(2400)}, "$ref": "#/$defs/0"}),
        "response_format",
    ),
    ({"json_schema": {"not": {}}}, "json_schema"),
    ({"json_schema": [1]}, "json_schema"),
    ({"grammar": "root ::= ("}, "grammar"),
    ({"grammar": "start: other"}, "grammar"),
    ({"grammar": 'root ::= "' + "a" * 20000 + '"'}, "grammar"),
    ({"grammar": 5}, "grammar"),
    (strict({}) | {"grammar": 'root ::= "a"'}, "grammar"),
    (strict({}) | {"json_schema": {}}, "json_schema"),
    (strict({}) | {"ignore_eos": True}, "ignore_eos"),
    (strict({}) | {"tools": [{"type": "function", "function": {"name": "f"}}]}, "response_format"),
]


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_what_cannot_be_kept_to_is_refused_by_name(tiny: ServerProcess, fields: dict[str, Any], param: str) -> None:
    started = tiny.http.get("/health").json()["batch"]["total_completed"]
    for stream in (False, True):
        response = tiny.post(CHAT, ASK | fields | {"stream": stream})
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert error["param"] == param
        assert error["message"].startswith(param)
        assert len(error["message"]) < 500
    assert tiny.http.get("/health").json()["batch"]["total_completed"] == started


def test_tools_that_may_not_be_called_do_not_matter(tiny: ServerProcess) -> None:
    tools = {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"}
    assert text_of(answer(tiny, CHAT, ASK | strict({"const": 1}) | tools)) == "1"


def test_a_schema_that_breaks_the_library_is_a_refusal_like_any_other(tiny: ServerProcess) -> None:
    links: dict[str, Any] = {f"d{i}": {"allOf": [{"items": {"$ref": f"#/$defs/d{i + 1}"}}]} for i in range(1000)}
    response = tiny.post(CHAT, ASK | strict({"$defs": links | {"d1000": {}}, "$ref": "#/$defs/d0"}))
    assert response.status_code == 400
    assert "too complex" in response.json()["error"]["message"]
    assert text_of(answer(tiny, CHAT, ASK | strict({"const": 1}))) == "1"


def test_plain_strict_plain_one_after_the_other_and_side_by_side(tiny: ServerProcess) -> None:
    plain = ASK | {"temperature": 0, "max_tokens": 12, "ignore_eos": True, "cache_prompt": False}
    before = text_of(answer(tiny, CHAT, plain))
    answer(tiny, CHAT, ASK | strict(SCHEMAS["nested"]) | {"seed": 3})
    assert text_of(answer(tiny, CHAT, plain)) == before

    def ask(index: int) -> str:
        if index % 4 == 1:
            body = answer(tiny, CHAT, ASK | strict(SCHEMAS["nested"]) | {"seed": index})
            check(SCHEMAS["nested"], text_of(body), body["choices"][0]["finish_reason"])
            return ""
        return text_of(answer(tiny, CHAT, plain))

    with ThreadPoolExecutor(8) as clients:
        together = list(clients.map(ask, range(8)))
    assert together == ["" if index % 4 == 1 else before for index in range(8)]


def test_a_client_that_leaves_gives_everything_back(tiny: ServerProcess) -> None:
    body = ASK | strict({"type": "array", "items": {"type": "integer"}, "minItems": 5000}) | {"max_tokens": 4000}
    with pytest.raises(httpx.ReadTimeout):
        tiny.post(CHAT, body, timeout=httpx.Timeout(20.0, read=1.5))
    with tiny.http.stream("POST", CHAT, json=body | {"stream": True}) as response:
        next(response.iter_lines())
    wait_until(lambda: num_busy(tiny) == 0 and num_live_blocks(tiny) == 0)


class Colour(BaseModel):
    name: str
    is_warm: bool


def test_the_embedded_model_with_the_openai_client(server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    message = [{"role": "user", "content": "Name a colour. Answer in JSON with name and is_warm."}]
    done = client.chat.completions.parse(
        model=server.http.get("/v1/models").json()["data"][0]["id"],
        messages=message,
        response_format=Colour,
        temperature=0,
        max_tokens=40,  # type: ignore[arg-type]
    )
    assert isinstance(done.choices[0].message.parsed, Colour)
    assert done.choices[0].finish_reason == "stop"
    towns = ["Berlin", "Madrid", "Paris", "Rome"]
    body = answer(server, CHAT, ASK | strict({"enum": towns}) | {"temperature": 0})
    assert json.loads(text_of(body)) in towns
