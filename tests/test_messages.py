"""Anthropic's routes over HTTP: scripted answers, a model that says what is written down, and a real server."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import anthropic
import httpx
import httpx2
import pytest
from pydantic import BaseModel

from app import errors
from app.api import sse
from app.api.message_answer import SIGNATURE
from app.text.dialect import PLAIN, Dialect
from tests.scripted import HI, Client, ScriptedCompletion, ScriptedService, call, events, make_app
from tests.serving import ServerProcess, serving
from tests.spoken import HERMES, HERMES_CALL, QWEN, SPOKEN, Spoken
from tests.talking import TEMPLATE, talking, tokens_of

MESSAGES = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
BODY: dict[str, Any] = {"model": "small", "max_tokens": 200, "messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
TOOLS = [{"name": name, "input_schema": SCHEMA} for name in ("add", "get.it")]
ORDER = ["message_start", "ping", "content_block_start", "content_block_delta", "content_block_stop", "message_delta"]


def ask(service: ScriptedService | None = None, path: str = MESSAGES, **more: Any) -> httpx.Response:
    """``options`` are settings, ``headers`` of the request, and all else fields of its body."""
    options, headers = more.pop("options", {}), more.pop("headers", {})
    return call(make_app(service, **options), "POST", path, json=BODY | more, headers=headers)


def names(response: httpx.Response) -> list[str]:
    return [line.removeprefix("event: ") for line in response.text.splitlines() if line.startswith("event: ")]


# --- shapes, with answers that are written down


def test_a_whole_message_has_the_public_shape() -> None:
    service = ScriptedService()
    response = ask(service, system="s", metadata={"user_id": "x"})
    message = response.json()
    assert message.pop("id").startswith("msg_")
    assert message == {
        "type": "message",
        "role": "assistant",
        "model": "org/small",
        "content": [{"type": "text", "text": "Hello"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 6,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 4,
            "output_tokens": 3,
        },
    }
    assert response.headers["request-id"] == response.headers["x-request-id"]
    ((messages, asked, template),) = service.asked
    assert [message["role"] for message in messages] == ["system", "user"]
    assert (asked.max_tokens, asked.sampling.temperature) == (200, 0.7)
    assert template == {"enable_thinking": False}


def test_a_stream_has_anthropics_events_in_their_order() -> None:
    response = ask(stream=True)
    assert response.headers["content-type"].startswith("text/event-stream")
    assert names(response) == [*ORDER[:4], "content_block_delta", *ORDER[4:], "message_stop"]
    assert [event["type"] for event in events(response)] == names(response)
    first, _, start, hel, lo, stop, last, _ = events(response)
    assert first["message"] | {"id": ""} == {
        "id": "",
        "type": "message",
        "role": "assistant",
        "model": "org/small",
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": last["usage"],
    }
    assert start == {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
    assert (hel["delta"], lo["delta"]) == ({"type": "text_delta", "text": "Hel"}, {"type": "text_delta", "text": "lo"})
    assert stop == {"type": "content_block_stop", "index": 0}
    assert last["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}


def test_silence_is_filled_with_ping_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "PING_INTERVAL_S", 0.02)
    got = names(ask(ScriptedService(ScriptedCompletion(HI[0], 0.1, *HI[1:])), stream=True))
    assert got.count("ping") > 1
    assert [name for name in got if name != "ping"][:2] == ["message_start", "content_block_start"]


def test_a_late_failure_is_an_error_event_and_the_last() -> None:
    service = ScriptedService(ScriptedCompletion(HI[0], errors.BackendError()))
    response = ask(service, stream=True, headers={"x-request-id": "rid"})
    assert response.status_code == 200
    assert names(response)[-1] == "error"
    error = {"type": "api_error", "message": "inference backend error"}
    assert events(response)[-1] == {"type": "error", "error": error, "request_id": "rid"}
    assert service.completion.num_closed > 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("failure", "status", "kind"),
    [
        (errors.InvalidRequest("no", "x"), 400, "invalid_request_error"),
        (errors.RateLimited("5 requests a minute", 3), 429, "rate_limit_error"),
        (errors.Overloaded(), 503, "overloaded_error"),
        (errors.Unavailable("Draining"), 503, "overloaded_error"),
        (errors.MemoryShortage(), 503, "overloaded_error"),
        (errors.BackendError(), 500, "api_error"),
    ],
)
def test_failures_have_anthropics_shape(failure: Exception, status: int, kind: str, stream: bool) -> None:
    response = ask(ScriptedService(refused=failure), stream=stream, headers={"x-request-id": "rid"})
    assert response.status_code == status
    error = {"type": kind, "message": str(failure)}
    assert response.json() == {"type": "error", "error": error, "request_id": "rid"}
    assert response.headers["request-id"] == "rid"
    assert ("retry-after" in response.headers) == (status in (429, 503))


@pytest.mark.parametrize("path", [MESSAGES, COUNT])
@pytest.mark.parametrize(
    ("request_", "status", "kind"),
    [
        ({"json": BODY | {"model": "other"}}, 404, "not_found_error"),
        ({"json": BODY | {"messages": []}}, 400, "invalid_request_error"),
        ({"content": b"{", "headers": {"content-type": "application/json"}}, 400, "invalid_request_error"),
        ({"content": b"{}", "headers": {"content-type": "text/plain"}}, 415, "invalid_request_error"),
        ({"json": {"x": "x" * 20_000}}, 413, "request_too_large"),
        ({"json": BODY, "headers": {"x-api-key": "other"}}, 401, "authentication_error"),
    ],
)
def test_refusals_have_anthropics_shape_on_both_routes(path: str, request_: Any, status: int, kind: str) -> None:
    sent = request_ | {"headers": {"x-api-key": "key", **request_.get("headers", {})}}
    response = call(make_app(api_keys=("key",)), "POST", path, **sent)
    assert response.status_code == status
    body = response.json()
    assert (body["type"], body["error"]["type"]) == ("error", kind)
    assert body["request_id"] == response.headers["request-id"]


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", MESSAGES, 405), ("POST", f"{MESSAGES}/batches", 404), ("GET", COUNT, 405)]
)
def test_routes_that_are_not_there_have_anthropics_shape(method: str, path: str, status: int) -> None:
    response = call(make_app(), method, path)
    assert response.status_code == status
    assert response.json()["type"] == "error"


def test_other_routes_keep_their_shape() -> None:
    response = call(make_app(), "POST", "/v1/messagesx")
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert "request-id" not in response.headers


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"x-api-key": "key"}, 200),
        ({"authorization": "Bearer key"}, 200),
        ({"authorization": "Bearer no", "x-api-key": "key"}, 200),
        ({"authorization": "Basic key", "x-api-key": " key "}, 200),
        ({"authorization": "Bearer key", "x-api-key": "no"}, 200),
        ({"x-api-key": "Bearer key"}, 401),
        ({"x-api-key": ""}, 401),
        ({}, 401),
    ],
)
def test_a_key_may_come_in_either_header(headers: dict[str, str], status: int) -> None:
    for path in (MESSAGES, "/v1/chat/completions"):
        response = call(make_app(api_keys=("key",)), "POST", path, json=BODY, headers=headers)
        assert response.status_code == status


def test_a_body_that_breaks_off_is_refused_in_anthropics_shape() -> None:
    async def go() -> list[Any]:
        client = Client(make_app(), MESSAGES, BODY, num_pieces=1)
        client.left.set()
        return [await client.next(), await client.next()]

    start, sent = asyncio.run(go())
    assert start["status"] == 400
    assert json.loads(sent["body"])["error"]["type"] == "invalid_request_error"


def test_messages_count_in_the_limits_of_a_key() -> None:
    service = ScriptedService()
    app = make_app(service, api_keys=("a", "b"), rate_limit_requests=2)

    def status(path: str, key: str) -> int:
        service.completion = ScriptedCompletion(*HI)
        return call(app, "POST", path, json=BODY, headers={"x-api-key": key}).status_code

    paths = (MESSAGES, "/v1/chat/completions", COUNT, MESSAGES)
    assert [status(path, "a") for path in paths] == [200, 200, 200, 429]
    assert status(MESSAGES, "b") == 200


def test_tokens_of_messages_are_set_aside_and_given_back() -> None:
    """An answer uses 13 of what is set aside."""
    service = ScriptedService()
    app = make_app(service, rate_limit_tokens=100)
    for max_tokens, status in ((85, 200), (85, 429), (10, 200)):
        service.completion = ScriptedCompletion(*HI)
        assert call(app, "POST", MESSAGES, json=BODY | {"max_tokens": max_tokens}).status_code == status


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ({"type": "any"}, "tools[1].input_schema: must describe an object, for a call to be forced"),
        ({"type": "tool", "name": "f"}, "tools[1].input_schema: must describe an object, for a call to be forced"),
        ({"type": "tool", "name": "g"}, "tool_choice.name: 'g' is not among the tools"),
    ],
)
def test_a_forced_tool_at_fault_is_told_by_the_fields_that_were_sent(choice: dict[str, Any], text: str) -> None:
    tools = [TOOLS[0], {"name": "f", "input_schema": {"type": "array"}}]
    response = ask(tools=tools, tool_choice=choice)
    assert (response.status_code, response.json()["error"]["message"]) == (400, text)


def test_what_is_refused_is_not_under_way() -> None:
    service = ScriptedService(ScriptedCompletion(*HI))
    app = make_app(service, rate_limit_concurrent=1)
    tool = {"name": "f", "input_schema": {"type": "array"}}
    wrong = BODY | {"tools": [tool], "tool_choice": {"type": "any"}}
    assert [call(app, "POST", MESSAGES, json=body).status_code for body in (wrong, wrong, BODY)] == [400, 400, 200]


def test_ignored_fields_are_named_or_refused() -> None:
    fields = {"n": 2, "thinking": {"type": "adaptive"}, "tools": TOOLS}
    for path in (MESSAGES, COUNT):
        unknown = "n" if path == MESSAGES else "max_tokens,n"
        assert ask(path=path, **fields).headers["x-mlxcel-ignored-fields"] == f"{unknown},tools,thinking"
    strict = ask(options={"strict_fields": True}, n=2)
    assert (strict.status_code, strict.json()["error"]["message"]) == (400, "n: unknown field")


def test_a_shape_is_asked_of_the_service() -> None:
    service = ScriptedService()
    ask(service, output_config={"format": {"type": "json_schema", "schema": SCHEMA}})
    assert service.asked[0][1].shape.param == "output_config.format"


def test_count_tokens_counts_the_prompt() -> None:
    response = ask(path=COUNT, system="ab")
    assert response.json() == {"input_tokens": len("ab|hi" + "enable_thinking")}


def test_the_counters_see_messages_as_they_see_chats() -> None:
    app = make_app()
    call(app, "POST", MESSAGES, json=BODY)
    assert 'mlxcel_requests_total{status="2xx"} 1.0' in call(app, "GET", "/metrics").text


# --- Anthropic's client, and a model that says what is written down


class Through(httpx2.AsyncBaseTransport):
    """Anthropic's client, which wants httpx2, on the client of the tests."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        sent = self.http.build_request(
            request.method, str(request.url), headers=request.headers.raw, content=await request.aread()
        )
        answer = await self.http.send(sent)
        return httpx2.Response(answer.status_code, headers=answer.headers.raw, content=answer.content)


