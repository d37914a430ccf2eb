"""The anthropic package, on the route that it knows."""

from __future__ import annotations

import anthropic
from facts import KEY, MODEL, QUESTION, SENTENCE, TOOL, URL, raised

client = anthropic.Anthropic(base_url=URL, api_key=KEY, max_retries=0)
OURS = {"model": MODEL, "max_tokens": 50, "messages": QUESTION}
FUNCTION = TOOL["function"]
TOOLS = [{"name": FUNCTION["name"], "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}]


def chat() -> None:
    answer = client.messages.create(**OURS)
    assert [block.text for block in answer.content] == [SENTENCE]
    assert (answer.stop_reason, answer.usage.output_tokens) == ("end_turn", 4)
    assert client.messages.count_tokens(model=MODEL, messages=QUESTION).input_tokens == answer.usage.input_tokens


def stream() -> None:
    with client.messages.stream(**OURS) as events:
        assert "".join(events.text_stream) == SENTENCE
        assert events.get_final_message().stop_reason == "end_turn"


def tools() -> None:
    answer = client.messages.create(**OURS, tools=TOOLS)
    (call,) = (block for block in answer.content if block.type == "tool_use")
    assert (call.name, call.input, answer.stop_reason) == ("get_weather", {"city": "Paris"}, "tool_use")
    told = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"}]}
    said = {"role": "assistant", "content": answer.content}
    answer = client.messages.create(**OURS | {"messages": [*QUESTION, said, told]}, tools=TOOLS)
    assert [block.text for block in answer.content] == [SENTENCE]
    with client.messages.stream(**OURS, tools=TOOLS) as events:
        (call,) = (block for block in events.get_final_message().content if block.type == "tool_use")
    assert (call.name, call.input) == ("get_weather", {"city": "Paris"})


def errors() -> None:
    for kind, ask, more in (
        (anthropic.BadRequestError, client, {"max_tokens": 0}),
        (anthropic.NotFoundError, client, {"model": "another"}),
        (anthropic.AuthenticationError, client.with_options(api_key="wrong"), {}),
    ):
        error = raised(ask.messages.create, **OURS | more)
        assert isinstance(error, kind), repr(error)


for part in (chat, stream, tools, errors):
    part()
