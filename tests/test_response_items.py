"""Items of a response's input: what is taken, what is refused and in which words, and the messages they become."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import pytest
from openai.types.responses.response_input_item_param import ResponseInputItemParam

from app.api.response_items import check_input, item_id, messages_of, response_of, with_ids
from app.errors import InvalidRequest

CALL = {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'}
OUTPUT = {"type": "function_call_output", "call_id": "c1", "output": "2"}
TOOL_CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def reasoning(text: str) -> dict[str, Any]:
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def messages(*items: Any) -> list[dict[str, Any]]:
    return messages_of(check_input(list(items)))


def test_a_string_is_a_message_of_the_user() -> None:
    assert messages_of(check_input("hi")) == [{"role": "user", "content": "hi"}]


def test_messages_of_every_role_with_text_and_parts() -> None:
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    said = [{"type": "output_text", "text": "yes", "annotations": []}, {"type": "refusal", "refusal": " no"}]
    assert messages(
        {"role": "system", "content": "s"},
        {"type": "message", "role": "developer", "content": parts},
        {"role": "user", "content": "u", "type": None},
        {"role": "assistant", "content": said, "id": "msg_1", "status": "completed", "type": "message"},
        {"role": "assistant", "content": "more"},
    ) == [
        {"role": "system", "content": "s"},
        {"role": "developer", "content": "ab"},
        {"role": "user", "content": "u"},
        {"role": "assistant", "content": "yes no"},
        {"role": "assistant", "content": "more"},
    ]


def test_what_an_assistant_does_in_one_turn_is_one_message() -> None:
    second = {**CALL, "call_id": "c2"}
    text = {"role": "assistant", "content": "I add."}
    assert messages(reasoning("Hm."), text, CALL, second, OUTPUT, {**OUTPUT, "call_id": "c2", "output": []}) == [
        {
            "role": "assistant",
            "content": "I add.",
            "reasoning_content": "Hm.",
            "tool_calls": [TOOL_CALL, {**TOOL_CALL, "id": "c2"}],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "tool", "tool_call_id": "c2", "content": ""},
    ]


def test_a_new_turn_begins_where_the_order_says_so() -> None:
    text = {"role": "assistant", "content": "So."}
    assert messages(CALL, text, reasoning("Hm."), CALL, reasoning("Oh.")) == [
        {"role": "assistant", "content": "", "tool_calls": [TOOL_CALL]},
        {"role": "assistant", "content": "So."},
        {"role": "assistant", "content": "", "reasoning_content": "Hm.", "tool_calls": [TOOL_CALL]},
        {"role": "assistant", "content": "", "reasoning_content": "Oh."},
    ]


def test_a_summary_stands_in_for_reasoning_that_is_not_there() -> None:
    summary = [{"type": "summary_text", "text": "short"}]
    (message,) = messages({"type": "reasoning", "id": "rs_1", "summary": summary, "encrypted_content": "x"})
    assert message["reasoning_content"] == "short"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5, "input: must be a string or a list of items"),
        ([], "input: must not be empty"),
        (["hi"], "input[0]: must be an object"),
        ([{}], "input[0].type: items of this type are not supported"),
        ([{"role": "tool", "content": "x"}], "input[0].role: must be one of user, assistant, system, developer"),
        ([{"role": [], "content": "x"}], "input[0].role: must be one of user, assistant, system, developer"),
        ([{"role": "user"}], "input[0].content: must be a list of parts or a string"),
        ([{"role": "user", "content": ["x"]}], "input[0].content[0]: must be an object"),
        ([{"role": "user", "content": [{"type": "input_image"}]}], "input[0].content[0].type: only text parts"),
        ([{"role": "user", "content": [{"type": "refusal", "refusal": "x"}]}], "input[0].content[0].type: only text"),
        ([{"role": "user", "content": [{"type": "input_text"}]}], "input[0].content[0].text: must be a string"),
        ([{"role": "user", "content": "x", "id": 4}], "input[0].id: must be a string"),
        ([{**CALL, "arguments": {}}], "input[0].arguments: must be a string"),
        ([{**CALL, "call_id": None}], "input[0].call_id: must be a string"),
        ([CALL, {**OUTPUT, "output": None}], "input[1].output: must be a list of parts or a string"),
        ([{**OUTPUT, "output": [{"type": "input_file"}]}], "input[0].output[0].type: only text parts"),
        ([{"type": "reasoning", "content": "x"}], "input[0].content: must be a list of parts"),
        (
            [{"type": "reasoning", "summary": [], "encrypted_content": "x"}],
            "input[0].encrypted_content: cannot be read",
        ),
        ([{"type": "item_reference"}], "input[0].id: must be a string"),
    ],
)
def test_what_is_wrong_is_named(value: Any, text: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        check_input(value)
    assert str(caught.value).startswith(text)
    assert caught.value.param == text.partition(":")[0]


def test_every_kind_of_item_of_the_openai_package_is_taken_or_refused_by_name() -> None:
    kinds = {
        get_args(kind)[0]
        for item in get_args(ResponseInputItemParam)
        for kind in _literals(get_type_hints(item).get("type"))
    }
    assert len(kinds) > 20
    refused = set()
    for kind in kinds:
        try:
            check_input([{"type": kind}])
        except InvalidRequest as error:
            if error.param == "input[0].type":
                refused.add(kind)
    assert kinds - refused == {
        "message",
        "reasoning",
        "function_call",
        "function_call_output",
        "item_reference",
    }


def _literals(hint: Any) -> list[Any]:
    """The Literal types somewhere in a hint."""
    if "Literal" in str(getattr(hint, "__origin__", "")):
        return [hint]
    return [found for inner in get_args(hint) for found in _literals(inner)]


def test_ids_name_their_response() -> None:
    items = with_ids(check_input([{"role": "user", "content": "x"}, {**CALL, "id": "fc_own"}, OUTPUT]), "resp_abc")
    assert [item["id"] for item in items] == ["msg_abc_in0", "fc_own", "fco_abc_in2"]
    assert response_of("msg_abc_in0") == response_of(item_id("reasoning", "resp_abc", "12")) == "resp_abc"
    assert response_of("fc_own") == response_of("x") == "resp_"