def client_of(http: httpx.AsyncClient) -> anthropic.AsyncAnthropic:
    through = httpx2.AsyncClient(transport=Through(http))
    return anthropic.AsyncAnthropic(api_key="x", base_url="http://test", http_client=through, max_retries=0)


def answers(dialect: Dialect, said: Sequence[str], *bodies: dict[str, Any], template: str = TEMPLATE) -> list[Any]:
    """The message that each body gets; one with ``stream`` is read by the client's own helper."""

    async def one(client: anthropic.AsyncAnthropic, body: dict[str, Any]) -> Any:
        given = BODY | body
        if not given.pop("stream", False):
            return await client.messages.create(**given)
        async with client.messages.stream(**given) as stream:
            return await stream.get_final_message()

    async def go() -> list[Any]:
        async with talking(said, dialect, template) as http:
            client = client_of(http)
            return [await one(client, body) for body in bodies]

    return asyncio.run(asyncio.wait_for(go(), 60))


def both(dialect: Dialect, said: Sequence[str], **body: Any) -> Any:
    """The message, which is the same whole and streamed, but for its id and what the prefix cache held."""
    one, other = answers(dialect, said, body, body | {"stream": True})
    comparable = [
        message.to_dict() | {"id": "", "usage": {"output_tokens": message.usage.output_tokens}}
        for message in (one, other)
    ]
    for message in comparable:
        message.pop("stop_details", None)  # the helper's own
        for block in message["content"]:
            block["id"] = ""
            block.pop("parsed_output", None)
    assert comparable[0] == comparable[1]
    return one


