"""The openai package: every call that the others are built on."""

from __future__ import annotations

import json

import openai
from facts import BASE_URL, CALLED, KEY, MODEL, QUESTION, SENTENCE, TOOL, Weather, raised

client = openai.OpenAI(base_url=BASE_URL, api_key=KEY, max_retries=0)
create = client.chat.completions.create


def chat() -> None:
    answer = create(model=MODEL, messages=QUESTION)
    assert answer.choices[0].message.content == SENTENCE
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).id == MODEL
    assert client.completions.create(model=MODEL, prompt="<|tell|>").choices[0].text == SENTENCE


def stream() -> None:
    chunks = list(create(model=MODEL, messages=QUESTION, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == SENTENCE
    assert chunks[-1].usage.completion_tokens == 4
    assert chunks[-2].choices[0].finish_reason == "stop"


def tools() -> None:
    answer = create(model=MODEL, messages=QUESTION, tools=[TOOL], tool_choice="auto")
    assert answer.choices[0].finish_reason == "tool_calls"
    message = answer.choices[0].message
    (call,) = message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", json.loads(CALLED))
    told = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    answer = create(model=MODEL, messages=[*QUESTION, message, told], tools=[TOOL])
    assert answer.choices[0].message.content == SENTENCE
    with client.chat.completions.stream(model=MODEL, messages=QUESTION, tools=[TOOL]) as events:
        for _ in events:
            pass
        (call,) = events.get_final_completion().choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", json.loads(CALLED))


def structured() -> None:
    answer = client.chat.completions.parse(model=MODEL, messages=QUESTION, response_format=Weather)
    assert isinstance(answer.choices[0].message.parsed, Weather)


def errors() -> None:
    for kind, param, asked, more in (
        (openai.BadRequestError, "temperature", client, {"temperature": -1}),
        (openai.NotFoundError, "model", client, {"model": "another"}),
        (openai.AuthenticationError, None, client.with_options(api_key="wrong"), {}),
    ):
        error = raised(asked.chat.completions.create, **{"model": MODEL, "messages": QUESTION} | more)
        assert isinstance(error, kind), repr(error)
        assert error.param == param
        assert error.request_id


for part in (chat, stream, tools, structured, errors):
    part()
