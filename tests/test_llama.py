"""llama-server's own routes over HTTP: a real service whose model says what is written down."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from typing import Any

import httpx
import pytest

from app import errors
from app.service import Service
from app.text.chat import ChatText
from app.text.infill import Infill
from tests.scripted import CARD as SMALL
from tests.scripted import ScriptedCompletion, ScriptedService, call, events, make_app
from tests.talking import END, TOKENIZER, talking, tokens_of

SETTINGS = {"temperature": 0, "top_k": 7, "seed": 11, "stop": ["STOP"], "n_predict": 50}


def ask(*said: str, path: str = "/completion", card: dict[str, Any] | None = None, **body: Any) -> httpx.Response:
    """One request to a server whose model says ``said``."""

    async def go() -> httpx.Response:
        async with talking(said, **(card or {})) as client:
            return await client.post(f"http://test{path}", json={"prompt": "ab", **body})

    return asyncio.run(go())


def answer(*said: str, **body: Any) -> Any:
    response = ask(*said, **body)
    assert response.status_code == 200, response.text
    return response.json()


@pytest.mark.parametrize("path", ["/completion", "/completions"])
def test_an_answer_has_the_shape_of_llama_server(path: str) -> None:
    body = answer("Hello", path=path, **SETTINGS)
    timings = body.pop("timings")
    assert (timings["prompt_n"], timings["predicted_n"], timings["cache_n"]) == (2, 6, 0)
    assert body == {
        "index": 0,
        "content": "Hello",
        "tokens": [],
        "stop": True,
        "model": "small",
        "tokens_predicted": 6,
        "tokens_evaluated": 2,
        "tokens_cached": 0,
        "generation_settings": {
            "n_ctx": 512,
            "n_predict": 50,
            "max_tokens": 50,
            "seed": 11,
            "temperature": 0,
            "top_k": 7,
            "top_p": 1.0,
            "min_p": 0.0,
            "repeat_last_n": -1,
            "repeat_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "stop": ["STOP"],
            "ignore_eos": False,
            "stream": False,
            "logit_bias": [],
            "n_probs": 0,
            "grammar": "",
            "samplers": ["penalties", "top_k", "temperature", "top_p", "min_p"],
            "timings_per_token": False,
        },
        "prompt": "ab",
        "truncated": False,
        "stop_type": "eos",
        "stopping_word": "",
    }


@pytest.mark.parametrize(
    ("body", "content", "stop_type", "word", "truncated"),
    [
        ({}, "one two three", "eos", "", False),
        ({"n_predict": 5}, "one t", "limit", "", False),
        ({"stop": ["zebra", " th"]}, "one two", "word", " th", False),
        ({"stop": [" three!"]}, "one two three", "eos", "", False),
        ({"prompt": "x" * 508}, "one ", "limit", "", True),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_how_an_answer_ended(
    body: dict[str, Any], content: str, stop_type: str, word: str, truncated: bool, stream: bool
) -> None:
    response = ask("one two three", stream=stream, **body)
    parts = events(response) if stream else [response.json()]
    assert "".join(part["content"] for part in parts) == content
    last = parts[-1]
    assert (last["stop_type"], last["stopping_word"], last["truncated"]) == (stop_type, word, truncated)


def test_a_stream_says_what_the_whole_answer_says_and_has_no_done() -> None:
    settings = {**SETTINGS, "n_probs": 1, "return_tokens": True}
    whole = answer("Hé\U0001f431 llo", **settings)
    response = ask("Hé\U0001f431 llo", stream=True, **settings)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert "[DONE]" not in response.text
    *parts, last = events(response)
    assert all(part["stop"] is False and "timings" not in part for part in parts)
    assert [part["index"] for part in parts] == [0] * len(parts)
    assert "".join(part["content"] for part in parts) == whole["content"] == "Hé\U0001f431 llo"
    assert [token for part in [*parts, last] for token in part["tokens"]] == whole["tokens"]
    assert whole["tokens"] == [*tokens_of(["Hé\U0001f431 llo"]), END]
    probabilities = [entry for part in parts for entry in part["completion_probabilities"]]
    assert probabilities == whole["completion_probabilities"]
    assert parts[0].keys() == {
        *("index", "content", "tokens", "stop", "tokens_predicted", "tokens_evaluated", "completion_probabilities")
    }
    assert last["content"] == ""
    for part in (whole, last):
        for name in ("content", "tokens", "timings", "generation_settings", "completion_probabilities"):
            part.pop(name)
    assert last == whole


def test_probabilities_name_token_and_alternatives() -> None:
    first, second = answer("Hi", n_probs=2)["completion_probabilities"]
    h = TOKENIZER.convert_tokens_to_ids("H")
    assert first["id"] == h
    assert (first["token"], first["bytes"], first["logprob"]) == ("H", [72], -0.5)
    assert first["top_logprobs"][0] == {"id": h, "token": "H", "bytes": [72], "logprob": -0.5}
    assert {other["id"] for other in first["top_logprobs"]} == {h, 65}
    assert second["token"] == "i"
    assert "completion_probabilities" not in answer("Hi")


def test_timings_in_every_event() -> None:
    parts = events(ask("Hello", stream=True, timings_per_token=True))
    assert [part["timings"]["predicted_n"] for part in parts] == [1, 2, 3, 4, 5, 6]


def test_several_prompts_are_a_list_and_one_is_not() -> None:
    answers = answer("Hi", prompt=["a", tokens_of(["bc"]), [*tokens_of(["d"]), "ef"]], n_cmpl=2, seed=5)
    assert [one["index"] for one in answers] == [0, 1, 2, 3, 4, 5]
    assert [one["prompt"] for one in answers] == ["a", "a", "bc", "bc", "def", "def"]
    assert [one["tokens_evaluated"] for one in answers] == [1, 1, 2, 2, 3, 3]
    assert [one["generation_settings"]["seed"] for one in answers] == [5, 6] * 3
    assert answer("Hi", prompt=["a"])["content"] == "Hi"


@pytest.mark.parametrize("stream", [False, True])
def test_texts_of_prompts_are_made_in_a_thread_and_once(stream: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[int, int]] = []  # the thread and the token
    token_bytes = Service.token_bytes

    def seen(self: Service, token_id: int) -> bytes:
        made.append((threading.get_ident(), token_id))
        return token_bytes(self, token_id)

    monkeypatch.setattr(Service, "token_bytes", seen)
    response = ask("Hi", prompt=["abc", "de"], n_cmpl=2, stream=stream)
    ends = [part for part in events(response) if part["stop"]] if stream else response.json()
    assert {end["index"]: end["prompt"] for end in ends} == {0: "abc", 1: "abc", 2: "de", 3: "de"}
    assert [token for _, token in made] == tokens_of(["abcde"])
    assert threading.get_ident() not in {thread for thread, _ in made}


def test_a_stream_of_several_answers_ends_each_of_them() -> None:
    parts = events(ask("Hi", prompt=["a", "b"], stream=True))
    for index in (0, 1):
        own = [part for part in parts if part["index"] == index]
        assert "".join(part["content"] for part in own) == "Hi"
        assert [part["stop"] for part in own] == [False] * (len(own) - 1) + [True]


def test_only_the_fields_that_are_asked_for() -> None:
    chosen = ["content", "generation_settings/top_k", "timings/predicted_n", "zap", "content/zap", "truncated"]
    wanted = {"content": "Hi", "top_k": 7, "predicted_n": 3, "truncated": False}
    assert answer("Hi", response_fields=chosen, **SETTINGS) == wanted
    assert events(ask("Hi", response_fields=chosen, stream=True, **SETTINGS))[-1] == wanted | {"content": ""}


def test_biases_and_samplers_are_shown_as_they_are_taken() -> None:
    settings = answer("Hi", logit_bias=[["a", False], [3, 1]], samplers="kdt", seed=-1)["generation_settings"]
    a = TOKENIZER.convert_tokens_to_ids("a")
    assert settings["logit_bias"] == [{"token": a, "bias": False}, {"token": 3, "bias": 1.0}]
    assert settings["samplers"] == ["top_k", "temperature"]
    assert settings["seed"] >= 0


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({"model": "other"}, 404, "model"),
        ({"prompt": ""}, 400, "prompt"),
        ({"prompt": "x" * 600}, 400, "prompt"),
        ({"prompt": [3, "x" * 600]}, 400, "prompt"),
        ({"prompt": [10**9]}, 400, "prompt"),
        ({"n_predict": 5000}, 400, "prompt"),
        ({"n_cmpl": 9}, 400, "n"),
        ({"prompt": ["a"] * 9}, 400, "prompt"),
        ({"grammar": "root ::= ("}, 400, "grammar"),
        ({"mirostat": 1}, 400, "mirostat"),
        ({"n": 2, "n_cmpl": 3}, 400, "n_cmpl"),
        ({"grammar": 'root ::= "y"', "logit_bias": [["y", False]]}, 400, "logit_bias"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_is_a_status_and_names_the_field(body: dict[str, Any], status: int, param: str, stream: bool) -> None:
    response = ask("Hi", stream=stream, **body)
    assert response.status_code == status
    assert response.json()["error"]["param"] == param


def test_unknown_fields_are_named() -> None:
    response = ask("Hi", flab=1, n_keep=3, user="u")
    assert response.headers["x-mlxcel-ignored-fields"] == "flab,user"


def test_a_failure_in_a_stream_is_its_last_event() -> None:
    service = ScriptedService(ScriptedCompletion(errors.BackendError()))
    body = {"prompt": "hi", "stream": True}
    (told,) = events(call(make_app(service), "POST", "/completion", json=body))
    assert told["error"]["message"] == "inference backend error"
    service.completion = ScriptedCompletion(refused=errors.Overloaded())
    assert call(make_app(service), "POST", "/completion", json=body).status_code == 503


# --- infill

CODE = {"input_prefix": "a<|eot|>", "input_suffix": "b"}


def test_infill_is_refused_by_name_where_the_model_has_not_learned_it() -> None:
    response = ask("Hi", path="/infill", **CODE)
    assert response.status_code == 501
    assert response.json()["error"]["type"] == "not_supported_error"
    assert "infill" in response.json()["error"]["message"]


def test_the_prompt_of_an_infill_begins_as_every_text_does() -> None:
    service = ScriptedService(card=replace(SMALL, infill=Infill(90, 91, 92)))
    call(make_app(service), "POST", "/infill", json={"input_prefix": "A", "input_suffix": "B"})
    assert service.asked[0][0] == [[1, 90, 65, 91, 66, 92]]


@pytest.mark.parametrize(
    ("more", "fits"),
    [
        ({"input_prefix": "x" * 40_000}, False),
        ({"input_suffix": "x" * 40_000}, False),
        ({"prompt": "x" * 40_000}, False),
        ({"input_extra": [{"text": "x" * 400, "filename": "f"}] * 100}, False),
        ({"input_extra": [{"text": "x", "filename": "f" * 400}] * 100}, False),
        ({"input_extra": [{"text": "x", "filename": "f"}] * 90}, True),
    ],
)
def test_an_infill_that_cannot_fit_is_refused_before_it_is_encoded(
    more: dict[str, Any], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[str] = []
    encode = ChatText.encode

    def seen(self: ChatText, text: str, *options: Any, **more: Any) -> list[int]:
        encoded.append(text)
        return encode(self, text, *options, **more)

    monkeypatch.setattr(ChatText, "encode", seen)
    response = ask("Hi", path="/infill", card={"infill": Infill(*tokens_of("xyzf"))}, **{**CODE, **more})
    if fits:
        assert (response.status_code, bool(encoded)) == (200, True)
        return
    assert (response.status_code, encoded) == (400, [])
    error = response.json()["error"]
    assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")


def test_infill_asks_for_what_is_between() -> None:
    marks = Infill(*tokens_of("xyz"))
    extra = [{"filename": "f", "text": "t"}]
    body = answer("Hi", path="/infill", card={"infill": marks}, **CODE, prompt="c", input_extra=extra, n_predict=1)
    assert (body["content"], body["prompt"]) == ("H", "t\nxa<|eot|>ybzc")
    assert body["tokens_evaluated"] == len("t\nxa<|eot|>ybzc"), "the name of a control token in code is text"