@pytest.mark.parametrize("spoken", SPOKEN, ids=lambda spoken: spoken.name)
def test_a_stream_and_a_whole_message_are_the_same(spoken: Spoken) -> None:
    template = TEMPLATE.replace("{{ ending }}", "{{ " + json.dumps(spoken.prompt_end) + " }}")
    body = {"tools": TOOLS, "thinking": {"type": "adaptive"}}
    one, other = answers(spoken.dialect, spoken.said, body, body | {"stream": True}, template=template)
    for message in (one, other):
        blocks = message.content
        assert "".join(block.text for block in blocks if block.type == "text") == spoken.text
        assert "".join(block.thinking for block in blocks if block.type == "thinking") == spoken.reasoning
        assert [(block.name, block.input) for block in blocks if block.type == "tool_use"] == list(spoken.calls)
        assert message.stop_reason == ("tool_use" if spoken.calls else "end_turn")
    assert [block.type for block in one.content] == [block.type for block in other.content]
    assert one.usage.output_tokens == other.usage.output_tokens


def test_thoughts_a_text_and_calls_are_blocks_in_their_order() -> None:
    said = (f"<think>Hm</think>Well.{HERMES_CALL}{HERMES_CALL}So.",)
    message = both(QWEN, said, tools=TOOLS, thinking={"type": "enabled", "budget_tokens": 1024})
    assert [block.type for block in message.content] == ["thinking", "text", "tool_use", "tool_use", "text"]
    assert message.content[0].signature == SIGNATURE
    assert message.stop_reason == "tool_use"
    single = {"type": "auto", "disable_parallel_tool_use": True}
    kinds = [block.type for block in both(QWEN, said, tools=TOOLS, tool_choice=single).content]
    assert kinds == ["text", "tool_use"]


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "add"}])
def test_a_call_can_be_forced(choice: dict[str, Any]) -> None:
    """The model may say nothing but the call, which ``talking`` checks."""
    message = both(HERMES, (HERMES_CALL,), tools=TOOLS, tool_choice=choice)
    assert [(block.type, block.name) for block in message.content] == [("tool_use", "add")]
    assert message.stop_reason == "tool_use"


