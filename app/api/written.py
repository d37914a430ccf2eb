"""How messages, tools, choices of tools and prompts are written, for the OpenAPI document. ``fields`` checks them."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

Role = Literal["assistant", "developer", "function", "system", "tool", "user"]


class TextPart(TypedDict):
    type: Literal["text"]
    text: str


class Message(TypedDict):
    """Other members are given to the chat template as they are."""

    role: Role
    content: NotRequired[str | list[TextPart] | None]
    name: NotRequired[str | None]
    tool_call_id: NotRequired[str | None]
    tool_calls: NotRequired[list[dict[str, Any]] | None]


class Function(TypedDict):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: NotRequired[str | None]
    parameters: NotRequired[dict[str, Any] | None]


class Tool(TypedDict):
    type: Literal["function"]
    function: Function


WrittenChoice = Literal["auto", "none", "required"] | dict[str, Any]
Filled = Field(min_length=1)
WrittenMessages = Annotated[list[Message], Filled]
WrittenTools = list[Tool]
WrittenPrompts = (
    Annotated[list[str], Filled]
    | Annotated[list[int], Filled]
    | Annotated[list[Annotated[list[int], Filled]], Filled]
    | str
)
