"""Answers in the public shapes: whole objects and stream chunks of chat and of text completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from typing import Any, Protocol

from app.completion import Delta, Timings, TokenLogprob, Usage

LOGPROB_FLOOR = -9999.0  # JSON has no infinity


class Form(Protocol):
    """How one kind of completion is written down. An instance serves one request: it remembers what it has sent."""

    @property
    def id_prefix(self) -> str: ...
    @property
    def whole_object(self) -> str: ...
    @property
    def chunk_object(self) -> str: ...
    def choice(
        self, index: int, text: str, logprobs: tuple[TokenLogprob, ...], finish_reason: str | None
    ) -> dict[str, Any]:
        """One choice of a whole answer."""
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

    def choice(
        self, index: int, text: str, logprobs: tuple[TokenLogprob, ...], finish_reason: str | None
    ) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": self._logprobs(logprobs),
            "finish_reason": finish_reason,
        }

    def pieces(self, delta: Delta) -> list[dict[str, Any]]:
        pieces = []
        if delta.index not in self.opened:
            self.opened.add(delta.index)
            pieces.append(self._piece(delta.index, {"role": "assistant", "content": ""}))
        if delta.text or delta.logprobs:
            logprobs = self._logprobs(delta.logprobs) if delta.logprobs else None
            pieces.append(self._piece(delta.index, {"content": delta.text}, logprobs))
        if delta.finish_reason is not None:
            pieces.append(self._piece(delta.index, {}, None, delta.finish_reason))
        return pieces

    def _piece(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def _logprobs(self, entries: tuple[TokenLogprob, ...]) -> dict[str, Any] | None:
        if not self.with_logprobs:
            return None
        return {"content": [_chat_entry(entry) for entry in entries], "refusal": None}


class TextForm:
    """``text_offset`` counts characters from the start of the choice's text, over all its chunks."""

    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def __init__(self, with_logprobs: bool) -> None:
        self.with_logprobs = with_logprobs
        self.offsets: dict[int, int] = {}

    def choice(
        self, index: int, text: str, logprobs: tuple[TokenLogprob, ...], finish_reason: str | None
    ) -> dict[str, Any]:
        table = self._logprobs(index, logprobs) if self.with_logprobs else None
        return {"index": index, "text": text, "logprobs": table, "finish_reason": finish_reason}

    def pieces(self, delta: Delta) -> list[dict[str, Any]]:
        pieces = []
        if delta.text or delta.logprobs:
            table = self._logprobs(delta.index, delta.logprobs) if delta.logprobs else None
            pieces.append({"index": delta.index, "text": delta.text, "logprobs": table, "finish_reason": None})
        if delta.finish_reason is not None:
            pieces.append({"index": delta.index, "text": "", "logprobs": None, "finish_reason": delta.finish_reason})
        return pieces

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
        choices = [
            self.form.choice(
                index,
                "".join(delta.text for delta in parts),
                tuple(entry for delta in parts for entry in delta.logprobs),
                parts[-1].finish_reason,
            )
            for index, parts in sorted(deltas.items())
        ]
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


def _finite(logprob: float) -> float:
    return max(logprob, LOGPROB_FLOOR)


def _token(entry: TokenLogprob) -> dict[str, Any]:
    return {"token": entry.text, "logprob": _finite(entry.logprob), "bytes": list(entry.data)}


def _chat_entry(entry: TokenLogprob) -> dict[str, Any]:
    return {**_token(entry), "top_logprobs": [_token(other) for other in entry.top]}


def _alternatives(entry: TokenLogprob) -> dict[str, float]:
    """Text to log-probability, the drawn token included. Of tokens with equal text the likelier one stands."""
    table: dict[str, float] = {}
    for other in (*entry.top, entry):
        table[other.text] = max(table.get(other.text, LOGPROB_FLOOR), other.logprob)
    return table