def test_a_choice_of_a_tool_that_is_not_offered_is_refused() -> None:
    with pytest.raises(anthropic.BadRequestError, match="'other' is not among the tools"):
        answers(HERMES, (HERMES_CALL,), {"tools": TOOLS, "tool_choice": {"type": "tool", "name": "other"}})


def test_a_stop_sequence_is_named() -> None:
    message = both(PLAIN, ("one two three",), stop_sequences=["four", " th", "three"])
    assert (message.content[0].text, message.stop_reason, message.stop_sequence) == ("one two", "stop_sequence", " th")


def test_an_answer_that_is_cut_off_says_where() -> None:
    message = both(HERMES, (HERMES_CALL,), tools=TOOLS, max_tokens=len(tokens_of((HERMES_CALL,))) - 1)
    assert (message.stop_reason, [block.type for block in message.content]) == ("max_tokens", ["text"])
    assert both(PLAIN, ("x" * 600,), max_tokens=1000).stop_reason == "model_context_window_exceeded"


def test_a_conversation_with_results_and_an_unfinished_answer_makes_the_prompt() -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}|{{ m.content }}|{{ m.reasoning_content }}"
        "{% for c in m.tool_calls or [] %}|{{ c.function.name }}:{{ c.function.arguments.a }}{% endfor %}]{% endfor %}"
        "{% if add_generation_prompt %}>{% endif %}"
    )
    conversation = [
        {"role": "user", "content": "2+2?"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm", "signature": SIGNATURE},
                {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 2}},
            ],
        },
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_1", "content": "4"}]},
    ]
    prompt = "[system|s|][user|2+2?|][assistant||Hm|add:2][tool|4|]>"
    begun = [*conversation, {"role": "assistant", "content": "It is"}]
    begun_prompt = prompt.removesuffix(">") + "[assistant|It is"

    async def go() -> list[int]:
        async with talking(("x",), PLAIN, template) as http:
            client = client_of(http)
            counts = []
            for messages in (conversation, begun):
                given: Any = {"model": "small", "messages": messages, "system": "s"}
                counts.append((await client.messages.count_tokens(**given)).input_tokens)
                usage = (await client.messages.create(**given, max_tokens=9)).usage
                assert counts[-1] == usage.input_tokens + (usage.cache_read_input_tokens or 0)
            return counts

    assert asyncio.run(asyncio.wait_for(go(), 60)) == [len(prompt), len(begun_prompt)]


