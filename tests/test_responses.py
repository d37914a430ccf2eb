"""Responses over HTTP: the object, the events in their order, conversations that go on, and who finds what again."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Any, get_args

import httpx
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.responses import Response, ResponseStreamEvent
from starlette.applications import Starlette

from app import errors
from app.completion import Delta
from app.text.tool_calls import ToolCall
from tests.scripted import Client, ScriptedCompletion, ScriptedService, call, entry, events, make_app
from tests.serving import ServerProcess
from tests.spoken import HERMES, HERMES_CALL, QWEN, SPOKEN, TOOLS, Spoken
from tests.talking import talking
from tests.test_structured import Colour

PATH = "/v1/responses"
HI = (Delta(0, "Hel"), Delta(0, "lo"), Delta(0, "", (), "stop"))
FLAT = [{"type": "function", **tool["function"]} for tool in TOOLS]
ADD = ToolCall("call_1", "add", '{"a": 2}')
ALL_KINDS = (
    Delta(0, reasoning="H"),
    Delta(0, reasoning="m."),
    Delta(0, "I "),
    Delta(0, "add."),
    Delta(0, calls=(ADD, ToolCall("call_2", "get.it", "{}"))),
    Delta(0, "", (), "tool_calls"),
)
EVENTS = {
    get_args(kind.model_fields["type"].annotation)[0]: kind for kind in get_args(get_args(ResponseStreamEvent)[0])
}
# One letter for each kind of event, to say in which order they may come.
LETTERS = {
    "response.created": "c",
    "response.in_progress": "p",
    "response.output_item.added": "A",
    "response.content_part.added": "P",
    "response.output_text.delta": "t",
    "response.output_text.done": "T",
    "response.reasoning_text.delta": "r",
    "response.reasoning_text.done": "R",
    "response.content_part.done": "Q",
    "response.function_call_arguments.delta": "f",
    "response.function_call_arguments.done": "F",
    "response.output_item.done": "D",
    "response.completed": "!",
    "response.incomplete": "!",
    "response.failed": "!",
}
ORDER = re.compile(r"cp(A(P(t*T|r+R)Q|fF)D)*!")


class Talk:
    """An application whose service says what the test puts before each request."""

    def __init__(self, **options: Any) -> None:
        self.service = ScriptedService()
        self.app: Starlette = make_app(self.service, **options)

    def ask(self, *script: Any, key: str = "", **body: Any) -> httpx.Response:
        self.service.completion = ScriptedCompletion(*(script or HI))
        return self.call("POST", key=key, json={"input": "hi", **body})

    def call(self, method: str, path: str = "", key: str = "", **more: Any) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        return call(self.app, method, PATH + path, headers=headers, **more)

    @property
    def messages(self) -> Any:
        """The chat that the service was asked for last."""
        return self.service.asked[-1][0]


def checked(found: Sequence[Any]) -> Any:
    """The response that a stream ends with: its events are of the public types, in order, and lead to just that."""
    for event in found:
        EVENTS[event["type"]].model_validate(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert ORDER.fullmatch("".join(LETTERS[event["type"]] for event in found))
    assert found[0]["response"]["status"] == found[1]["response"]["status"] == "in_progress"
    output: list[Any] = []
    for event in found[2:-1]:
        kind, _, what = event["type"].removeprefix("response.").rpartition(".")
        assert event["output_index"] == len(output) - (kind != "output_item" or what != "added")
        if kind == "output_item" and what == "added":
            output.append(event["item"])
            continue
        item = output[-1]
        if kind == "output_item":
            assert {**item, "status": event["item"]["status"]} == event["item"]
            output[-1] = event["item"]
            continue
        assert event["item_id"] == item["id"]
        if kind == "content_part" and what == "added":
            item["content"].append(event["part"])
        elif kind == "content_part":
            assert event["part"] == item["content"][0]
        elif kind == "function_call_arguments":
            item["arguments"] = item["arguments"] + event["delta"] if what == "delta" else event["arguments"]
        elif what == "delta":
            item["content"][0]["text"] += event["delta"]
            if kind == "output_text":
                item["content"][0]["logprobs"] += event["logprobs"]
        else:
            assert event["text"] == item["content"][0]["text"]
            assert event.get("logprobs", []) == item["content"][0].get("logprobs", [])
    last = found[-1]["response"]
    assert found[-1]["type"] == f"response.{last['status']}"
    if last["status"] != "failed":
        assert last["output"] == output
    return last


def bare(response: Any) -> Any:
    """A response without its ids and times."""
    text = re.sub(r"_[0-9a-f]{32}", "", json.dumps(response))
    return {**json.loads(text), "created_at": 0, "completed_at": 0}


def test_a_response_has_the_public_shape() -> None:
    talk = Talk()
    metadata = {"a": "b"}
    found = talk.ask(*ALL_KINDS, metadata=metadata, instructions="Be brief.", tools=FLAT, model="small").json()
    Response.model_validate(found)
    assert found["id"].startswith("resp_")
    assert found["completed_at"] >= found["created_at"]
    assert bare(found) == {
        "id": "resp",
        "object": "response",
        "created_at": 0,
        "completed_at": 0,
        "background": False,
        "service_tier": "default",
        "truncation": "disabled",
        "instructions": "Be brief.",
        "max_output_tokens": None,
        "metadata": metadata,
        "parallel_tool_calls": True,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "tool_choice": "auto",
        "tools": FLAT,
        "top_logprobs": 0,
        "model": "org/small",
        "store": True,
        "temperature": 0.7,
        "top_p": 1.0,
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "output": [
            {
                "id": "rs_0",
                "type": "reasoning",
                "status": "completed",
                "summary": [],
                "content": [{"type": "reasoning_text", "text": "Hm."}],
            },
            {
                "id": "msg_1",
                "type": "message",
                "status": "completed",
                "role": "assistant",
                "content": [{"type": "output_text", "text": "I add.", "annotations": [], "logprobs": []}],
            },
            *(
                {
                    "id": f"fc_{index}",
                    "type": "function_call",
                    "status": "completed",
                    "call_id": call_id,
                    "name": name,
                    "arguments": arguments,
                }
                for index, call_id, name, arguments in ((2, "call_1", "add", '{"a": 2}'), (3, "call_2", "get.it", "{}"))
            ),
        ],
        "usage": {
            "input_tokens": 10,
            "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 0},
            "output_tokens": 3,
            "output_tokens_details": {"reasoning_tokens": 2},
            "total_tokens": 13,
        },
    }


def test_a_stream_names_its_events_and_leads_to_the_same_response() -> None:
    talk = Talk()
    whole = talk.ask(*ALL_KINDS, tools=FLAT).json()
    stream = talk.ask(*ALL_KINDS, tools=FLAT, stream=True)
    assert stream.headers["content-type"].startswith("text/event-stream")
    found = events(stream)
    names = [line.removeprefix("event: ") for line in stream.text.splitlines() if line.startswith("event: ")]
    assert names == [event["type"] for event in found]
    assert bare(checked(found)) == bare(whole)
    assert "".join(LETTERS[name] for name in names) == "cpAPrrRQDAPttTQDAfFDAfFD!"


def test_an_answer_cut_off_is_incomplete() -> None:
    script = (Delta(0, "Once"), Delta(0, " upon", (), "length"))
    whole = Talk().ask(*script).json()
    assert (whole["status"], whole["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (whole["output"][0]["status"], whole["completed_at"]) == ("incomplete", None)
    found = events(Talk().ask(*script, stream=True))
    assert found[-1]["type"] == "response.incomplete"
    assert bare(checked(found)) == bare(whole)


def test_an_answer_of_nothing_is_an_empty_message() -> None:
    script = (Delta(0, "", (), "stop"),)
    (item,) = checked(events(Talk().ask(*script, stream=True)))["output"]
    assert item["content"][0]["text"] == ""
    (item,) = Talk().ask(*script).json()["output"]
    assert (item["type"], item["status"]) == ("message", "completed")


def test_text_after_a_call_is_another_message() -> None:
    script = (Delta(0, "a"), Delta(0, calls=(ADD,)), Delta(0, "b"), Delta(0, "", (), "tool_calls"))
    output = checked(events(Talk().ask(*script, tools=FLAT, stream=True)))["output"]
    assert [item["type"] for item in output] == ["message", "function_call", "message"]


def test_log_probabilities_are_those_of_the_text_alone() -> None:
    script = (
        Delta(0, "", (entry("<think>"),)),
        Delta(0, reasoning="Hm", logprobs=(entry("Hm"),)),
        Delta(0, "", (entry("\ufffd", b"\xf0\x9f"),)),  # half a character, which shows with the next
        Delta(0, "\U0001f431", (entry("\ufffd", b"\x90\xb1", (("x", -1.0),)),)),
        Delta(0, "!", (entry("!"),)),
        Delta(0, "", (entry("<call>"),)),
        Delta(0, calls=(ADD,), logprobs=(entry("</call>"),)),
        Delta(0, "", (), "tool_calls"),
    )
    asked = {"include": ["message.output_text.logprobs"], "top_logprobs": 1, "tools": FLAT}
    talk = Talk()
    whole = talk.ask(*script, **asked).json()
    assert talk.service.asked[0][1].sampling.num_logprobs == 1
    part = next(item for item in whole["output"] if item["type"] == "message")["content"][0]
    assert [found["bytes"] for found in part["logprobs"]] == [[0xF0, 0x9F], [0x90, 0xB1], [ord("!")]]
    assert part["logprobs"][1]["top_logprobs"] == [{"token": "x", "logprob": -1.0, "bytes": [120]}]
    assert bare(checked(events(talk.ask(*script, **asked, stream=True)))) == bare(whole)
    plain = talk.ask(*script, tools=FLAT).json()
    assert next(item for item in plain["output"] if item["type"] == "message")["content"][0]["logprobs"] == []


PIECES = st.text("ab\U0001f431", max_size=2)
DELTAS = st.builds(
    Delta,
    st.just(0),
    PIECES,
    st.lists(st.sampled_from([entry("a"), entry("b")]), max_size=2).map(tuple),
    reasoning=PIECES,
    calls=st.lists(st.just(ADD), max_size=2).map(tuple),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(DELTAS, max_size=6), st.sampled_from(["stop", "length", "tool_calls"]))
def test_any_answer_is_told_in_order_and_in_full(deltas: list[Delta], reason: str) -> None:
    script = [*deltas, Delta(0, "", (), reason)]
    asked = {"tools": FLAT, "include": ["message.output_text.logprobs"]}
    talk = Talk()
    told = checked(events(talk.ask(*script, stream=True, **asked)))
    assert bare(told) == bare(talk.ask(*script, **asked).json())
    texts = {"message": "", "reasoning": ""}
    for item in told["output"]:
        if item["type"] in texts:
            texts[item["type"]] += item["content"][0]["text"]
    assert texts == {
        "message": "".join(delta.text for delta in deltas),
        "reasoning": "".join(delta.reasoning for delta in deltas),
    }
    assert sum(item["type"] == "function_call" for item in told["output"]) == sum(len(one.calls) for one in deltas)
    assert told["status"] == ("incomplete" if reason == "length" else "completed")


# --- failures


def test_a_failure_after_the_headers_is_the_last_event_and_nothing_is_kept() -> None:
    talk = Talk()
    found = events(talk.ask(Delta(0, "Hel"), errors.BackendError(), stream=True))
    last = found[-1]
    EVENTS[last["type"]].model_validate(last)
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"] == {"code": "server_error", "message": "inference backend error"}
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    assert talk.call("GET", f"/{last['response']['id']}").status_code == 404


def test_a_failure_before_is_a_status() -> None:
    talk = Talk()
    assert talk.ask(errors.BackendError()).status_code == 500
    talk.service.completion = ScriptedCompletion(refused=errors.Overloaded())
    assert talk.call("POST", json={"input": "hi", "stream": True}).status_code == 503


def test_what_the_service_refuses_is_told_in_the_names_of_a_response() -> None:
    talk = Talk()
    talk.service.refused = errors.InvalidRequest("The prompt is too long.", "messages", "context_length_exceeded")
    refused = talk.ask()
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "input"
    assert refused.json()["error"]["code"] == "context_length_exceeded"
    talk.service.refused = errors.InvalidRequest("response_format: nothing can fit it", "response_format")
    assert talk.ask().json()["error"]["message"] == "text.format: nothing can fit it"


@pytest.mark.parametrize("field", ["background", "conversation", "prompt", "max_tokens", "response_format", "messages"])
def test_what_is_not_done_is_refused_by_name(field: str) -> None:
    refused = Talk().ask(**{field: {"type": "x"}})
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == field


def test_ignored_fields_are_named() -> None:
    ignored = Talk().ask(flab=1, reasoning={"effort": "low"}).headers["x-mlxcel-ignored-fields"]
    assert ignored == "flab,reasoning.effort"
    assert Talk(strict_fields=True).ask(flab=1).status_code == 400


def test_requests_are_counted_as_others_are() -> None:
    talk = Talk(rate_limit_requests=1)
    assert talk.ask().status_code == 200
    assert talk.ask().status_code == 429


def test_a_client_that_leaves_cancels_and_nothing_is_kept() -> None:
    talk = Talk()
    completion = talk.service.completion = ScriptedCompletion(Delta(0, "a"), None)

    async def go() -> None:
        client = Client(talk.app, PATH, {"input": "hi", "stream": True})
        while b"output_text.delta" not in (await client.next()).get("body", b""):
            pass
        await client.leave()

    asyncio.run(go())
    assert completion.num_closed == 1
    assert len(talk.app.state.wiring.responses) == 0


# --- conversations


def test_a_conversation_goes_on_from_what_is_kept_without_its_instructions() -> None:
    talk = Talk()
    one = talk.ask(
        instructions="Be brief.", input=[{"role": "system", "content": "S"}, {"role": "user", "content": "1"}]
    )
    assert [message["content"] for message in talk.messages] == ["Be brief.", "S", "1"]
    call_item = {"type": "function_call_output", "call_id": "call_1", "output": "2"}
    two = talk.ask(*ALL_KINDS, previous_response_id=one.json()["id"], input="2", instructions="Be long.", tools=FLAT)
    assert [(message["role"], message["content"]) for message in talk.messages] == [
        ("system", "Be long."),
        ("system", "S"),
        ("user", "1"),
        ("assistant", "Hello"),
        ("user", "2"),
    ]
    assert two.json()["previous_response_id"] == one.json()["id"]
    assert talk.call("DELETE", f"/{one.json()['id']}").status_code == 200  # what went on from it has all of it
    talk.ask(previous_response_id=two.json()["id"], input=[call_item], stream=True)
    *_, turn, result = talk.messages
    assert [message["content"] for message in talk.messages] == ["S", "1", "Hello", "2", "I add.", "2"]
    assert turn["reasoning_content"] == "Hm."
    assert [one["function"]["name"] for one in turn["tool_calls"]] == ["add", "get.it"]
    assert result == {"role": "tool", "tool_call_id": "call_1", "content": "2"}


def test_items_can_be_referred_to_by_their_ids() -> None:
    talk = Talk()
    one = talk.ask(input="1").json()
    (given,) = talk.call("GET", f"/{one['id']}/input_items").json()["data"]
    references = [{"type": "item_reference", "id": item["id"]} for item in (given, one["output"][0])]
    two = talk.ask(input=[*references, {"role": "user", "content": "2"}]).json()
    assert [message["content"] for message in talk.messages] == ["1", "Hello", "2"]
    talk.call("DELETE", f"/{one['id']}")
    talk.ask(previous_response_id=two["id"], input="3")
    assert [message["content"] for message in talk.messages] == ["1", "Hello", "2", "Hello", "3"]
    for wrong in (one["output"][0]["id"], f"msg_{two['id'].removeprefix('resp_')}_9", "msg_1", ""):
        refused = talk.ask(input=[{"type": "item_reference", "id": wrong}])
        assert refused.status_code == 400
        assert refused.json()["error"]["param"] == "input[0].id"


def test_what_is_referred_to_is_not_more_than_a_body_may_be() -> None:
    talk = Talk(max_body_bytes=4000)
    one = talk.ask(input="x" * 1000).json()
    (given,) = talk.call("GET", f"/{one['id']}/input_items").json()["data"]
    reference = {"id": given["id"]}
    assert talk.ask(input=[reference] * 3).status_code == 200
    refused = talk.ask(input=[reference] * 4)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "input[3].id")


def test_a_choice_that_is_nested_too_deeply_is_refused() -> None:
    choice: dict[str, Any] = {"type": "function", "name": "f"}
    for _ in range(240):
        choice = {"type": "allowed_tools", "mode": "auto", "tools": [choice]}
    assert Talk(max_body_bytes=1 << 20).ask(input="x", tool_choice=choice).status_code == 400


def test_what_is_kept_is_read_and_forgotten() -> None:
    talk = Talk()
    made = talk.ask(*ALL_KINDS, tools=FLAT).json()
    streamed = checked(events(talk.ask(stream=True)))
    for response in (made, streamed):
        assert talk.call("GET", f"/{response['id']}").json() == response
    deleted = talk.call("DELETE", f"/{made['id']}")
    assert deleted.json() == {"id": made["id"], "object": "response", "deleted": True}
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
        missing = talk.call(method, f"/{made['id']}{path}")
        assert missing.status_code == 404
        assert missing.json()["error"]["code"] == "response_not_found"
    refused = talk.ask(previous_response_id=made["id"])
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "previous_response_id"
    assert refused.json()["error"]["code"] == "previous_response_not_found"
    assert talk.call("GET", f"/{streamed['id']}").status_code == 200


def test_what_shall_not_be_kept_is_not() -> None:
    talk = Talk()
    made = talk.ask(store=False).json()
    assert made["store"] is False
    assert talk.call("GET", f"/{made['id']}").status_code == 404
    off = Talk(response_store=0)
    made = off.ask().json()
    assert made["store"] is False
    assert off.call("GET", f"/{made['id']}").status_code == 404
    assert off.ask(store=True).json()["error"]["param"] == "store"
    assert off.ask(store=False).status_code == 200


def test_no_key_finds_what_another_has_made() -> None:
    talk = Talk(api_keys=("a", "b"))
    made = talk.ask(key="a").json()
    for method, path in (("GET", ""), ("DELETE", ""), ("GET", "/input_items")):
        assert talk.call(method, f"/{made['id']}{path}", key="b").status_code == 404
        assert talk.call(method, f"/{made['id']}{path}").status_code == 401
    refused = talk.ask(key="b", previous_response_id=made["id"]).json()["error"]
    never = talk.ask(key="b", previous_response_id="resp_0").json()["error"]
    assert refused["code"] == never["code"] == "previous_response_not_found"
    reference = {"type": "item_reference", "id": made["output"][0]["id"]}
    assert talk.ask(key="b", input=[reference]).status_code == 400
    assert talk.call("GET", f"/{made['id']}", key="a").json() == made
    assert talk.ask(key="a", input=[reference]).status_code == 200


def test_input_items_come_in_pages() -> None:
    talk = Talk()
    items = [{"role": "user", "content": str(number)} for number in range(5)]
    path = f"/{talk.ask(input=items).json()['id']}/input_items"

    def page(**query: Any) -> tuple[list[str], bool]:
        found = talk.call("GET", path, params=query).json()
        data = found["data"]
        if data:
            assert (found["first_id"], found["last_id"]) == (data[0]["id"], data[-1]["id"])
        return [item["content"][0]["text"] for item in data], found["has_more"]

    assert page() == (["4", "3", "2", "1", "0"], False)
    assert page(limit=2, order="asc") == (["0", "1"], True)
    ids = [item["id"] for item in talk.call("GET", path).json()["data"]]
    assert page(after=ids[1], limit=2) == (["2", "1"], True)
    assert page(after=ids[1], limit=3) == (["2", "1", "0"], False)
    assert page(after=ids[-1]) == ([], False)
    for query in (
        {"limit": 0},
        {"limit": "x"},
        {"limit": 101},
        {"limit": "9" * 5000},
        {"limit": "0" * 5000},
        {"order": "x"},
        {"after": "x"},
    ):
        refused = talk.call("GET", path, params=query)
        assert refused.status_code == 400
        assert [refused.json()["error"]["param"]] == list(query)


def test_what_is_kept_is_not_streamed_again_and_takes_no_other_method() -> None:
    talk = Talk()
    path = f"/{talk.ask().json()['id']}"
    for query in ({"stream": "true"}, {"starting_after": "3"}):
        refused = talk.call("GET", path, params=query)
        assert refused.status_code == 400
        assert [refused.json()["error"]["param"]] == list(query)
    assert talk.call("GET", path, params={"stream": "false"}).status_code == 200
    wrong = talk.call("POST", path, json={})
    assert wrong.status_code == 405
    assert {"GET", "DELETE"} <= set(wrong.headers["allow"].replace(" ", "").split(","))
    assert talk.call("POST", f"{path}/cancel").status_code == 404


# --- models of several families, read by OpenAI's client


def spoken_answers(spoken: Spoken, *bodies: dict[str, Any]) -> list[Any]:
    async def go() -> list[Any]:
        got = []
        async with talking(spoken.said, spoken.dialect) as http:
            client = openai.AsyncOpenAI(api_key="x", base_url="http://test/v1", http_client=http, max_retries=0)
            for body in bodies:
                ending = {"chat_template_kwargs": {"ending": spoken.prompt_end}}
                answer = await client.responses.create(model="small", input="hi", extra_body=ending, **body)
                got.append([event async for event in answer] if body.get("stream") else answer)
        return got

    return asyncio.run(asyncio.wait_for(go(), 60))


@pytest.mark.parametrize("spoken", SPOKEN, ids=lambda spoken: spoken.name)
def test_a_stream_and_a_whole_response_are_the_same(spoken: Spoken) -> None:
    whole, streamed = spoken_answers(spoken, {"tools": FLAT}, {"tools": FLAT, "stream": True})
    found = [event.model_dump(mode="json", exclude_unset=True) for event in streamed]
    # Ids of calls are drawn at random, unless the model gives them.
    last = re.sub(r"call_[0-9a-f]{32}", "call", json.dumps(bare(checked(found))))
    first = re.sub(r"call_[0-9a-f]{32}", "call", json.dumps(bare(whole.model_dump(mode="json", exclude_unset=True))))
    usages = [json.loads(one).pop("usage")["output_tokens"] for one in (first, last)]
    assert usages[0] == usages[1]
    assert json.loads(first)["output"] == json.loads(last)["output"]
    assert whole.output_text == spoken.text
    assert "".join(item.content[0].text for item in whole.output if item.type == "reasoning") == spoken.reasoning
    calls = [(item.name, json.loads(item.arguments)) for item in whole.output if item.type == "function_call"]
    assert calls == list(spoken.calls)


def test_a_call_that_is_cut_off_is_text_and_incomplete() -> None:
    spoken = Spoken("cut", HERMES, (HERMES_CALL,))
    (whole,) = spoken_answers(spoken, {"tools": FLAT, "max_output_tokens": 20})
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.output_text == HERMES_CALL[:20]


def test_only_one_call_where_more_are_not_wanted() -> None:
    spoken = Spoken("two", QWEN, (f"{HERMES_CALL}\n{HERMES_CALL}",))
    (whole,) = spoken_answers(spoken, {"tools": FLAT, "parallel_tool_calls": False})
    assert [item.type for item in whole.output] == ["function_call"]


# --- a running server


def test_the_embedded_model_with_the_openai_client(server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    model = client.models.list().data[0].id
    asked: dict[str, Any] = {"model": model, "temperature": 0, "max_output_tokens": 30}
    one = client.responses.create(input="What is the capital of France?", metadata={"topic": "towns"}, **asked)
    assert "Paris" in one.output_text
    assert (one.status, one.metadata) == ("completed", {"topic": "towns"})
    assert one.usage is not None
    assert one.usage.total_tokens == one.usage.input_tokens + one.usage.output_tokens
    assert client.responses.retrieve(one.id).to_dict() == one.to_dict()

    stream = client.responses.create(input="What is the capital of France?", stream=True, **asked)
    last = checked([event.model_dump(mode="json", exclude_unset=True) for event in stream])
    assert last["output"][0]["content"][0]["text"] == one.output_text

    follow: Any = [{"role": "user", "content": "Say it again."}]
    with client.responses.stream(input=follow, previous_response_id=one.id, **asked) as helped:
        pieces = "".join(event.delta for event in helped if event.type == "response.output_text.delta")
        two = helped.get_final_response()
    assert (two.output_text, two.previous_response_id) == (pieces, one.id)
    history = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": one.output_text},
        *follow,
    ]
    chat = client.chat.completions.create(model=model, messages=history, temperature=0, max_tokens=30)  # type: ignore[arg-type]
    assert chat.choices[0].message.content == two.output_text
    again = client.responses.create(input=history, store=False, **asked)  # type: ignore[arg-type]
    assert again.output_text == two.output_text

    items = client.responses.input_items.list(two.id, order="asc")
    assert [item.content[0].text for item in items] == ["Say it again."]  # type: ignore[union-attr]
    client.responses.delete(one.id)
    for gone in (one.id, again.id):
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve(gone)
    assert client.responses.retrieve(two.id).output_text == two.output_text
    with pytest.raises(openai.BadRequestError, match="previous_response_id: ") as lost:
        client.responses.create(input="x", previous_response_id=one.id, **asked)
    assert lost.value.code == "previous_response_not_found"
    with pytest.raises(openai.BadRequestError, match="background"):
        client.responses.create(input="x", background=True, **asked)


def test_a_parsed_response_of_the_embedded_model(server: ServerProcess) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    done = client.responses.parse(
        model=client.models.list().data[0].id,
        input="Name a colour. Answer in JSON with name and is_warm.",
        text_format=Colour,
        temperature=0,
        max_output_tokens=40,
    )
    assert isinstance(done.output_parsed, Colour)
    assert done.status == "completed"
