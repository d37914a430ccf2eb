"""Messages and the events they grow by, without HTTP."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.message_answer import SIGNATURE, Blocks, MessageAnswer, Thoughts
from app.completion import Delta, Timings, Usage
from app.text.tool_calls import ToolCall
from tests.scripted import ScriptedCompletion

ADD = ToolCall("call_1", "add", '{"a": 123456789012345678901234567890}')


def whole(*deltas: Delta, thoughts: Thoughts = "shown", max_tokens: int = 100) -> dict[str, Any]:
    usage = Usage(prompt_tokens=10, cached_tokens=4, completion_tokens=3)
    answer = MessageAnswer("m", max_tokens, thoughts, "").whole({0: list(deltas)}, usage, Timings())
    read: dict[str, Any] = orjson.loads(orjson.dumps(answer))
    return read


def kinds(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("content_block_") + str(event["index"]) for event in events]


def test_blocks_follow_each_other_and_end_before_the_next_begins() -> None:
    blocks = Blocks("shown")
    events = blocks.grow(Delta(0, reasoning="H")) + blocks.grow(Delta(0, "W", reasoning="m"))
    events += blocks.grow(Delta(0, "ell")) + blocks.grow(Delta(0, calls=(ADD, ADD))) + blocks.grow(Delta(0, "So"))
    events += blocks.end()
    first = ["start0", "delta0", "delta0", "delta0", "stop0", "start1", "delta1", "delta1", "stop1"]
    calls = ["start2", "delta2", "stop2", "start3", "delta3", "stop3"]
    assert kinds(events) == [*first, *calls, "start4", "delta4", "stop4"]
    assert events[3]["delta"] == {"type": "signature_delta", "signature": SIGNATURE}
    assert blocks.end() == []


def test_a_message_has_the_blocks_in_their_order() -> None:
    answer = whole(
        Delta(0, "Well", reasoning="Hm"),
        Delta(0, ".", calls=(ADD,)),
        Delta(0, "So"),
        Delta(0, finish_reason="tool_calls", stop_string="x"),
    )
    assert answer["content"] == [
        {"type": "thinking", "thinking": "Hm", "signature": SIGNATURE},
        {"type": "text", "text": "Well."},
        {"type": "tool_use", "id": "call_1", "name": "add", "input": {"a": 123456789012345678901234567890.0}},
        {"type": "text", "text": "So"},
    ]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("tool_use", None)
    assert answer["usage"] == {
        "input_tokens": 6,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": 4,
        "output_tokens": 3,
    }
    assert answer["id"].startswith("msg_")
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", "m")


def test_a_calls_input_is_given_out_as_the_model_wrote_it() -> None:
    nested = '{"a": ' + "[" * 500 + "]" * 500 + "}"
    answer = MessageAnswer("m", 9, "shown", "").whole(
        {0: [Delta(0, calls=(ToolCall("x", "f", nested),), finish_reason="stop")]}, Usage(), Timings()
    )
    assert nested.encode() in orjson.dumps(answer)


@pytest.mark.parametrize(
    ("thoughts", "content"),
    [
        ("shown", [{"type": "thinking", "thinking": "Hm", "signature": SIGNATURE}, {"type": "text", "text": "!"}]),
        ("omitted", [{"type": "thinking", "thinking": "", "signature": SIGNATURE}, {"type": "text", "text": "!"}]),
        ("unasked", [{"type": "text", "text": "!"}]),
    ],
)
def test_thoughts_are_shown_as_asked(thoughts: Thoughts, content: list[Any]) -> None:
    assert whole(Delta(0, reasoning="Hm"), Delta(0, "!", finish_reason="stop"), thoughts=thoughts)["content"] == content


@pytest.mark.parametrize(
    ("last", "max_tokens", "stop"),
    [
        (Delta(0, finish_reason="stop"), 100, ("end_turn", None)),
        (Delta(0, finish_reason="stop", stop_string="END"), 100, ("stop_sequence", "END")),
        (Delta(0, finish_reason="tool_calls"), 100, ("tool_use", None)),
        (Delta(0, finish_reason="length"), 3, ("max_tokens", None)),
        (Delta(0, finish_reason="length"), 4, ("model_context_window_exceeded", None)),
    ],
)
def test_the_reason_to_stop(last: Delta, max_tokens: int, stop: tuple[str, str | None]) -> None:
    answer = whole(last, max_tokens=max_tokens)
    assert (answer["stop_reason"], answer["stop_sequence"]) == stop
    assert answer["content"] == []


DELTAS = st.lists(
    st.builds(
        Delta,
        st.just(0),
        st.text("ab", max_size=2),
        st.just(()),
        st.none(),
        st.text("xy", max_size=2),
        st.lists(st.just(ADD), max_size=2).map(tuple),
    ),
    max_size=6,
)


@given(DELTAS, st.sampled_from(["shown", "omitted", "unasked"]))
def test_a_stream_says_what_the_whole_message_says(deltas: list[Delta], thoughts: Thoughts) -> None:
    deltas = [*deltas, Delta(0, finish_reason="stop")]

    async def stream() -> list[Any]:
        answer = MessageAnswer("m", 100, thoughts, "")
        return [event async for event in answer.events(ScriptedCompletion(*deltas))]  # type: ignore[arg-type]

    events = [orjson.loads(raw.partition(b"\ndata: ")[2]) for raw in asyncio.run(stream())]
    content: list[Any] = []
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(content)
            content.append(dict(event["content_block"]))
        elif event["type"] == "content_block_delta":
            assert event["index"] == len(content) - 1
            for name, piece in event["delta"].items():
                if name == "partial_json":
                    content[-1]["input"] = orjson.loads(piece)
                elif name != "type":
                    content[-1][name] += piece
    answer = whole(*deltas, thoughts=thoughts)
    assert content == answer["content"]
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"] == events[0]["message"]["usage"] == answer["usage"]