def test_each_failure_is_the_right_exception_of_the_client() -> None:
    async def caught(go: Callable[[Any], Awaitable[Any]], service: ScriptedService, **options: Any) -> Any:
        transport = httpx.ASGITransport(make_app(service, **options))
        async with httpx.AsyncClient(transport=transport) as http:
            client = client_of(http)
            with pytest.raises(anthropic.APIStatusError) as failure:
                await go(client)
            assert failure.value.request_id
            return failure.value

    async def create(client: Any) -> Any:
        return await client.messages.create(**BODY)

    async def stream(client: Any) -> Any:
        async with client.messages.stream(**BODY) as opened:
            return await opened.get_final_message()

    async def go() -> None:
        for failure, kind, name in (
            (errors.InvalidRequest("no"), anthropic.BadRequestError, "invalid_request_error"),
            (errors.ModelNotFound("x"), anthropic.NotFoundError, "not_found_error"),
            (errors.RateLimited("1 request", 9), anthropic.RateLimitError, "rate_limit_error"),
            (errors.Overloaded(), anthropic.InternalServerError, "overloaded_error"),
            (errors.BackendError(), anthropic.InternalServerError, "api_error"),
        ):
            for way in (create, stream):
                error = await caught(way, ScriptedService(refused=failure))
                assert (isinstance(error, kind), error.type) == (True, name)
        error = await caught(create, ScriptedService(), api_keys=("other",))
        assert isinstance(error, anthropic.AuthenticationError)
        late = ScriptedService(ScriptedCompletion(HI[0], errors.BackendError()))
        error = await caught(stream, late)
        assert (error.status_code, error.type) == (200, "api_error")

    asyncio.run(asyncio.wait_for(go(), 60))


# --- a real server


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory, tiny_model_dir: Path) -> Iterator[ServerProcess]:
    """One that asks for a key, with a model of random weights: it calls nothing, and is quick also where a core is
    shared with others."""
    folder = tmp_path_factory.mktemp("tiny")
    with serving(folder, MODEL=str(tiny_model_dir), API_KEYS="secret") as process:
        yield process


