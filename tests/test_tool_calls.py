"""Calls and reasoning on the whole way: tokens of a played engine in, HTTP answers out, read by OpenAI's client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion

from app.text.dialect import Dialect
from tests.spoken import GPT_OSS, HERMES, HERMES_CALL, LLAMA, MISTRAL, QWEN, SPOKEN, TOOLS, Spoken, c
from tests.talking import talking, tokens_of


def answers(dialect: Dialect, said: Sequence[str], *bodies: dict[str, Any]) -> list[Any]:
    """What each body is answered by a model that always says the same and then ends its turn: JSON or text."""

    async def go() -> list[Any]:
        got = []
        async with talking(said, dialect) as http:
            client = openai.AsyncOpenAI(api_key="x", base_url="http://test/v1", http_client=http, max_retries=0)
            for body in bodies:
                given = {"model": "small", "messages": [{"role": "user", "content": "hi"}], **body}
                answer = await client.chat.completions.create(**given)
                got.append([chunk async for chunk in answer] if body.get("stream") else answer)
        return got

    return asyncio.run(asyncio.wait_for(go(), 60))


def whole(answer: ChatCompletion) -> tuple[Any, ...]:
    """Content, reasoning, calls, finish reason, and how many tokens it took."""
    (choice,) = answer.choices
    message = choice.message
    calls = [(call.type, call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    assert answer.usage is not None
    reasoning = getattr(message, "reasoning_content", "")
    return message.content or "", reasoning, calls, choice.finish_reason, answer.usage.completion_tokens


def streamed(chunks: Sequence[Any]) -> tuple[Any, ...]:
    """The same of a stream, read as a client reads it: calls by their index, and their parts joined."""
    content = reasoning = ""
    calls: dict[int, list[str]] = {}
    reasons = [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices]
    for chunk in chunks:
        for choice in chunk.choices:
            content += choice.delta.content or ""
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            for call in choice.delta.tool_calls or ():
                if call.index not in calls:
                    assert call.id
                    calls[call.index] = [call.type, call.function.name, ""]
                calls[call.index][2] += call.function.arguments
    assert sorted(calls) == list(range(len(calls)))
    assert set(reasons[:-1]) == {None}
    ordered = [tuple(call) for _, call in sorted(calls.items())]
    return content, reasoning, ordered, reasons[-1], chunks[-1].usage.completion_tokens


def both(dialect: Dialect, said: Sequence[str], **body: Any) -> tuple[Any, ...]:
    """The answer, which is the same whole and streamed."""
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    one, other = answers(dialect, said, body, body | stream)
    assert whole(one) == streamed(other)
    return whole(one)[:4]


@pytest.mark.parametrize("spoken", SPOKEN, ids=lambda spoken: spoken.name)
def test_a_stream_and_a_whole_answer_are_the_same(spoken: Spoken) -> None:
    ending = {"extra_body": {"chat_template_kwargs": {"ending": spoken.prompt_end}}}
    text, reasoning, calls, reason = both(spoken.dialect, spoken.said, tools=list(TOOLS), **ending)
    assert (text, reasoning) == (spoken.text, spoken.reasoning)
    assert [(name, json.loads(arguments)) for _, name, arguments in calls] == list(spoken.calls)
    assert reason == ("tool_calls" if spoken.calls else "stop")


def test_whole_answers_have_null_content_beside_calls_and_ids() -> None:
    (answer,) = answers(HERMES, (HERMES_CALL,), {"tools": list(TOOLS)})
    message = answer.choices[0].message
    assert message.content is None
    assert message.tool_calls[0].id.startswith("call_")
    assert not hasattr(message, "reasoning_content")


@pytest.mark.parametrize(
    ("dialect", "said"),
    [
        (HERMES, (HERMES_CALL,)),
        (LLAMA, ('{"name": "add", "parameters": {}}',)),
        (MISTRAL, (c("[TOOL_CALLS]"), '[{"name": "add", "arguments": {}}]')),
        (GPT_OSS, (c("<|channel|>"), "commentary to=functions.add", c("<|message|>"), '{"a": 2}')),
    ],
    ids=["hermes", "llama", "mistral", "gpt-oss"],
)
def test_a_call_that_reaches_max_tokens_is_text_and_length(dialect: Dialect, said: Sequence[str]) -> None:
    count = len(tokens_of(said))
    for max_tokens in (count - 1, count // 2):
        text, _, calls, reason = both(dialect, said, tools=list(TOOLS), max_tokens=max_tokens)
        assert (calls, reason) == ([], "length")
        assert text or dialect is GPT_OSS
    if dialect is HERMES:  # its end is marked, so it was complete
        assert both(dialect, said, tools=list(TOOLS), max_tokens=count)[2:] == (
            [("function", "add", '{"a": 2, "b": "ü </x> {"}')],
            "length",
        )


def test_without_parallel_calls_the_first_one_ends_the_answer() -> None:
    said = (f"Well.{HERMES_CALL}{HERMES_CALL} and so on",)
    many = both(HERMES, said, tools=list(TOOLS))
    assert (len(many[2]), many[0]) == (2, "Well.and so on")
    (answer,) = answers(HERMES, said, {"tools": list(TOOLS), "parallel_tool_calls": False})
    text, _, calls, reason, num_tokens = whole(answer)
    assert (text, len(calls), reason) == ("Well.", 1, "tool_calls")
    assert num_tokens == len(tokens_of((f"Well.{HERMES_CALL}",)))
    both(HERMES, said, tools=list(TOOLS), parallel_tool_calls=False)
    listed = (c("[TOOL_CALLS]"), '[{"name": "add"}, {"name": "add"}]')
    assert len(both(MISTRAL, listed, tools=list(TOOLS), parallel_tool_calls=False)[2]) == 1


@pytest.mark.parametrize("body", [{}, {"tools": list(TOOLS), "tool_choice": "none"}])
def test_where_nothing_may_be_called_a_call_is_text(body: dict[str, Any]) -> None:
    assert both(HERMES, (HERMES_CALL,), **body) == (HERMES_CALL, "", [], "stop")


def test_a_stop_string_ends_a_call_as_text() -> None:
    said = (f"Well.\n{HERMES_CALL}",)
    text, _, calls, reason = both(HERMES, said, tools=list(TOOLS), stop=["ü"])
    assert (calls, reason) == ([], "stop")
    assert text == "Well.\n" + HERMES_CALL.partition("ü")[0]


def test_a_stop_string_does_not_reach_over_a_control_token() -> None:
    assert both(LLAMA, ("ab", c("<|x|>"), "cd"), stop=["abcd", "bc"])[0] == "abcd"


def test_log_probabilities_are_of_everything_said() -> None:
    (answer,) = answers(QWEN, (f"<think>Hm</think>{HERMES_CALL}",), {"tools": list(TOOLS), "logprobs": True})
    entries = answer.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in entries).decode() == f"<think>Hm</think>{HERMES_CALL}"


def test_an_answer_in_a_given_shape_is_content_also_where_the_prompt_has_begun_to_reason() -> None:
    ending = {"chat_template_kwargs": {"ending": "<think>\n"}}
    said = ('{"a": 1}',)
    assert both(QWEN, said, response_format={"type": "json_object"}, extra_body=ending)[:2] == (said[0], "")


def test_text_completions_are_raw() -> None:
    said = f"<think>Hm</think>{HERMES_CALL}"

    async def go() -> str:
        async with talking((said,), QWEN) as client:
            answer = await client.post("/completions", json={"prompt": "<think>", "max_tokens": 200})
        return str(answer.json()["choices"][0]["text"])

    assert asyncio.run(asyncio.wait_for(go(), 60)) == said
