"""What each client is told on its command line, and what all of them ask and find. Knows no client."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

URL, MODEL, KEY = sys.argv[1:4]
BASE_URL = f"{URL}/v1"
QUESTION = [{"role": "user", "content": "How is the weather in Paris?"}]
SENTENCE = "It rains in Paris."
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALLED = '{"city": "Paris"}'


class Weather(BaseModel):
    """A shape that is soon complete, whatever a model would rather say: without other members it would find no end."""

    model_config = ConfigDict(extra="forbid")
    sky: Literal["clear", "cloudy"]
    is_cold: bool


def raised(call: Callable[..., Any], **options: Any) -> Exception:
    """What ``call`` fails with. Raises AssertionError if it does not."""
    try:
        call(**options)
    except Exception as error:
        return error
    raise AssertionError(f"nothing was raised for {options}")
