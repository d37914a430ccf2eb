"""instructor, which only ever asks for shapes: by JSON schema."""

from __future__ import annotations

import instructor
import openai
from facts import BASE_URL, KEY, MODEL, QUESTION, Weather, raised


def client(key: str = KEY) -> instructor.Instructor:
    ours = openai.OpenAI(base_url=BASE_URL, api_key=key, max_retries=0)
    return instructor.from_openai(ours, mode=instructor.Mode.JSON_SCHEMA)


def ask(key: str = KEY, **more: object) -> Weather:
    asked = {"model": MODEL, "messages": QUESTION, "response_model": Weather, "max_retries": 0}
    return client(key).create(**asked | more)


def structured() -> None:
    assert isinstance(ask(), Weather)


def stream() -> None:
    *_, last = client().create_partial(model=MODEL, messages=QUESTION, response_model=Weather)
    Weather.model_validate(last.model_dump())


def causes(error: BaseException | None) -> list[type[BaseException]]:
    return [] if error is None else [type(error), *causes(error.__cause__ or error.__context__)]


def errors() -> None:
    for kind, more in (
        (openai.BadRequestError, {"temperature": -1}),
        (openai.NotFoundError, {"model": "another"}),
        (openai.AuthenticationError, {"key": "wrong"}),
    ):
        error = raised(ask, **more)
        assert kind in causes(error), repr(error)  # an exception of its own may stand before it


for part in (structured, stream, errors):
    part()
