"""The format of gpt-oss: messages with a header each, which says for whom they are."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from app.text.reader import Said
from app.text.tool_calls import read_calls

START, CHANNEL, MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
RECIPIENT = re.compile(r"\bto=(?:functions\.)?([^\s<]+)")


class HarmonyReader:
    """The channel ``analysis`` is reasoning, a message to a function is a call, and everything else is text.

    Only control tokens have a meaning here, so text needs no looking at. The prompt ends inside the first header.
    """

    def __init__(self, tools: Sequence[dict[str, Any]]) -> None:
        self._tools = tools
        self._header = ""
        self._body: str | None = None  # of a call, as far as it came
        self._is_in_header = True
        self._is_reasoning = False

    def feed(self, text: str) -> Said:
        if self._is_in_header:
            self._header += text
        elif self._body is not None:
            self._body += text
        elif self._is_reasoning:
            return Said(reasoning=text)
        else:
            return Said(text)
        return Said()

    def control(self, name: str) -> Said:
        if self._is_in_header:
            if name == MESSAGE:
                self._open()
            elif name not in ENDS:
                self._header += name
            return Said()
        if name not in (START, CHANNEL, *ENDS):
            return self.feed(name) if self._body is not None else Said()
        said = self._close(is_whole=True)
        self._is_in_header = True
        self._header = "" if name in ENDS else name
        return said

    def end(self, is_whole: bool) -> Said:
        if not self._is_in_header:
            return self._close(is_whole)
        # Who begins with no header at all has just said something; a header without a message has said nothing.
        header, self._header = self._header, ""
        return Said(header if not header.startswith((START, CHANNEL)) else "")

    def _open(self) -> None:
        """The header is complete."""
        recipient = RECIPIENT.search(self._header)
        self._is_in_header = False
        self._body = "" if recipient and self._tools else None
        self._is_reasoning = f"{CHANNEL}analysis" in self._header and self._body is None

    def _close(self, is_whole: bool) -> Said:
        body, self._body = self._body, None
        if body is None:
            return Said()
        calls = read_calls(self._named, body, self._tools) if is_whole else ()
        return Said(calls=list(calls)) if calls else Said(f"{self._header}{MESSAGE}{body}")

    def _named(self, body: str, tools: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Raises ValueError where ``body`` is no JSON; an empty one means no arguments."""
        recipient = RECIPIENT.search(self._header)
        return {"name": recipient and recipient[1], "arguments": json.loads(body or "{}")}
