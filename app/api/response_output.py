"""The output of a response as it grows: items that are finished, and the events that tell how they came about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from app.api.answers import entry_json
from app.api.response_items import item_id
from app.completion import Delta, TokenLogprob
from app.text.tool_calls import ToolCall

# What the text of an item is, by the type of the item, and what its events begin with.
TEXTS = {"message": "output_text", "reasoning": "reasoning_text"}

Event = dict[str, Any]


@dataclass(slots=True)
class _Open:
    """The item that text is still being added to: a message or a reasoning."""

    kind: str
    id: str
    texts: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)


class Output:
    """Deltas of one answer in, events out, without their numbers. ``items`` are the finished ones.

    Items come in the order in which the model wrote them: text after a call is another message.
    """

    def __init__(self, response_id: str, with_logprobs: bool) -> None:
        self.items: list[dict[str, Any]] = []
        self.is_complete = False
        self.num_reasoning = 0  # tokens: each brings a piece, but for those that are held back for a moment
        self._response_id = response_id
        self._with_logprobs = with_logprobs
        self._open: _Open | None = None
        # Log-probabilities of tokens that have shown nothing yet: what follows tells whether they are of a text.
        self._unclaimed: list[TokenLogprob] = []

    def take(self, delta: Delta) -> list[Event]:
        """What ``delta`` adds. The last one closes the output."""
        events: list[Event] = []
        if self._with_logprobs:
            self._unclaimed += delta.logprobs
        if delta.reasoning:
            self.num_reasoning += 1
            events += self._say("reasoning", delta.reasoning)
        if delta.text:
            events += self._say("message", delta.text)
        for call in delta.calls:
            events += self._call(call)
        if delta.finish_reason is not None:
            self.is_complete = delta.finish_reason != "length"
            if not self.items and self._open is None:
                events += self._say("message", "")  # who says nothing has said that
            events += self._close(self.is_complete)
        return events

    def _say(self, kind: str, text: str) -> list[Event]:
        events: list[Event] = []
        item = self._open
        if item is None or item.kind != kind:
            events = self._close()
            item = self._open = _Open(kind, item_id(kind, self._response_id, str(len(self.items))))
            events.append(self._item_event("added", _text_item(item, "in_progress", [])))
            events.append(self._part_event(item, "response.content_part.added", part=_part(kind, "", [])))
        if text:
            logprobs = self._claimed(kind)
            item.logprobs += logprobs
            item.texts.append(text)
            more = {"logprobs": logprobs} if kind == "message" else {}
            events.append(self._part_event(item, f"response.{TEXTS[kind]}.delta", delta=text, **more))
        return events

    def _claimed(self, kind: str) -> list[dict[str, Any]]:
        entries, self._unclaimed = self._unclaimed, []
        return [entry_json(entry) for entry in entries] if kind == "message" else []

    def _close(self, is_complete: bool = True) -> list[Event]:
        item, self._open = self._open, None
        if item is None:
            return []
        text = "".join(item.texts)
        part = _part(item.kind, text, item.logprobs)
        more = {"logprobs": item.logprobs} if item.kind == "message" else {}
        done = _text_item(item, "completed" if is_complete else "incomplete", [part])
        events = [
            self._part_event(item, f"response.{TEXTS[item.kind]}.done", text=text, **more),
            self._part_event(item, "response.content_part.done", part=part),
            self._item_event("done", done),
        ]
        self.items.append(done)
        return events

    def _call(self, call: ToolCall) -> list[Event]:
        """A call is known only when it is complete, so its arguments come in one piece."""
        events = self._close()
        self._unclaimed.clear()
        of_call = item_id("function_call", self._response_id, str(len(self.items)))
        item = {
            "id": of_call,
            "type": "function_call",
            "status": "completed",
            "call_id": call.id,
            "name": call.name,
            "arguments": call.arguments,
        }
        where = {"item_id": of_call, "output_index": len(self.items)}
        events += [
            self._item_event("added", {**item, "status": "in_progress", "arguments": ""}),
            {"type": "response.function_call_arguments.delta", **where, "delta": call.arguments},
            {"type": "response.function_call_arguments.done", **where, "name": call.name, "arguments": call.arguments},
            self._item_event("done", item),
        ]
        self.items.append(item)
        return events

    def _item_event(self, what: str, item: dict[str, Any]) -> Event:
        return {"type": f"response.output_item.{what}", "output_index": len(self.items), "item": item}

    def _part_event(self, item: _Open, kind: str, **more: Any) -> Event:
        where = {"item_id": item.id, "output_index": len(self.items), "content_index": 0}
        return {"type": kind, **where, **more}


def _text_item(item: _Open, status: str, content: Sequence[dict[str, Any]]) -> dict[str, Any]:
    role: dict[str, Any] = {"role": "assistant"} if item.kind == "message" else {"summary": []}
    return {"id": item.id, "type": item.kind, "status": status, **role, "content": content}


def _part(kind: str, text: str, logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    more = {"annotations": [], "logprobs": logprobs} if kind == "message" else {}
    return {"type": TEXTS[kind], "text": text, **more}
