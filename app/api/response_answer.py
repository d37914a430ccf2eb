"""One response under one id: as a whole object, or as the events that lead to it."""

from __future__ import annotations

import itertools
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from typing import Any

from app.api import sse
from app.api.errors import refusal
from app.api.response_output import Output
from app.completion import Completion, Delta, Timings, Usage

# What every response says: here there is one way to do it.
FIXED = {"background": False, "service_tier": "default", "truncation": "disabled"}


class ResponseAnswer:
    """``finished`` is told the object before anybody sees that it is complete, and of a failed response never."""

    def __init__(
        self,
        response_id: str,
        shown: Mapping[str, Any],
        with_logprobs: bool,
        finished: Callable[[dict[str, Any]], None],
    ) -> None:
        """``shown`` is what the response says of its request, the name of the model included."""
        self._head = {"id": response_id, "object": "response", "created_at": int(time.time()), **FIXED, **shown}
        self._output = Output(response_id, with_logprobs)
        self._finished = finished

    def whole(self, deltas: Mapping[int, list[Delta]], usage: Usage, timings: Timings) -> dict[str, Any]:
        """The object from all deltas, joined as a stream's reader would join them."""
        for delta in itertools.chain(*deltas.values()):
            self._output.take(delta)
        return self._finish(usage)

    async def events(self, completion: Completion) -> AsyncGenerator[bytes, None]:
        """The numbered events. A failure is told in the last of them."""
        numbers = itertools.count()

        def numbered(event: dict[str, Any]) -> bytes:
            return sse.event({**event, "sequence_number": next(numbers)}, event["type"])

        yield numbered({"type": "response.created", "response": self._object("in_progress")})
        yield numbered({"type": "response.in_progress", "response": self._object("in_progress")})
        try:
            async for delta in completion:
                for event in self._output.take(delta):
                    yield numbered(event)
            last = self._finish(completion.usage)
        except Exception as exc:
            error = {"code": "server_error", "message": refusal(exc).body["error"]["message"]}
            last = self._object("failed", error=error)
        yield numbered({"type": f"response.{last['status']}", "response": last})

    def _finish(self, usage: Usage) -> dict[str, Any]:
        is_complete = self._output.is_complete
        response = self._object(
            "completed" if is_complete else "incomplete",
            completed_at=int(time.time()) if is_complete else None,
            incomplete_details=None if is_complete else {"reason": "max_output_tokens"},
            usage=_usage(usage, self._output.num_reasoning),
        )
        self._finished(response)
        return response

    def _object(self, status: str, **more: Any) -> dict[str, Any]:
        open_ends = {"completed_at": None, "error": None, "incomplete_details": None, "usage": None}
        return {**self._head, **open_ends, "status": status, "output": list(self._output.items), **more}


def _usage(usage: Usage, num_reasoning: int) -> dict[str, Any]:
    """In the names that responses have; nothing is charged for writing to the cache, so nothing is counted there."""
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