def test_anthropics_client_works_unchanged(server: ServerProcess) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    given: Any = {
        "model": client.models.list().data[0].id,
        "max_tokens": 30,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "extra_body": {"temperature": 0},
    }
    message = client.messages.create(**given)
    assert message.content[0].type == "text"
    assert "Paris" in message.content[0].text
    assert message.stop_reason == "end_turn"
    with client.messages.stream(**given) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert (text, final.content[0].text) == (message.content[0].text,) * 2  # type: ignore[union-attr]
    assert final.usage.output_tokens == message.usage.output_tokens
    counted = client.messages.count_tokens(model=given["model"], messages=given["messages"])
    for usage in (message.usage, final.usage):
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted.input_tokens
    stopped = client.messages.create(**given, stop_sequences=["Paris"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "Paris")
    begun = [
        *given["messages"],
        {"role": "assistant", "content": message.content[0].text.partition("Paris")[0].rstrip()},
    ]
    assert client.messages.create(**given | {"messages": begun}).content[0].text.startswith(" Paris")  # type: ignore[union-attr]
    beta = client.beta.messages.create(**given, betas=["token-counting-2024-11-01"])
    assert beta.content[0].text == message.content[0].text  # type: ignore[union-attr]
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        client.messages.create(**given | {"extra_body": {"temperature": 2}})
    with pytest.raises(anthropic.NotFoundError):
        client.messages.create(**given | {"model": "no-such-model"})


def test_the_prefix_cache_shows_in_the_usage_from_the_first_event_on(tiny: ServerProcess) -> None:
    client = anthropic.Anthropic(base_url=tiny.url, api_key="secret", max_retries=0)
    given: Any = {"model": client.models.list().data[0].id, "max_tokens": 2}
    given["messages"] = [{"role": "user", "content": " ".join(map(str, range(1000, 1200)))}]
    fresh = client.messages.create(**given).usage
    num_prompt = fresh.input_tokens + (fresh.cache_read_input_tokens or 0)
    with client.messages.stream(**given) as stream:
        first = next(event.message.usage for event in stream if event.type == "message_start")
        last = stream.get_final_message().usage
    for usage in (first, last):
        assert (usage.cache_read_input_tokens or 0) > num_prompt / 2
        assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == num_prompt


class City(BaseModel):
    name: Literal["Paris", "Rome"]
    is_capital: bool


def test_the_clients_structured_output_is_valid(server: ServerProcess) -> None:
    client = anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0)
    question = "Which city has the Eiffel tower, and is it a capital? Answer with JSON."
    message = client.messages.parse(
        model=client.models.list().data[0].id,
        max_tokens=200,
        messages=[{"role": "user", "content": question}],
        output_format=City,
    )
    assert isinstance(message.parsed_output, City)


def test_a_conversation_with_calls_and_results_is_taken_by_a_real_server(tiny: ServerProcess) -> None:
    client = anthropic.Anthropic(base_url=tiny.url, api_key="secret", max_retries=0)
    model = client.models.list().data[0].id
    use = {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 1}}
    result = {"type": "tool_result", "tool_use_id": "call_1", "content": "1", "is_error": True}
    conversation: Any = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [use]},
        {"role": "user", "content": [result]},
    ]
    message = client.messages.create(model=model, max_tokens=4, messages=conversation, tools=TOOLS)  # type: ignore[arg-type]
    assert message.usage.output_tokens <= 4
    with pytest.raises(anthropic.AuthenticationError):
        anthropic.Anthropic(base_url=tiny.url, api_key="wrong", max_retries=0).messages.create(**BODY)
    with pytest.raises(anthropic.BadRequestError, match=r"tools\[0\]\.type"):
        client.messages.create(
            model=model,
            max_tokens=4,
            messages=conversation[:1],
            tools=[{"type": "web_search_20250305", "name": "web_search"}],
        )
