"""pydantic-ai: an agent that calls its tool, one that has to answer in a shape, and one that is refused."""

from __future__ import annotations

from facts import BASE_URL, KEY, MODEL, QUESTION, SENTENCE, Weather, raised
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.exceptions import ModelHTTPError
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

ASKED = QUESTION[0]["content"]


def model(name: str = MODEL, key: str = KEY) -> OpenAIChatModel:
    return OpenAIChatModel(name, provider=OpenAIProvider(base_url=BASE_URL, api_key=key))


def chat() -> None:
    result = Agent(model()).run_sync(ASKED)
    assert result.output == SENTENCE


def stream() -> None:
    with Agent(model()).run_stream_sync(ASKED) as result:
        *_, last = result.stream_text()
    assert last == SENTENCE


def tools() -> None:
    cities = []
    agent = Agent(model())

    @agent.tool_plain
    def get_weather(city: str) -> str:
        cities.append(city)
        return "rain"

    assert agent.run_sync(ASKED).output == SENTENCE
    with agent.run_stream_sync(ASKED) as result:
        *_, last = result.stream_text()
    assert last == SENTENCE
    assert cities == ["Paris", "Paris"]


def structured() -> None:
    assert isinstance(Agent(model(), output_type=NativeOutput(Weather)).run_sync(ASKED).output, Weather)


def errors() -> None:
    for status, asked, settings in (
        (400, model(), {"temperature": -1}),
        (404, model(name="another"), {}),
        (401, model(key="wrong"), {}),
    ):
        error = raised(Agent(asked).run_sync, user_prompt=ASKED, model_settings=settings)
        assert isinstance(error, ModelHTTPError), repr(error)
        assert error.status_code == status


for part in (chat, stream, tools, structured, errors):
    part()
