"""Request bodies of the routes that turn text into tokens, tokens into text, and messages into a prompt."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from app.api.protocol import ChatBody, Messages, ModelBody, Tools
from app.errors import InvalidRequest


class TokenizeBody(ModelBody):
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


class DetokenizeBody(ModelBody):
    tokens: list[int]


class TemplateBody(ModelBody):
    """The parts of a chat's body that its prompt is made of. The others may be there, and do nothing."""

    messages: Messages
    tools: Tools = Field([])
    chat_template_kwargs: dict[str, Any] = Field({})
    add_generation_prompt: bool = True

    @classmethod
    def known_fields(cls) -> frozenset[str]:
        return super().known_fields() | ChatBody.known_fields()

    @property
    def template(self) -> dict[str, Any]:
        options = dict(self.chat_template_kwargs)
        if self.tools:
            options["tools"] = self.tools
        if not self.add_generation_prompt:
            options["add_generation_prompt"] = False
        return options
