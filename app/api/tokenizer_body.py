"""Request bodies of the routes that turn text into tokens, tokens into text, and messages into a prompt."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from app.api.protocol import Body, Messages, Tools
from app.errors import InvalidRequest


class TokenizeBody(Body):
    """``prompt`` is another name for ``content``."""

    content: str | None = None
    prompt: str | None = None
    add_special: bool = False
    parse_special: bool = True
    with_pieces: bool = False

    @model_validator(mode="after")
    def _has_text(self) -> Self:
        if self.content is None and self.prompt is None:
            raise InvalidRequest("content: is required", "content")
        return self

    @property
    def text(self) -> str:
        return (self.prompt or "") if self.content is None else self.content


class DetokenizeBody(Body):
    tokens: list[int]


class TemplateBody(Body):
    messages: Messages
    tools: Tools = Field([])
    chat_template_kwargs: dict[str, Any] = Field({})

    @property
    def template(self) -> dict[str, Any]:
        return {**self.chat_template_kwargs, **({"tools": self.tools} if self.tools else {})}
