"""Conversations of every lawful shape: what the chat template is given, and what becomes of its refusals."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from tests.scripted import events
from tests.talking import talking

SHOW = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
ALTERNATE = (
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}{{ m.content }}{% endfor %}"
)
CALLS = (
    "{% for m in messages %}{% for c in m.tool_calls %}{{ c.id }}={{ c.function.name }}"
    "{{ c.function.arguments | tojson }}{% endfor %}{% if m.role == 'tool' %}{{ m.tool_call_id }}>{% endif %}"
    "{{ m.content }};{% endfor %}"
)


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(arguments: Any, **more: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "add", "arguments": arguments}, **more}


def ask(template: str, path: str, **body: Any) -> httpx.Response:
    async def go() -> httpx.Response:
        async with talking(("Fine.",), template=template) as client:
            return await client.post(path, json=body)

    return asyncio.run(asyncio.wait_for(go(), 30))


def prompt(template: str, *messages: Any) -> str:
    return str(ask(template, "http://test/apply-template", messages=messages).json()["prompt"])


@pytest.mark.parametrize(
    ("messages", "rendered"),
    [
        ([turn("user", "a"), turn("system", "b"), turn("user", "c")], "[user:a][system:b][user:c]"),
        ([turn("system", "a"), turn("system", "b")], "[system:a][system:b]"),
        ([turn("user", "a"), turn("user", "b"), turn("assistant", "c")], "[user:a][user:b][assistant:c]"),
        ([turn("assistant", "a"), turn("user", "b")], "[assistant:a][user:b]"),
        ([turn("assistant", None, tool_calls=[call("{}")]), turn("tool", "5")], "[assistant:][tool:5]"),
        ([turn("user", [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}])], "[user:a b]"),
        ([turn("tool", [{"type": "text", "text": "a"}], tool_call_id="c1")], "[tool:a]"),
        ([turn("system", [])], "[system:]"),
        ([turn("developer", "a"), turn("user", "b")], "[system:a][user:b]"),
    ],
)
def test_a_conversation_reaches_the_template(messages: list[Any], rendered: str) -> None:
    assert prompt(SHOW, *messages) == rendered
    answer = ask(SHOW, "/chat/completions", messages=messages)
    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens"] == len(rendered)


def test_a_template_that_knows_developers_is_told_of_them() -> None:
    template = "{{ 'D:' if messages[0].role == 'developer' }}{{ messages[0].content }}"
    assert prompt(template, turn("developer", "a")) == "D:a"


@pytest.mark.parametrize("stream", [False, True])
def test_what_a_template_refuses_is_a_400_with_its_words(stream: bool) -> None:
    messages = [turn("user", "a"), turn("user", "b")]
    answer = ask(ALTERNATE, "/chat/completions", messages=messages, stream=stream)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["message"].endswith("Roles must alternate")
    assert (error["type"], error["param"]) == ("invalid_request_error", "messages")


@pytest.mark.parametrize("template", ["{{ messages[0].nothing.at_all }}", "{{ messages[0].content + 1 }}", "{% for"])
def test_a_template_that_breaks_is_a_400(template: str) -> None:
    answer = ask(template, "/chat/completions", messages=[turn("user", "a")])
    assert answer.status_code == 400
    assert "chat template refused" in answer.json()["error"]["message"]
    assert "Traceback" not in answer.text


def test_calls_and_their_results_go_to_the_template_as_data() -> None:
    asked = turn("assistant", None, tool_calls=[call('{"a": 2, "b": {"c": [1]}}'), call("", id="c2")])
    messages = [turn("user", "add"), asked, turn("tool", "5", tool_call_id="c1", name="add"), turn("user", "so?")]
    assert prompt(CALLS, *messages) == 'add;c1=add{"a": 2, "b": {"c": [1]}}c2=add{};c1>5;so?;'


def test_reasoning_of_earlier_turns_is_there_for_the_template() -> None:
    template = "{{ messages[0].reasoning_content }}|{{ messages[0].content }}"
    assert prompt(template, turn("assistant", "b", reasoning_content="a")) == "a|b"


def test_what_has_no_place_in_the_template_is_named_as_ignored() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    answer = ask(SHOW, "/chat/completions", messages=[turn("user", "a")], tools=tools, flab=1, reasoning_effort="low")
    assert (answer.status_code, answer.headers["x-mlxcel-ignored-fields"]) == (200, "flab,tools,reasoning_effort")
    read = ask("{{ tools[0].function.name }}", "/chat/completions", messages=[turn("user", "a")], tools=tools)
    assert "x-mlxcel-ignored-fields" not in read.headers


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("given", "echoes"),
    [("Once ", ["Once "]), (["a", "ü"], ["a", "ü"]), ([0, 1, 2], ['!"#']), ([[0], [1, 2]], ["!", '"#'])],
)
def test_echo_begins_each_choice_with_its_prompt(given: Any, echoes: list[str], stream: bool) -> None:
    answer = ask(SHOW, "/completions", prompt=given, echo=True, n=2, stream=stream)
    assert answer.status_code == 200
    texts = dict.fromkeys(range(2 * len(echoes)), "")
    parts = events(answer)[:-1] if stream else [answer.json()]
    for choice in (choice for part in parts for choice in part["choices"]):
        texts[choice["index"]] += choice["text"]
    assert list(texts.values()) == [echo + "Fine." for echo in echoes for _ in range(2)]
