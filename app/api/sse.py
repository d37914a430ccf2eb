"""Server-sent events: framing, and a comment now and then so that a silent stream is not taken for a dead one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import orjson

DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"
PING_INTERVAL_S = 15.0
HEADERS = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache", "x-accel-buffering": "no"}


def event(data: dict[str, Any], name: str = "") -> bytes:
    """One event, with a name if it has one. JSON escapes line ends, so there is always a single ``data`` line."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + orjson.dumps(data) + b"\n\n"


async def with_pings(
    events: AsyncGenerator[bytes, None], interval_s: float, ping: bytes = PING
) -> AsyncGenerator[bytes, None]:
    """Pass ``events`` on, with a ``ping`` for each ``interval_s`` of silence. Closing this closes ``events``.

    The wait for the next event goes on undisturbed while pings are sent: cancelling it would lose tokens.
    """
    step: asyncio.Future[bytes | None] | None = None
    try:
        while True:
            step = asyncio.ensure_future(anext(events, None))
            while not (await asyncio.wait({step}, timeout=interval_s))[0]:
                yield ping
            item = step.result()
            if item is None:
                return
            yield item
    finally:
        if step is not None and not step.done():
            step.cancel()
            await asyncio.wait({step})
        await events.aclose()
