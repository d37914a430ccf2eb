"""Text, reasoning and calls: the same ones, however the answer was cut into pieces."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.text.dialect import Dialect
from tests.spoken import GPT_OSS, HERMES, LLAMA, MISTRAL, QWEN, SPOKEN, TOOLS, Control, Spoken, c

Meaning = tuple[str, str, list[tuple[str, Any]]]
EVERY = pytest.mark.parametrize("spoken", SPOKEN, ids=lambda spoken: spoken.name)


def read(
    dialect: Dialect,
    said: Sequence[str],
    prompt_end: str = "",
    tools: Sequence[dict[str, Any]] = TOOLS,
    is_whole: bool = True,
) -> Meaning:
    reader = dialect.reader(tools, prompt_end)
    parts = [reader.control(str(piece)) if isinstance(piece, Control) else reader.feed(piece) for piece in said]
    parts.append(reader.end(is_whole))
    calls = [call for part in parts for call in part.calls]
    assert len({call.id for call in calls} - {""}) == len(calls)
    return (
        "".join(part.text for part in parts),
        "".join(part.reasoning for part in parts),
        [(call.name, json.loads(call.arguments)) for call in calls],
    )


def meant(spoken: Spoken) -> Meaning:
    return spoken.text, spoken.reasoning, list(spoken.calls)


def cut(said: Sequence[str]) -> Iterator[list[str]]:
    """Every way of cutting one piece of an answer in two. Control tokens stay whole."""
    for index, piece in enumerate(said):
        if not isinstance(piece, Control):
            for at in range(len(piece)):
                yield [*said[:index], piece[:at], piece[at:], *said[index + 1 :]]


def spelled(said: Sequence[str]) -> list[str]:
    return [part for piece in said for part in ([piece] if isinstance(piece, Control) else piece)]


@EVERY
def test_an_answer_is_understood(spoken: Spoken) -> None:
    assert read(spoken.dialect, spoken.said, spoken.prompt_end) == meant(spoken)


@EVERY
def test_it_does_not_matter_where_an_answer_is_cut(spoken: Spoken) -> None:
    for said in (*cut(spoken.said), spelled(spoken.said)):
        assert read(spoken.dialect, said, spoken.prompt_end) == meant(spoken), said


@EVERY
def test_an_answer_cut_off_anywhere_is_read_without_a_fault(spoken: Spoken) -> None:
    """Nothing is made up, and a call that is not complete is no call."""
    pieces = spelled(spoken.said)
    for length in range(len(pieces)):
        text, reasoning, calls = read(spoken.dialect, pieces[:length], spoken.prompt_end, is_whole=False)
        assert calls == list(spoken.calls)[: len(calls)]
        assert all(part in "".join(pieces[:length]) for part in (text[:1], reasoning))


@pytest.mark.parametrize(
    "name",
    [
        "hermes",
        "hermes-text",
        "qwen-coder",
        "llama",
        "llama-tag",
        "mistral-list",
        "mistral-headers",
        "kimi",
        "gpt-oss-calls",
    ],
)
def test_a_call_that_is_cut_off_is_text(name: str) -> None:
    (spoken,) = (spoken for spoken in SPOKEN if spoken.name == name)
    pieces = spelled(spoken.said)[:-2]
    text, _, calls = read(spoken.dialect, pieces, is_whole=False)
    assert calls == []
    assert "add" in text
    assert text.endswith("".join(pieces)[-8:])


@EVERY
def test_without_tools_nothing_is_a_call(spoken: Spoken) -> None:
    text, reasoning, calls = read(spoken.dialect, spoken.said, spoken.prompt_end, tools=())
    assert calls == []
    assert reasoning == spoken.reasoning
    for name, _ in spoken.calls:
        assert name in text or spoken.dialect is GPT_OSS


def test_text_is_given_out_as_soon_as_it_is_certain() -> None:
    reader = QWEN.reader(TOOLS, "")
    given_out = [reader.feed(piece).text for piece in ("Hel", "lo ", "<thin", "g> ", "<", "tool_call>", "{", "}")]
    assert given_out == ["Hel", "lo", "", " <thing>", "", "", "", ""]
    harmony = GPT_OSS.reader(TOOLS, "")
    for piece in ("<|channel|>", "<|message|>"):
        harmony.control(piece)
    assert [harmony.feed(piece).text for piece in ("a ", "<", "b")] == ["a ", "<", "b"]


def test_a_call_is_given_out_when_it_is_complete() -> None:
    reader = HERMES.reader(TOOLS, "")
    call = '<tool_call>{"name": "add", "arguments": {}}</tool_call'
    assert reader.feed(call).calls == []
    assert [call.name for call in reader.feed(">").calls] == ["add"]


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ('{"name": "add", "arguments": {"a": 1e3}}', {"a": 1000.0}),
        ('{"name": "add", "parameters": {"a": [null, true]}}', {"a": [None, True]}),
        ('{"name": "add", "arguments": "{\\"a\\": 1}"}', {"a": 1}),
        ('{"name": "add"}', {}),
        ('{"name": "add", "arguments": null}', {}),
        ('{"name": "add", "arguments": {"a": "日本 \\u00fc"}}', {"a": "日本 ü"}),
    ],
)
def test_arguments_are_the_text_of_an_object(body: str, arguments: Any) -> None:
    assert read(LLAMA, [body]) == ("", "", [("add", arguments)])


@pytest.mark.parametrize(
    "body",
    [
        "",
        "null",
        "[]",
        "[[]]",
        '"add"',
        '{"name": "add", "arguments": []}',
        '{"name": "add", "arguments": "x"}',
        '{"name": "add", "arguments": "[1]"}',
        '{"name": ["add"], "arguments": {}}',
        '{"name": null, "arguments": {}}',
        '{"name": "add", "arguments": {"a": NaN}}',
        '{"name": "add", "arguments": {"a": 1e999}}',
        '{"name": "add", "arguments": {"a": "\\ud83d"}}',
        '{"name": "add", "arguments": {"a": ' + "9" * 5000 + "}}",
        '{"name": "add", "arguments": ' + '{"a":' * 100_000,
        "[" * 100_000,
        '{"name": "add", "arguments": {}} and more',
        '[{"name": "add", "arguments": {}}, {"name": "rm", "arguments": {}}]',
    ],
)
@pytest.mark.parametrize("dialect", [HERMES, MISTRAL, LLAMA], ids=["hermes", "mistral", "llama"])
def test_what_is_no_call_comes_back_as_text(dialect: Dialect, body: str) -> None:
    (start,) = dialect.marks.call_starts
    whole = f"{start}{body}{dialect.marks.call_end}"
    assert read(dialect, [whole]) == (whole, "", [])


def test_ids_that_a_model_gives_are_kept() -> None:
    (call,) = HERMES.reader(TOOLS, "").feed('<tool_call>{"id": "c:0", "name": "add"}</tool_call>').calls
    assert call.id == "c:0"
    for bad in ('""', "1", '"a\\nb"', '"ü"'):
        (call,) = HERMES.reader(TOOLS, "").feed(f'<tool_call>{{"id": {bad}, "name": "add"}}</tool_call>').calls
        assert call.id.startswith("call_")


PIECES = st.sampled_from(
    [
        "<think>",
        "</think>",
        "<tool_call>",
        "</tool_call>",
        '{"name": "add"}',
        "<tool",
        "</",
        ">",
        " ",
        "\n",
        "a",
        "{",
        "<",
    ]
)


@given(st.lists(PIECES, max_size=12), st.booleans(), st.booleans(), st.data())
def test_any_text_means_the_same_in_any_pieces(
    pieces: list[str], thinks: bool, whole: bool, data: st.DataObject
) -> None:
    text = "".join(pieces)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    said = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    for dialect in (QWEN, LLAMA):
        prompt_end = "<think>" if thinks else ""
        assert read(dialect, said, prompt_end, is_whole=whole) == read(dialect, [text], prompt_end, is_whole=whole)


CONTROL = [c(name) for name in ("<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|end|>", "<|constrain|>")]
HARMONY = st.sampled_from([*CONTROL, "analysis", "final", "commentary", " to=functions.add", "{}", "x"])


@given(st.lists(HARMONY, max_size=12), st.booleans())
def test_messages_in_any_disorder_are_read_without_a_fault(said: list[str], whole: bool) -> None:
    assert read(GPT_OSS, said, is_whole=whole) == read(GPT_OSS, spelled(said), is_whole=whole)
