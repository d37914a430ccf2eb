"""Answers in Anthropic's shapes: a message of content blocks, whole or as the events that it grows by."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator, Iterable, Mapping
from typing import Any, Literal

import orjson

from app.api import sse
from app.api.errors import refusal
from app.api.message_errors import message_error
from app.completion import Completion, Delta, Timings, Usage
from app.text.tool_calls import ToolCall

PING = sse.event({"type": "ping"}, "ping")
# Clients keep thoughts for the next turn only if they are signed. Nothing is verified here, and this says so.
SIGNATURE = "unsigned"

# What becomes of the model's reasoning: a block, a block without its text, or nothing where it was not asked for.
Thoughts = Literal["shown", "omitted", "unasked"]


class Blocks:
    """The content blocks of one answer: a delta in, the events of a stream out."""

    def __init__(self, thoughts: Thoughts) -> None:
        self._thoughts = thoughts
        self._open = ""  # the kind of the block that is being written
        self._index = -1

    def grow(self, delta: Delta) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        if delta.reasoning and self._thoughts != "unasked":
            events += self._begin("thinking", thinking="", signature="")
            if self._thoughts == "shown":
                events.append(self._delta("thinking_delta", thinking=delta.reasoning))
        if delta.text:
            events += self._begin("text", text="")
            events.append(self._delta("text_delta", text=delta.text))
        for call in delta.calls:
            events += self._call(call)
        return events

    def end(self) -> list[dict[str, Any]]:
        """End the block that is being written, if there is one."""
        events: list[dict[str, Any]] = []
        if self._open == "thinking":
            events.append(self._delta("signature_delta", signature=SIGNATURE))
        if self._open:
            events.append({"type": "content_block_stop", "index": self._index})
        self._open = ""
        return events

    def _call(self, call: ToolCall) -> list[dict[str, Any]]:
        return [
            *self.end(),
            *self._begin("tool_use", id=call.id, name=call.name, input={}),
            self._delta("input_json_delta", partial_json=call.arguments),
            *self.end(),
        ]

    def _begin(self, kind: str, **empty: Any) -> list[dict[str, Any]]:
        if self._open == kind:
            return []
        ended = self.end()
        self._open = kind
        self._index += 1
        block = {"type": kind, **empty}
        return [*ended, {"type": "content_block_start", "index": self._index, "content_block": block}]

    def _delta(self, kind: str, **grown: str) -> dict[str, Any]:
        return {"type": "content_block_delta", "index": self._index, "delta": {"type": kind, **grown}}


class MessageAnswer:
    """One answer under one id. ``max_tokens`` and ``thoughts`` are as the request has them."""

    def __init__(self, model: str, max_tokens: int, thoughts: Thoughts, request_id: str) -> None:
        self._head = {"id": f"msg_{uuid.uuid4().hex}", "type": "message", "role": "assistant", "model": model}
        self._max_tokens = max_tokens
        self._blocks = Blocks(thoughts)
        self._request_id = request_id

    def whole(self, deltas: Mapping[int, list[Delta]], usage: Usage, timings: Timings) -> dict[str, Any]:
        """The blocks are put together from the very events that a stream has."""
        (grown,) = deltas.values()
        events = [event for delta in grown for event in self._blocks.grow(delta)]
        content = _read([*events, *self._blocks.end()])
        return {**self._head, "content": content, **self._stop(grown[-1], usage), "usage": usage_json(usage)}

    async def events(self, completion: Completion) -> AsyncGenerator[bytes, None]:
        """The answer as a stream; a failure is the last event. It begins when there is a slot: only then it is known
        how much of the prompt came from the prefix cache."""
        last = Delta(0)
        try:
            await completion.admitted(None)
            message: dict[str, Any] = {**self._head, "content": [], "stop_reason": None, "stop_sequence": None}
            message["usage"] = usage_json(completion.usage)
            yield _sent({"type": "message_start", "message": message})
            yield PING
            async for delta in completion:
                last = delta
                for event in self._blocks.grow(delta):
                    yield _sent(event)
        except Exception as exc:
            failure = refusal(exc)
            yield _sent(message_error(failure.status, failure.body["error"]["message"], self._request_id))
            return
        for event in self._blocks.end():
            yield _sent(event)
        usage = completion.usage
        yield _sent({"type": "message_delta", "delta": self._stop(last, usage), "usage": usage_json(usage)})
        yield _sent({"type": "message_stop"})

    def _stop(self, last: Delta, usage: Usage) -> dict[str, Any]:
        if last.finish_reason == "length":
            is_full = usage.completion_tokens < self._max_tokens and last.limit is None
            reason = "model_context_window_exceeded" if is_full else "max_tokens"
        elif last.finish_reason == "tool_calls":
            reason = "tool_use"
        else:
            reason = "end_turn" if last.stop_string is None else "stop_sequence"
        return {"stop_reason": reason, "stop_sequence": last.stop_string if reason == "stop_sequence" else None}


def usage_json(usage: Usage) -> dict[str, int]:
    """The three counts of input add up to the prompt. What is computed of it is kept for others at no price of its own,
    so nothing counts as cache creation."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _read(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content that a stream's events add up to."""
    content: list[dict[str, Any]] = []
    pieces: dict[str, list[str]] = {}
    for event in events:
        if event["type"] == "content_block_start":
            content.append(dict(event["content_block"]))
            pieces = {}
        elif event["type"] == "content_block_delta":
            for name, piece in event["delta"].items():
                pieces.setdefault(name, []).append(piece)
        else:
            texts: dict[str, Any] = {name: "".join(parts) for name, parts in pieces.items() if name != "type"}
            if "partial_json" in texts:
                texts = {"input": orjson.Fragment(texts["partial_json"])}
            content[-1] |= texts
    return content


def _sent(event: dict[str, Any]) -> bytes:
    return sse.event(event, event["type"])
