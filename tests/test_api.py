"""The application against a scripted service: shapes, statuses, headers, streams, and clients that leave."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from app import errors
from app.api import delivery, sse
from app.completion import Delta
from app.request import SamplingParams
from app.scheduler.snapshot import Counters, PoolView, PrefixView, SlotView, Snapshot
from app.service import ModelCard
from tests.scripted import (
    CARD,
    HI,
    Client,
    ScriptedCompletion,
    ScriptedService,
    call,
    chat,
    entry,
    events,
    make_app,
    text,
)

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


def post_raw(raw: bytes | Iterator[bytes], headers: dict[str, str] = JSON, **options: Any) -> httpx.Response:
    async def pieces() -> Any:
        for piece in raw:
            yield piece

    content = raw if isinstance(raw, bytes) else pieces()
    return call(make_app(**options), "POST", CHAT, content=content, headers=headers)


def is_envelope(response: httpx.Response) -> bool:
    error = response.json()["error"]
    return set(error) == {"message", "type", "param", "code"} and bool(error["message"]) and bool(error["type"])


# --- whole answers


def test_a_chat_answer_has_the_public_shape() -> None:
    service = ScriptedService()
    response = chat(service, model="small", seed=3)
    body = response.json()
    assert response.status_code == 200
    assert body.pop("id").startswith("chatcmpl-")
    assert isinstance(body.pop("created"), int)
    assert body.pop("timings") == {
        "cache_n": 4,
        "prompt_n": 6,
        "prompt_ms": 500.0,
        "prompt_per_token_ms": pytest.approx(500 / 6),
        "prompt_per_second": 12.0,
        "predicted_n": 3,
        "predicted_ms": 1500.0,
        "predicted_per_token_ms": 500.0,
        "predicted_per_second": 2.0,
    }
    assert body == {
        "object": "chat.completion",
        "model": "org/small",
        "system_fingerprint": "test-build",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hello", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 10,
            "completion_tokens": 3,
            "total_tokens": 13,
            "prompt_tokens_details": {"cached_tokens": 4},
        },
    }
    messages, ask, template = service.asked[0]
    assert messages == [{"role": "user", "content": "hi"}]
    assert (ask.sampling.seed, ask.sampling.temperature, template) == (3, 0.7, {})


def test_a_text_answer_has_the_public_shape() -> None:
    service = ScriptedService()
    body = text(service, prompt=[[1, 2], [3]]).json()
    assert body["id"].startswith("cmpl-")
    assert body["object"] == "text_completion"
    assert body["choices"] == [{"index": 0, "text": "Hello", "logprobs": None, "finish_reason": "stop"}]
    assert service.asked[0][0] == [[1, 2], [3]]


def test_choices_come_in_order_whatever_the_order_of_their_text() -> None:
    script = [Delta(1, "b"), Delta(0, "a"), Delta(1, "B", (), "length"), Delta(0, "A", (), "stop")]
    choices = chat(ScriptedService(ScriptedCompletion(*script)), n=2).json()["choices"]
    assert [(c["index"], c["message"]["content"], c["finish_reason"]) for c in choices] == [
        (0, "aA", "stop"),
        (1, "bB", "length"),
    ]


def test_answers_without_tokens_or_time_divide_by_nothing() -> None:
    completion = ScriptedCompletion(Delta(0, "", (), "stop"))
    completion.usage.cached_tokens = 10
    completion.usage.completion_tokens = 0
    completion.timings = replace(completion.timings, predicted_s=0.0)
    timings = chat(ScriptedService(completion)).json()["timings"]
    assert (timings["prompt_per_token_ms"], timings["predicted_per_second"]) == (0.0, 0.0)


# --- log-probabilities

HALVES = (
    Delta(0, "", (entry("\ufffd", b"\xf0\x9f", (("x", -1.0),)),)),
    Delta(0, "\U0001f431", (entry("\U0001f431", b"\x90\xb1"),)),
    Delta(0, "ok", (entry("o", top=(("o", -0.5), ("q", float("-inf")))), entry("k")), "stop"),
)


def test_chat_logprobs_keep_raw_bytes_and_finite_numbers() -> None:
    body = chat(ScriptedService(ScriptedCompletion(*HALVES)), logprobs=True, top_logprobs=2).json()
    content = body["choices"][0]["logprobs"]["content"]
    assert bytes(byte for item in content for byte in item["bytes"]) == "\U0001f431ok".encode()
    assert content[0]["top_logprobs"] == [{"token": "x", "logprob": -1.0, "bytes": [120]}]
    assert content[2]["top_logprobs"][1]["logprob"] == -9999.0


def test_a_stream_delivers_every_logprob_entry_also_those_without_text() -> None:
    whole = chat(ScriptedService(ScriptedCompletion(*HALVES)), logprobs=True).json()["choices"][0]["logprobs"]
    chunks = events(chat(ScriptedService(ScriptedCompletion(*HALVES)), logprobs=True, stream=True))[:-1]
    streamed = [e for c in chunks for e in (c["choices"][0]["logprobs"] or {"content": []})["content"]]
    assert streamed == whole["content"]
    assert len(streamed) == 4


@pytest.mark.parametrize("stream", [False, True])
def test_text_logprobs_have_the_old_shape_with_running_offsets(stream: bool) -> None:
    script = [Delta(0, "ab", (entry("ab", top=(("ab", -0.5), ("x", -2.0))),)), Delta(0, "c", (entry("c"),), "stop")]
    response = text(ScriptedService(ScriptedCompletion(*script)), logprobs=2, stream=stream)
    tables = [c["choices"][0]["logprobs"] for c in (events(response)[:-1] if stream else [response.json()])]
    merged = {name: [x for t in tables if t for x in t[name]] for name in tables[0]}
    assert merged == {
        "tokens": ["ab", "c"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"ab": -0.5, "x": -2.0}, {"c": -0.5}],
        "text_offset": [0, 2],
    }


# --- streams


def test_a_chat_stream_opens_with_the_role_and_ends_with_the_reason() -> None:
    response = chat(stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = events(response)
    assert done == "[DONE]"
    assert [chunk["choices"][0]["delta"] for chunk in chunks] == [
        {"role": "assistant", "content": ""},
        {"content": "Hel"},
        {"content": "lo"},
        {},
    ]
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None, None, "stop"]
    assert {(c["id"], c["object"], c["model"]) for c in chunks} == {
        (chunks[0]["id"], "chat.completion.chunk", "org/small")
    }
    assert all("usage" not in chunk for chunk in chunks)
    assert ["timings" in chunk for chunk in chunks] == [False, False, False, True]


def test_a_text_stream_joins_to_the_whole_text() -> None:
    *chunks, done = events(text(stream=True))
    assert done == "[DONE]"
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text().json()["choices"][0]["text"] == "Hello"
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["finish_reason"]] == ["stop"]


def test_each_choice_of_a_stream_opens_and_ends_once() -> None:
    script = [Delta(1, "b", (), "length"), Delta(0, "a"), Delta(0, "", (), "stop")]
    *chunks, _ = events(chat(ScriptedService(ScriptedCompletion(*script)), n=2, stream=True))
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [(c["index"], c["finish_reason"]) for c in choices if c["finish_reason"]] == [(1, "length"), (0, "stop")]
    assert sorted(c["index"] for c in choices if "role" in c["delta"]) == [0, 1]


def test_the_usage_chunk_is_last_and_the_others_say_null() -> None:
    *chunks, usage, done = events(chat(stream=True, stream_options={"include_usage": True}))
    assert done == "[DONE]"
    assert usage["choices"] == []
    assert usage["usage"]["total_tokens"] == 13
    assert all(chunk["usage"] is None for chunk in chunks)


@pytest.mark.parametrize("options", [None, {}, {"include_usage": False}, {"include_usage": None}])
def test_usage_is_not_sent_unasked(options: dict[str, Any] | None) -> None:
    *chunks, _ = events(chat(stream=True, stream_options=options))
    assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize(
    ("failure", "message"),
    [(errors.BackendError(), "inference backend error"), (ValueError("secret detail"), "internal error")],
)
def test_a_late_failure_ends_the_stream_with_an_error_and_no_done(failure: Exception, message: str) -> None:
    completion = ScriptedCompletion(Delta(0, "He"), failure)
    response = chat(ScriptedService(completion), stream=True)
    assert response.status_code == 200
    assert events(response)[-1]["error"]["message"] == message
    assert "[DONE]" not in response.text
    assert "secret" not in response.text
    assert completion.num_closed == 1


@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_while_waiting_is_a_real_status(stream: bool) -> None:
    completion = ScriptedCompletion(refused=errors.Unavailable("Draining"))
    response = chat(ScriptedService(completion), stream=stream)
    assert response.status_code == 503
    assert response.json()["error"]["message"] == "Draining"
    assert completion.num_closed == 1
    assert completion.waits == ([delivery.ADMISSION_WAIT_S] if stream else [])


def test_a_silent_stream_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "PING_INTERVAL_S", 0.01)
    response = chat(ScriptedService(ScriptedCompletion(Delta(0, "a"), 0.1, Delta(0, "b", (), "stop"))), stream=True)
    assert ": ping\n\n" in response.text
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in events(response)[:-1]) == "ab"


# --- clients that leave


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_completion(stream: bool) -> None:
    completion = ScriptedCompletion(Delta(0, "a"), None)

    async def go() -> list[dict[str, Any]]:
        app = make_app(ScriptedService(completion))
        client = Client(app, CHAT, {"messages": [{"role": "user", "content": "hi"}], "stream": stream})
        seen = [await client.next(), await client.next()] if stream else []
        await asyncio.sleep(0.01)
        assert completion.num_closed == 0
        await client.leave()
        return seen

    seen = asyncio.run(go())
    assert [message["type"] for message in seen] == (["http.response.start", "http.response.body"] if stream else [])
    assert completion.num_closed == 1


def test_a_client_that_leaves_the_queue_gives_its_place_back() -> None:
    class Queued(ScriptedCompletion):
        async def admitted(self, timeout_s: float) -> None:
            await asyncio.sleep(timeout_s)

    completion = Queued()

    async def go() -> None:
        app = make_app(ScriptedService(completion))
        client = Client(app, CHAT, {"messages": [{"role": "user", "content": "hi"}], "stream": True})
        await asyncio.sleep(0.01)
        await client.leave()
        assert client.sent.empty()

    asyncio.run(go())
    assert completion.num_closed == 1


def test_a_cancelled_application_ends_its_completion() -> None:
    completion = ScriptedCompletion(Delta(0, "a"), None)

    async def go() -> None:
        app = make_app(ScriptedService(completion))
        client = Client(app, CHAT, {"messages": [{"role": "user", "content": "hi"}], "stream": True})
        await client.next()
        client.run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await client.run

    asyncio.run(go())
    assert completion.num_closed == 1


def test_a_transport_that_fails_to_send_is_a_client_that_left() -> None:
    completion = ScriptedCompletion(Delta(0, "a"), None)

    class Broken(Client):
        async def _send(self, message: dict[str, Any]) -> None:
            await super()._send(message)
            if message["type"] == "http.response.body":
                raise OSError("connection lost")

    async def go() -> None:
        app = make_app(ScriptedService(completion))
        client = Broken(app, CHAT, {"messages": [{"role": "user", "content": "hi"}], "stream": True})
        await asyncio.wait_for(client.run, 2)

    asyncio.run(go())
    assert completion.num_closed == 1


# --- bodies


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b'{"messages": [',
        b"[]",
        b'"text"',
        b"null",
        b'{"messages":[{"role":"user","content":"emoji \\ud83d"}]}',
        b'{"messages":[{"role":"user","content":"x"}],"temperature":NaN}',
        b'{"messages":[{"role":"user","content":"x"}],"tools":' + b"[" * 2000 + b"0" + b"]" * 2000 + b"}",
        b'{"messages":[{"role":"user","content":"x"}],"tools":' + b"[" * 900 + b"0" + b"]" * 900 + b"}",
        b"\xff\xfe",
    ],
)
def test_a_body_that_is_no_json_object_is_a_plain_400(raw: bytes) -> None:
    response = post_raw(raw)
    assert response.status_code == 400
    assert is_envelope(response)
    assert "Traceback" not in response.text
    assert "Error" not in response.json()["error"]["message"]


def test_a_body_in_pieces_is_one_body() -> None:
    assert post_raw(iter([b'{"messages":[{"role":"us', b'er","content":"x"}]}'])).status_code == 200


def test_a_large_body_is_refused_by_its_length_and_by_its_bytes() -> None:
    huge = b'{"messages":"' + b"x" * 200 + b'"}'
    for raw in (huge, iter([huge[:60], huge[60:120], huge[120:]])):
        response = post_raw(raw, max_body_bytes=100)
        assert response.status_code == 413
        assert response.headers["connection"] == "close"
        assert is_envelope(response)
    assert post_raw(huge, max_body_bytes=len(huge)).status_code == 400


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("application/json", 200),
        ("application/json; charset=utf-8", 200),
        ("Application/JSON", 200),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("", 415),
    ],
)
def test_only_json_is_read(content_type: str, status: int) -> None:
    raw = b'{"messages":[{"role":"user","content":"x"}]}'
    response = post_raw(raw, {"content-type": content_type} if content_type else {})
    assert response.status_code == status
    assert status == 200 or is_envelope(response)


def test_ignored_fields_are_named_or_refused() -> None:
    response = chat(flab=10, zip=True, absent=None, user="u", reasoning_effort="none")
    assert response.status_code == 200
    assert response.headers["x-mlxcel-ignored-fields"] == "flab,zip,reasoning_effort"
    assert "x-mlxcel-ignored-fields" in chat(flab=10, stream=True).headers
    assert "x-mlxcel-ignored-fields" not in chat(user="u").headers
    strict = chat(options={"strict_fields": True}, flab=10)
    assert strict.status_code == 400
    assert strict.json()["error"]["param"] == "flab"
    unread = chat(options={"strict_fields": True}, reasoning_effort="low").json()["error"]
    assert unread["message"] == "reasoning_effort: this model's chat template does not read it"


# --- errors


@pytest.mark.parametrize(
    ("refused", "status", "error"),
    [
        (
            errors.InvalidRequest("messages: bad", "messages"),
            400,
            {"message": "messages: bad", "type": "invalid_request_error", "param": "messages", "code": None},
        ),
        (
            errors.BackendError(),
            500,
            {"message": "inference backend error", "type": "server_error", "param": None, "code": None},
        ),
        (
            errors.Unavailable("Loading model"),
            503,
            {"message": "Loading model", "type": "unavailable_error", "param": None, "code": None},
        ),
        (errors.Overloaded(), 503, {"message": "Server is busy. Retry later.", "type": "overloaded"}),
        (
            errors.MemoryShortage(),
            503,
            {
                "message": "There is not enough memory for the context of this request at the moment. Retry later.",
                "type": "overloaded",
                "param": None,
                "code": "request_memory_budget_exceeded",
            },
        ),
        (
            RuntimeError("secret"),
            500,
            {"message": "internal error", "type": "server_error", "param": None, "code": None},
        ),
        (
            errors.StartError("secret"),
            500,
            {"message": "internal error", "type": "server_error", "param": None, "code": None},
        ),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_each_failure_has_one_status_and_body(
    refused: Exception, status: int, error: dict[str, Any], stream: bool
) -> None:
    response = chat(ScriptedService(refused=refused), stream=stream)
    assert response.status_code == status
    assert response.json() == {"error": error}
    assert ("retry-after" in response.headers) == (status == 503)


def test_an_unexpected_failure_is_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    chat(ScriptedService(refused=RuntimeError("the reason")))
    record = next(record for record in caplog.records if record.name == "mlxcel.api")
    assert record.exc_info is not None
    assert "the reason" in caplog.text


def test_another_model_is_not_found_and_any_is_accepted_on_request() -> None:
    response = chat(model="no-such-model")
    assert response.status_code == 404
    assert response.json()["error"]["code"] == "model_not_found"
    assert chat(ScriptedService(card=replace(CARD, ids=("org/small", "*"))), model="no-such-model").status_code == 200


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/v1/nope", 404),
        ("GET", "/health/", 404),
        ("GET", CHAT, 405),
        ("POST", "/health", 405),
        ("GET", "/v1/models/other", 404),
    ],
)
def test_wrong_routes_get_an_envelope(method: str, path: str, status: int) -> None:
    response = call(make_app(), method, path)
    assert response.status_code == status
    assert is_envelope(response)
    assert ("allow" in response.headers) == (status == 405)


# --- keys, CORS, request ids, log


@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Bearer key-1", 200),
        ("bearer key-1", 200),
        ("Bearer schlüssel".encode(), 200),
        (None, 401),
        ("Bearer key-", 401),
        ("Bearer key-11", 401),
        ("Bearer ", 401),
        ("key-1", 401),
        ("Basic key-1", 401),
        ("Bearer schlüssel".encode("latin-1"), 401),
    ],
)
def test_keys(header: str | bytes | None, status: int) -> None:
    app = make_app(api_keys=("key-1", "schlüssel"))
    response = call(app, "GET", "/v1/models", headers=[] if header is None else [("authorization", header)])
    assert response.status_code == status
    if status == 401:
        error = {"message": "Invalid API Key", "type": "authentication_error", "code": 401}
        assert response.json() == {"error": error}


def test_with_keys_only_health_is_open() -> None:
    app = make_app(api_keys=("key-1",))
    opened = ["/health", "/v1/health", "/health/live", "/health/ready"]
    assert {call(app, "GET", path).status_code for path in opened} == {200}
    shut = ["/slots", "/metrics", "/props", "/v1/cache/stats", "/v1/models", "/nope", "/health/../slots"]
    assert {call(app, "GET", path).status_code for path in shut} == {401}


def test_cors_headers_only_for_allowed_origins() -> None:
    origin = {"origin": "https://a.example"}
    preflight = {**origin, "access-control-request-method": "POST", "access-control-request-headers": "authorization"}
    assert "access-control-allow-origin" not in call(make_app(), "GET", "/health", headers=origin).headers
    app = make_app(allowed_origins=("https://a.example",), api_keys=("k",))
    refused = call(app, "GET", "/v1/models", headers=origin)
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://a.example"
    assert call(app, "OPTIONS", CHAT, headers=preflight).status_code == 200
    other = call(app, "GET", "/health", headers={"origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("given", ["abc-123", "x" * 128])
def test_a_sane_request_id_comes_back(given: str) -> None:
    for path in ("/health", "/nope"):
        assert call(make_app(), "GET", path, headers={"x-request-id": given}).headers["x-request-id"] == given


@pytest.mark.parametrize("given", [None, "", "x" * 129, "a b", "caf\xe9"])
def test_another_request_id_is_replaced(given: str | None) -> None:
    headers = {} if given is None else {"x-request-id": given.encode("latin-1")}
    made = call(make_app(), "GET", "/health", headers=headers).headers["x-request-id"]
    assert made != given
    assert len(made) == 32


def test_one_log_line_a_request_without_prompts_or_keys(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mlxcel.access")
    secret = {"authorization": "Bearer key-SECRET", "x-request-id": "rid"}
    body = {"messages": [{"role": "user", "content": "ZEBRA"}]}
    call(make_app(api_keys=("key-SECRET",)), "POST", CHAT, json=body, headers=secret)
    call(make_app(), "GET", "/v1/models/ZEBRA")
    records = [record for record in caplog.records if record.name == "mlxcel.access"]
    assert [(r.method, r.route, r.status) for r in records] == [
        ("POST", CHAT, 200),
        ("GET", "/v1/models/{model_id:path}", 404),
    ]
    assert records[0].request_id == "rid"
    assert records[0].seconds >= 0
    assert not any("ZEBRA" in str(vars(r)) or "SECRET" in str(vars(r)) for r in records)


def access_line(caplog: pytest.LogCaptureFixture) -> Any:
    [line] = [vars(record) for record in caplog.records if record.name == "mlxcel.access"]
    return line


@pytest.mark.parametrize("stream", [False, True])
def test_the_log_line_of_an_answer_tells_what_it_took(caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    caplog.set_level(logging.INFO, "mlxcel.access")
    chat(stream=stream)
    line = access_line(caplog)
    assert (line["queue_s"], line["ttft_s"]) == (0.1, 0.6)
    assert (line["prompt_tokens"], line["cached_tokens"], line["completion_tokens"]) == (10, 4, 3)
    assert line["finish_reason"] == "stop"


@pytest.mark.parametrize("stream", [False, True])
def test_the_log_line_of_a_failed_answer_says_so(caplog: pytest.LogCaptureFixture, stream: bool) -> None:
    caplog.set_level(logging.INFO, "mlxcel.access")
    completion = ScriptedCompletion(Delta(0, "Hel"), errors.BackendError())
    completion.usage.completion_tokens = 0
    completion.timings = replace(completion.timings, queue_s=0.0)
    chat(ScriptedService(completion), stream=stream)
    line = access_line(caplog)
    assert (line["status"], line["finish_reason"]) == (200 if stream else 500, "error")
    assert (line["queue_s"], line["ttft_s"]) == (None, None)


def test_polled_routes_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, "mlxcel.access")
    paths = ["/health", "/v1/health", "/health/live", "/health/ready", "/metrics", "/slots", "/v1/models", "/nope"]
    for path in paths:
        call(make_app(), "GET", path)
    levels = [record.levelname for record in caplog.records if record.name == "mlxcel.access"]
    assert levels == ["DEBUG"] * 6 + ["INFO"] * 2


def test_a_method_of_the_clients_own_making_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mlxcel.access")
    call(make_app(), "ZEBRA", "/v1/models")
    assert (access_line(caplog)["method"], access_line(caplog)["status"]) == ("other", 405)


# --- rate limits


def test_requests_beyond_the_limit_of_a_key_are_429() -> None:
    app = make_app(api_keys=("a", "b"), rate_limit_requests=2)
    body = {"messages": [{"role": "user", "content": "hi"}]}

    def ask(key: str, path: str = CHAT) -> httpx.Response:
        return call(app, "POST", path, json=body | {"prompt": "hi"}, headers={"authorization": f"Bearer {key}"})

    assert [ask("a").status_code, ask("a", "/v1/completions").status_code] == [200, 200]
    refused = ask("a")
    assert refused.status_code == 429
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert ask("b").status_code == 200
    assert call(app, "GET", "/v1/models", headers={"authorization": "Bearer a"}).status_code == 200


def test_tokens_are_set_aside_and_given_back() -> None:
    """Each answer uses 13 of the tokens it sets aside; what is refused uses none."""
    service = ScriptedService()
    app = make_app(service, rate_limit_tokens=100)

    def ask(max_tokens: int, *script: Any) -> int:
        service.completion = ScriptedCompletion(*(script or HI))
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": max_tokens}
        return call(app, "POST", CHAT, json=body).status_code

    assert ask(90) == 200
    assert ask(90) == 429
    service.refused = errors.Overloaded()
    assert ask(70) == 503
    service.refused = None
    assert ask(70, errors.BackendError()) == 500
    assert ask(70) == 200
    assert ask(70) == 429


def test_a_client_that_leaves_pays_for_what_was_computed() -> None:
    async def go() -> int:
        app = make_app(ScriptedService(ScriptedCompletion(None)), rate_limit_tokens=100)
        body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 90}
        client = Client(app, CHAT, body)
        await asyncio.sleep(0.01)
        await client.leave()
        level = app.state.wiring.limits._tokens._of[b""].level
        return round(level)

    assert asyncio.run(go()) == 87


def test_every_answer_of_a_generating_route_tells_the_limits() -> None:
    app = make_app(rate_limit_requests=2, rate_limit_tokens=1000)
    left = []
    for body in ({"prompt": "hi", "max_tokens": 5}, {"prompt": 7}, {"prompt": "hi"}):
        response = call(app, "POST", "/v1/completions", json=body)
        left.append((response.status_code, response.headers["x-ratelimit-remaining-requests"]))
        assert response.headers["x-ratelimit-limit-tokens"] == "1000"
    assert left == [(200, "1"), (400, "0"), (429, "0")]
    assert "x-ratelimit-limit-tokens" not in call(app, "GET", "/v1/models").headers
    assert "x-ratelimit-limit-requests" not in chat().headers
    streamed = call(make_app(rate_limit_tokens=1000), "POST", "/v1/completions", json={"prompt": "hi", "stream": True})
    assert streamed.headers["x-ratelimit-remaining-tokens"] == str(1000 - 10 - 16)


@pytest.mark.parametrize("path", [CHAT, "/v1/completions", "/completion"])
def test_requests_of_a_key_under_way_are_bounded(path: str) -> None:
    body = {"prompt": "hi", "messages": [{"role": "user", "content": "hi"}]}

    async def go() -> list[int]:
        service = ScriptedService(ScriptedCompletion(None))
        app = make_app(service, rate_limit_concurrent=1)
        statuses = []
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            for refused in (errors.Overloaded(), None):
                service.refused = refused
                first = Client(app, path, body)
                await asyncio.sleep(0.01)
                second = await client.post(path, json=body)
                statuses.append(second.status_code)
                assert "retry-after" in second.headers
                await first.leave()
        assert not app.state.wiring.limits._under_way
        return statuses

    assert asyncio.run(go()) == [503, 429]


def test_a_key_file_is_asked_and_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("old\n")
    app = make_app(api_key_file=file)

    def status(key: str) -> int:
        return call(app, "GET", "/v1/models", headers={"authorization": f"Bearer {key}"}).status_code

    assert [status("old"), status("new")] == [200, 401]
    file.write_text("newer\n")
    monkeypatch.setattr("app.api.keys.CHECK_INTERVAL_S", 0.0)
    assert [status("old"), status("newer")] == [401, 200]


def test_config_shows_every_setting_and_no_secret() -> None:
    assert call(make_app(), "GET", "/v1/config").json() == {
        "settings": [
            {"name": "MLXCEL_API_KEYS", "value": "***", "source": "environment"},
            {"name": "MLXCEL_PORT", "value": "8080", "source": "default"},
        ],
        "fingerprint": "0123456789ab",
    }
    assert call(make_app(api_keys=("k",)), "GET", "/v1/config").status_code == 401


@pytest.mark.parametrize("num_pieces", [1, 2], ids=["while sending the body", "while waiting"])
def test_a_client_that_left_is_logged_as_such(caplog: pytest.LogCaptureFixture, num_pieces: int) -> None:
    caplog.set_level(logging.INFO, "mlxcel.access")

    async def go() -> None:
        app = make_app(ScriptedService(ScriptedCompletion(None)))
        client = Client(app, CHAT, {"messages": [{"role": "user", "content": "hi"}]}, num_pieces)
        await asyncio.sleep(0.01)
        await client.leave()
        if num_pieces == 1:  # the body broke off, and perhaps somebody is still there to hear of it
            assert client.sent.get_nowait()["status"] == 400
        else:
            assert client.sent.empty()

    asyncio.run(go())
    assert [r.status for r in caplog.records if r.name == "mlxcel.access"] == [499]


# --- health


@pytest.mark.parametrize("path", ["/health", "/v1/health"])
def test_health_tells_the_load_also_when_saturated(path: str) -> None:
    full = Snapshot(num_active=4, num_queued=32, counters=Counters(completed={"stop": 5, "length": 2}))
    response = call(make_app(ScriptedService(snap=full)), "GET", path)
    assert response.status_code == 200
    assert response.json() == {
        "status": "ok",
        "batch": {"active_sequences": 4, "queued_requests": 32, "total_completed": 7},
        "n_ctx_per_slot": 2048,
    }


@pytest.mark.parametrize(
    ("status", "age_s", "live", "ready", "message"),
    [
        ("ready", 0, 200, 200, None),
        ("ready", 600, 200, 200, None),
        ("loading", 0, 200, 503, "Loading model"),
        ("draining", 0, 200, 503, "Draining"),
        ("dead", 0, 503, 503, "Inference loop has ended"),
        ("ready", 601, 503, 503, "Inference loop is stuck"),
        ("draining", 601, 503, 503, "Inference loop is stuck"),
    ],
)
def test_health_by_state(status: str, age_s: float, live: int, ready: int, message: str | None) -> None:
    app = make_app(ScriptedService(status=status, age_s=age_s))
    assert call(app, "GET", "/health/live").status_code == live
    assert call(app, "GET", "/health/ready").status_code == ready
    response = call(app, "GET", "/health")
    assert response.status_code == ready
    if message:
        assert response.json() == {"error": {"code": 503, "message": message, "type": "unavailable_error"}}


def test_while_the_model_loads_nothing_but_health_and_metrics_answers() -> None:
    class Loading(ScriptedService):
        @property
        def card(self) -> ModelCard:
            raise errors.Unavailable("Loading model")

        @card.setter
        def card(self, _: ModelCard) -> None:
            pass

    app = make_app(Loading(status="loading"))
    asked = [("GET", "/v1/models"), ("GET", "/props"), ("POST", CHAT), ("POST", "/v1/completions")]
    body = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}
    for method, path in asked:
        response = call(app, method, path, json=body)
        assert response.status_code == 503
        assert response.json()["error"]["message"] == "Loading model"
    assert call(app, "GET", "/health/live").status_code == 200
    assert call(app, "GET", "/metrics").status_code == 200


@pytest.mark.parametrize("path", ["/health", "/health/live", "/v1/models", "/slots", "/metrics", "/props"])
def test_head_works_where_get_does(path: str) -> None:
    assert call(make_app(), "HEAD", path).status_code == 200


# --- models, slots, cache, props, metrics


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/"])
def test_the_model_list(path: str) -> None:
    response = call(make_app(), "GET", path)
    assert response.status_code == 200
    body = response.json()
    assert body["object"] == "list"
    assert [(m["id"], m["object"], m["created"]) for m in body["data"]] == [("org/small", "model", 1700000000)]


@pytest.mark.parametrize("name", ["org/small", "small", "org%2Fsmall"])
def test_one_model_by_each_of_its_names(name: str) -> None:
    assert call(make_app(), "GET", f"/v1/models/{name}").json()["id"] == "org/small"


BUSY = SlotView(0, 7, 12, 12, 8, 3, 20, SamplingParams(temperature=0.5, seed=9, logit_bias=((3, 1.0),)), True)


def test_slots_show_numbers_only() -> None:
    left = SlotView(1, 6, 5, 5, 0, 2, 2, SamplingParams())
    app = make_app(ScriptedService(snap=Snapshot(slots=(BUSY, left, SlotView(2)))))
    busy, used, fresh = call(app, "GET", "/slots").json()
    assert fresh == {"id": 2, "n_ctx": 2048, "speculative": False, "is_processing": False}
    assert busy.pop("params")["temperature"] == 0.5
    assert busy == {
        "id": 0,
        "n_ctx": 2048,
        "speculative": False,
        "is_processing": True,
        "id_task": 7,
        "n_prompt_tokens": 12,
        "n_prompt_tokens_processed": 12,
        "n_prompt_tokens_cache": 8,
        "next_token": [{"has_next_token": True, "n_remain": 17, "n_decoded": 3}],
    }
    assert used["is_processing"] is False
    assert used["id_task"] == 6
    assert used["next_token"] == [{"has_next_token": False, "n_remain": 0, "n_decoded": 2}]


@pytest.mark.parametrize("speculative", [False, True])
def test_whether_rows_propose_can_be_seen(speculative: bool) -> None:
    card = replace(CARD, speculative=speculative)
    app = make_app(ScriptedService(card=card, snap=Snapshot(slots=(SlotView(0), BUSY))))
    assert [slot["speculative"] for slot in call(app, "GET", "/slots").json()] == [speculative] * 2
    assert call(app, "GET", "/props").json()["default_generation_settings"]["speculative"] is speculative


@pytest.mark.parametrize(
    ("slots", "query", "status"),
    [
        ((BUSY,), "?fail_on_no_slot=1", 503),
        ((BUSY, SlotView(1)), "?fail_on_no_slot=1", 200),
        ((BUSY,), "?fail_on_no_slot=0", 200),
        ((BUSY,), "", 200),
    ],
)
def test_slots_can_fail_when_all_are_taken(slots: tuple[SlotView, ...], query: str, status: int) -> None:
    app = make_app(ScriptedService(snap=Snapshot(slots=slots)))
    assert call(app, "GET", f"/slots{query}").status_code == status


@pytest.mark.parametrize("name", ["slots", "metrics"])
def test_a_route_that_is_off_is_501(name: str) -> None:
    response = call(make_app(**{name: False}), "GET", f"/{name}")
    assert response.status_code == 501
    assert response.json()["error"]["type"] == "not_supported_error"
    assert is_envelope(response)


def test_cache_stats_and_reset() -> None:
    snap = Snapshot(
        pool=PoolView(block_size=64, num_blocks=10, live=3, free=7, cached=2),
        prefix=PrefixView(entries=2, hits=1, lookups=4, inserts=5, evictions_lru=3, misses={"short": 3}),
    )
    service = ScriptedService(snap=snap)
    app = make_app(service)
    assert call(app, "GET", "/v1/cache/stats").json() == {
        "enabled": True,
        "entries": 2,
        "hits": 1,
        "lookups": 4,
        "hit_rate": 0.25,
        "inserts": 5,
        "evictions_lru": 3,
        "evictions_ttl": 0,
        "rejects": {"short": 3},
        "paged_block_size": 64,
        "paged_blocks_allocated": 10,
        "paged_blocks_live": 3,
        "paged_blocks_free": 7,
        "paged_bytes_reserved": 10_000,
        "paged_bytes_in_use": 3_000,
        "paged_block_budget": 10,
    }
    assert call(make_app(), "GET", "/v1/cache/stats").json()["hit_rate"] == 0.0
    assert call(app, "POST", "/v1/cache/reset").status_code == 200
    assert service.num_resets == 1


EMBEDDINGS = [("POST", path) for path in ("/v1/embeddings", "/embeddings", "/embedding")]
OTHERS = [
    ("POST", "/v1/rerank", "Reranking"),
    ("POST", "/reranking", "Reranking"),
    ("POST", "/v1/images/generations", "Images"),
    ("POST", "/v1/audio/speech", "Audio"),
    ("POST", "/v1/moderations", "Moderation"),
    ("GET", "/v1/files", "files"),
    ("GET", "/v1/files/file-1/content", "files"),
    ("POST", "/v1/batches", "Batches"),
    ("POST", "/v1/fine_tuning/jobs", "Fine-tuning"),
    ("DELETE", "/v1/assistants/a", "Assistants"),
    ("POST", "/lora-adapters", "Adapters"),
    ("POST", "/slots/0?action=save", "slots"),
]


@pytest.mark.parametrize(("method", "path", "feature"), [*((*one, "Embeddings") for one in EMBEDDINGS), *OTHERS])
def test_what_is_not_offered_is_refused_by_name(method: str, path: str, feature: str) -> None:
    response = call(make_app(), method, path, json={"input": "x"})
    assert response.status_code == 501
    assert is_envelope(response)
    assert response.json()["error"]["type"] == "not_supported_error"
    assert feature in response.json()["error"]["message"]
    assert call(make_app(api_keys=("k",)), method, path).status_code == 401


def test_props() -> None:
    body = call(make_app(ScriptedService(snap=Snapshot(slots=(BUSY,)))), "GET", "/props").json()
    assert body["total_slots"] == 1
    assert body["default_generation_settings"]["n_ctx"] == 2048
    params = body["default_generation_settings"]["params"]
    assert (params["top_k"], params["n_predict"], params["seed"]) == (40, -1, -1)
    assert body["is_sleeping"] is False
    assert (body["model_alias"], body["build_info"]) == ("org/small", "test-build")
    assert body["chat_template"] == "{{ messages }}"


def test_metrics_are_served_as_prometheus_text() -> None:
    response = call(make_app(), "GET", "/metrics")
    assert response.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert "\nmlxcel_slots 0.0\n" in response.text


def test_requests_add_no_series() -> None:
    app = make_app()
    call(app, "GET", "/nope")
    before = {line.rsplit(" ", 1)[0] for line in call(app, "GET", "/metrics").text.splitlines()}
    for index in range(10):
        call(app, "GET", f"/x{index}", headers={"x-request-id": str(index)})
        call(app, "POST", CHAT, json={"model": f"junk-{index}", "messages": [{"role": "user", "content": "x"}]})
    assert {line.rsplit(" ", 1)[0] for line in call(app, "GET", "/metrics").text.splitlines()} == before


# --- the tokenizer


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        ({"content": "ab"}, [97, 98]),
        ({"prompt": "ab"}, [97, 98]),
        ({"content": "ab", "add_special": True}, [1, 97, 98]),
        ({"content": "aé", "with_pieces": True}, [(97, "a"), (195, [195]), (169, [169])]),
    ],
)
def test_tokenize(body: dict[str, Any], tokens: list[Any]) -> None:
    got = call(make_app(), "POST", "/tokenize", json=body).json()["tokens"]
    assert [(t["id"], t["piece"]) if isinstance(t, dict) else t for t in got] == tokens


def test_detokenize_refuses_ids_outside_the_vocabulary() -> None:
    app = make_app()
    assert call(app, "POST", "/detokenize", json={"tokens": [72, 73]}).json() == {"content": "HI"}
    response = call(app, "POST", "/detokenize", json={"tokens": [72, 100]})
    assert response.status_code == 400
    assert "100" in response.json()["error"]["message"]


def test_apply_template() -> None:
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    body = {"messages": messages, "tools": [{"type": "function", "function": {"name": "f"}}]}
    assert call(make_app(), "POST", "/apply-template", json=body).json() == {"prompt": "a|btools"}


def test_two_applications_share_nothing() -> None:
    first, second = ScriptedService(), ScriptedService(completion=ScriptedCompletion(*HI))
    chat(first)
    chat(second)
    assert (len(first.asked), len(second.asked)) == (1, 1)
