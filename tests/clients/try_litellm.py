"""litellm, as one of its OpenAI-compatible endpoints."""

from __future__ import annotations

import json
import os

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it fetches prices when it is imported

import litellm
from facts import BASE_URL, CALLED, KEY, MODEL, QUESTION, SENTENCE, TOOL, Weather, raised

OURS = {"model": f"openai/{MODEL}", "api_base": BASE_URL, "api_key": KEY, "messages": QUESTION, "num_retries": 0}


def ask(**more: object) -> object:
    return litellm.completion(**OURS | more)


def chat() -> None:
    answer = ask()
    assert answer.choices[0].message.content == SENTENCE
    assert answer.usage.completion_tokens == 4


def stream() -> None:
    chunks = list(ask(stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == SENTENCE
    whole = litellm.stream_chunk_builder(chunks, messages=QUESTION)
    assert whole.choices[0].message.content == SENTENCE


def tools() -> None:
    (call,) = ask(tools=[TOOL], tool_choice="auto").choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", json.loads(CALLED))
    whole = litellm.stream_chunk_builder(list(ask(tools=[TOOL], stream=True)), messages=QUESTION)
    (call,) = whole.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("get_weather", json.loads(CALLED))


def structured() -> None:
    Weather.model_validate_json(ask(response_format=Weather).choices[0].message.content)


def errors() -> None:
    for kind, more in (
        (litellm.BadRequestError, {"temperature": -1}),
        (litellm.NotFoundError, {"model": "openai/another"}),
        (litellm.AuthenticationError, {"api_key": "wrong"}),
    ):
        error = raised(ask, **more)
        assert isinstance(error, kind), repr(error)


for part in (chat, stream, tools, structured, errors):
    part()
