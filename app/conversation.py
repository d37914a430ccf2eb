"""A conversation as the model is to see it: what was said so far, and how answers are drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.api.parse import parse
from app.api.protocol import ChatBody


class Conversation:
    """Turns of one person and the model, behind a system message if there is one."""

    def __init__(self, system: str | None, fields: Mapping[str, Any]) -> None:
        """``fields`` are those of a chat request that say how to answer; None is absent."""
        self._opening = [] if system is None else [{"role": "system", "content": system}]
        self._fields = dict(fields)
        self._turns: list[dict[str, Any]] = []

    def asked(self, text: str) -> ChatBody:
        """The request that asks ``text`` now. It is no part of the conversation until it has been answered.

        Raises:
            InvalidRequest: a field is out of its range.
        """
        messages = [*self._opening, *self._turns, {"role": "user", "content": text}]
        return parse(ChatBody, {**self._fields, "messages": messages})

    def add(self, text: str, answer: str) -> None:
        """Remember a turn. One without an answer is forgotten, as if it had not been asked."""
        if answer:
            self._turns += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

    def reset(self) -> None:
        """Forget every turn."""
        self._turns.clear()
