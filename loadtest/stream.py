"""One completion, streamed and timed token by token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import orjson


@dataclass
class Stream:
    """What came so far, also while the request runs or after it was cancelled. All times are of ``perf_counter``."""

    sent_s: float = 0.0
    moments_s: list[float] = field(default_factory=list)  # when text came
    num_tokens: int = 0
    num_cached: int = 0
    begun: asyncio.Event = field(default_factory=asyncio.Event)  # set with the first text

    @property
    def ttft_s(self) -> float:
        return self.moments_s[0] - self.sent_s

    @property
    def end_s(self) -> float:
        """Seconds from sending to the last text."""
        return self.moments_s[-1] - self.sent_s

    async def run(
        self, http: httpx.AsyncClient, model: str, prompt: str | Sequence[int], max_tokens: int, **fields: Any
    ) -> None:
        """Send a greedy request and read it to its end. ``fields`` go into its body.

        Raises:
            RuntimeError: it was refused, or fewer or more tokens came than were asked for.
        """
        body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        } | fields
        self.sent_s = time.perf_counter()
        async with http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise RuntimeError(f"{response.status_code}: {(await response.aread())[:200]!r}")
            async for line in response.aiter_lines():
                if line.startswith("data: {"):
                    self._read(orjson.loads(line[6:]))
        if self.num_tokens != max_tokens:
            raise RuntimeError(f"{self.num_tokens} tokens came instead of {max_tokens}")

    def _read(self, event: dict[str, Any]) -> None:
        if any(choice.get("text") for choice in event.get("choices", ())):
            self.moments_s.append(time.perf_counter())
            self.begun.set()
        if usage := event.get("usage"):
            self.num_tokens = usage["completion_tokens"]
            self.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
