"""Answers in the public shapes: whole objects and stream chunks of chat and of text completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from app.completion import Delta, Timings, TokenLogprob, Usage
from app.text.tool_calls import ToolCall

LOGPROB_FLOOR = -9999.0  # JSON has no infinity
GOING_ON: Mapping[str, Any] = {"finish_reason": None}


class Form(Protocol):
    """How one kind of completion is written down. An instance serves one request: it remembers what it has sent."""

    @property
    def id_prefix(self) -> str: ...
    @property
    def whole_object(self) -> str: ...
    @property
    def chunk_object(self) -> str: ...
    def choice(self, whole: Delta) -> dict[str, Any]:
        """One choice of a whole answer: all its deltas in one."""
        ...

    def pieces(self, delta: Delta) -> list[dict[str, Any]]:
        """The choices to send for ``delta``, one a chunk; a finish is always the last of them and stands alone."""
        ...


class ChatForm:
    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, with_logprobs: bool) -> None:
        self.with_logprobs = with_logprobs
        self.opened: set[int] = set()
        self.num_calls: dict[int, int] = {}

    def choice(self, whole: Delta) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": whole.text, "refusal": None}
        if whole.reasoning:
            message["reasoning_content"] = whole.reasoning
        if whole.calls:
            message["content"] = whole.text or None
            message["tool_calls"] = [_call(call) for call in whole.calls]
        return {
            "index": whole.index,
            "message": message,
            "logprobs": self._logprobs(whole.logprobs),
            **_end(whole),
        }

    def pieces(self, delta: Delta) -> list[dict[str, Any]]:
        pieces = []
        if delta.index not in self.opened:
            self.opened.add(delta.index)
            pieces.append(self._piece(delta.index, {"role": "assistant", "content": ""}))
        said: dict[str, Any] = {"reasoning_content": delta.reasoning} if delta.reasoning else {}
        if delta.text or (delta.logprobs and not said):
            said["content"] = delta.text
        if said:
            logprobs = self._logprobs(delta.logprobs) if delta.logprobs else None
            pieces.append(self._piece(delta.index, said, logprobs))
        for call in delta.calls:
            number = self.num_calls.get(delta.index, 0)
            self.num_calls[delta.index] = number + 1
            pieces.append(self._piece(delta.index, {"tool_calls": [{"index": number, **_call(call)}]}))
        if delta.finish_reason is not None:
            pieces.append(self._piece(delta.index, {}, None, _end(delta)))
        return pieces

    def _piece(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        end: Mapping[str, Any] = GOING_ON,
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, **end}

    def _logprobs(self, entries: tuple[TokenLogprob, ...]) -> dict[str, Any] | None:
        if not self.with_logprobs:
            return None
        return {"content": [entry_json(entry) for entry in entries], "refusal": None}


class TextForm:
    """``text_offset`` counts characters from the start of the choice's text, over all its chunks.

    ``echoes`` are the texts that the choices begin with, where they repeat their prompts: one for each ``n`` choices.
    """

    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, with_logprobs: bool, echoes: Sequence[str] = (), n: int = 1) -> None:
        self.with_logprobs = with_logprobs
        self.offsets: dict[int, int] = {}
        self.unsent = {index: echoes[index // n] for index in range(len(echoes) * n)}

    def choice(self, whole: Delta) -> dict[str, Any]:
        table = self._logprobs(whole.index, whole.logprobs) if self.with_logprobs else None
        return self._piece(whole.index, self.unsent.get(whole.index, "") + whole.text, table, _end(whole))

    def pieces(self, delta: Delta) -> list[dict[str, Any]]:
        pieces = []
        text = self.unsent.pop(delta.index, "") + delta.text
        if text or delta.logprobs:
            table = self._logprobs(delta.index, delta.logprobs) if delta.logprobs else None
            pieces.append(self._piece(delta.index, text, table))
        if delta.finish_reason is not None:
            pieces.append(self._piece(delta.index, "", None, _end(delta)))
        return pieces

    def _piece(
        self, index: int, text: str, logprobs: dict[str, Any] | None, end: Mapping[str, Any] = GOING_ON
    ) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, **end}

    def _logprobs(self, index: int, entries: tuple[TokenLogprob, ...]) -> dict[str, Any]:
        offset = self.offsets.get(index, 0)
        text_offset = []
        for entry in entries:
            text_offset.append(offset)
            offset += len(entry.text)
        self.offsets[index] = offset
        return {
            "tokens": [entry.text for entry in entries],
            "token_logprobs": [_finite(entry.logprob) for entry in entries],
            "top_logprobs": [_alternatives(entry) for entry in entries],
            "text_offset": text_offset,
        }


class Answer:
    """One answer under one id. ``model`` is the id shown, whichever accepted name the client used."""

    def __init__(self, form: Form, model: str, fingerprint: str) -> None:
        self.form = form
        self.head = {
            "id": form.id_prefix + uuid.uuid4().hex,
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": fingerprint,
        }

    def whole(self, deltas: Mapping[int, list[Delta]], usage: Usage, timings: Timings) -> dict[str, Any]:
        """The whole answer from the deltas of each choice, joined exactly as a stream's reader would join them."""
        choices = [self.form.choice(_joined(parts)) for _, parts in sorted(deltas.items())]
        return {
            **self.head,
            "object": self.form.whole_object,
            "choices": choices,
            "usage": usage_json(usage),
            "timings": timings_json(usage, timings),
        }

    def chunk(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {**self.head, "object": self.form.chunk_object, "choices": choices, **more}


def usage_json(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def timings_json(usage: Usage, timings: Timings) -> dict[str, Any]:
    """llama-server's names; ``prompt_n`` leaves out the tokens that came from the prefix cache."""
    prompt_n = usage.prompt_tokens - usage.cached_tokens
    return {
        "cache_n": usage.cached_tokens,
        **_phase("prompt", prompt_n, timings.prompt_s),
        **_phase("predicted", usage.completion_tokens, timings.predicted_s),
    }


def _phase(name: str, num_tokens: int, seconds: float) -> dict[str, Any]:
    return {
        f"{name}_n": num_tokens,
        f"{name}_ms": seconds * 1000,
        f"{name}_per_token_ms": seconds * 1000 / num_tokens if num_tokens else 0.0,
        f"{name}_per_second": num_tokens / seconds if seconds > 0 else 0.0,
    }


def _joined(parts: list[Delta]) -> Delta:
    return Delta(
        parts[-1].index,
        "".join(delta.text for delta in parts),
        tuple(entry for delta in parts for entry in delta.logprobs),
        parts[-1].finish_reason,
        "".join(delta.reasoning for delta in parts),
        tuple(call for delta in parts for call in delta.calls),
        limit=parts[-1].limit,
    )


def _end(delta: Delta) -> dict[str, Any]:
    """How a choice ends: ``stop_reason`` tells more of a "length" that is not that of its tokens."""
    return {"finish_reason": delta.finish_reason, **({"stop_reason": delta.limit} if delta.limit else {})}


def _call(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _finite(logprob: float) -> float:
    return max(logprob, LOGPROB_FLOOR)


def token_json(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": entry.text, "logprob": _finite(entry.logprob), "bytes": list(entry.data)}


def entry_json(entry: TokenLogprob) -> dict[str, Any]:
    """A token and its alternatives, as chat and responses have them."""
    return {**token_json(entry), "top_logprobs": [token_json(other) for other in entry.top]}


def _alternatives(entry: TokenLogprob) -> dict[str, float]:
    """Text to log-probability, the drawn token included. Of tokens with equal text the likelier one stands."""
    table: dict[str, float] = {}
    for other in (*entry.top, entry):
        table[other.text] = max(table.get(other.text, LOGPROB_FLOOR), other.logprob)
    return table
