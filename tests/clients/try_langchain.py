"""langchain-openai: its chat model, bound to tools and to a shape."""

from __future__ import annotations

import openai
from facts import BASE_URL, KEY, MODEL, QUESTION, SENTENCE, TOOL, Weather, raised
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI


def model(**more: object) -> ChatOpenAI:
    return ChatOpenAI(**{"model": MODEL, "base_url": BASE_URL, "api_key": KEY, "max_retries": 0} | more)


def chat() -> None:
    answer = model().invoke(QUESTION)
    assert answer.content == SENTENCE
    assert answer.usage_metadata["output_tokens"] == 4


def stream() -> None:
    assert "".join(chunk.content for chunk in model().stream(QUESTION)) == SENTENCE


def tools() -> None:
    bound = model().bind_tools([TOOL], tool_choice="auto")
    answer = bound.invoke(QUESTION)
    (call,) = answer.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    told = ToolMessage("rain", tool_call_id=call["id"])
    assert bound.invoke([HumanMessage(QUESTION[0]["content"]), answer, told]).content == SENTENCE
    first, *others = bound.stream(QUESTION)
    for chunk in others:
        first = first + chunk
    assert [(call["name"], call["args"]) for call in first.tool_calls] == [("get_weather", {"city": "Paris"})]


def structured() -> None:
    assert isinstance(model().with_structured_output(Weather, method="json_schema").invoke(QUESTION), Weather)


def errors() -> None:
    for kind, more in (
        (openai.BadRequestError, {"temperature": -1}),
        (openai.NotFoundError, {"model": "another"}),
        (openai.AuthenticationError, {"api_key": "wrong"}),
    ):
        error = raised(model(**more).invoke, input=QUESTION)
        assert isinstance(error, kind), repr(error)


for part in (chat, stream, tools, structured, errors):
    part()
