"""Bring one completion to one client, and cancel it in the moment that the client is gone."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from typing import Any

import orjson
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from app.api import sse
from app.api.answers import Answer, timings_json, usage_json
from app.api.errors import refusal
from app.api.rate_limit import Reservation
from app.completion import Completion, Delta, Timings, Usage

log = logging.getLogger("mlxcel.api")

ADMISSION_WAIT_S = 10.0
# How long a client may leave what was sent to it unread, once all buffers on the way are full.
SEND_TIMEOUT_S = 30.0
CLIENT_GONE = 499  # nobody is left to read a status: this one is for the log and the counters
FACTS = "mlxcel.generation"  # where a scope holds the facts of its completion, for the access log
COMPLETION = "mlxcel.completion"  # and the completion itself, for traces

# The deltas of each choice, with what they took, as one JSON value; or a completion as events, while it grows.
WriteWhole = Callable[[Mapping[int, list[Delta]], Usage, Timings], Any]
WriteEvents = Callable[[Completion], AsyncGenerator[bytes, None]]
Deliver = Callable[[Completion, Send], Awaitable[None]]


class Delivery(Response):
    """A response that owns its completion: however it ends, the completion is closed and its tokens are settled.

    The client is watched from the first moment on, so that one who leaves while queued gives the place back.
    """

    def __init__(self, completion: Completion, reservation: Reservation, deliver: Deliver) -> None:
        super().__init__()
        self.completion = completion
        self.reservation = reservation
        self.deliver = deliver

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Raises the completion's refusal while nothing has been sent; later failures go into the stream."""
        end = "cancelled"
        scope[COMPLETION] = self.completion
        gone = asyncio.ensure_future(_until_disconnect(receive))
        work = asyncio.ensure_future(self.deliver(self.completion, _in_time(send)))
        try:
            await asyncio.wait({gone, work}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                end = "error"
                work.result()
                end = self.completion.finish_reason or end
        finally:
            self.completion.close()
            scope[FACTS] = _facts(self.completion, end)
            is_refused = work.done() and work.exception() is not None
            usage = self.completion.usage
            self.reservation.settle(0 if is_refused else usage.prompt_tokens + usage.completion_tokens)
            gone.cancel()
            work.cancel()
            await asyncio.gather(gone, work, return_exceptions=True)


def _facts(completion: Completion, end: str) -> dict[str, Any]:
    """Seconds are None for what was never reached: a slot, a first token."""
    usage, timings = completion.usage, completion.timings
    has_begun = usage.completion_tokens > 0
    return {
        "finish_reason": end,
        "queue_s": round(timings.queue_s, 6) if has_begun or timings.queue_s else None,
        "ttft_s": round(timings.queue_s + timings.prompt_s, 6) if has_begun else None,
        "prompt_tokens": usage.prompt_tokens,
        "cached_tokens": usage.cached_tokens,
        "completion_tokens": usage.completion_tokens,
    }


async def send_whole(write: WriteWhole, headers: dict[str, str], completion: Completion, send: Send) -> None:
    """Send everything at once, when all choices are finished."""
    deltas: dict[int, list[Delta]] = {}
    async for delta in completion:
        deltas.setdefault(delta.index, []).append(delta)
    body = orjson.dumps(write(deltas, completion.usage, completion.timings))
    await _start(send, {**headers, "content-type": "application/json", "content-length": str(len(body))})
    await send({"type": "http.response.body", "body": body})


async def send_stream(
    write: WriteEvents,
    headers: dict[str, str],
    completion: Completion,
    send: Send,
    ping: bytes = sse.PING,
) -> None:
    """Send the completion's server-sent events. Headers wait for admission, for a while: until then a refusal is a real
    status."""
    await completion.admitted(ADMISSION_WAIT_S)
    try:
        await _start(send, {**headers, **sse.HEADERS})
        async with aclosing(sse.with_pings(write(completion), sse.PING_INTERVAL_S, ping)) as pinged:
            async for event in pinged:
                await send({"type": "http.response.body", "body": event, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
    except OSError:
        return  # how newer ASGI servers say that the client has left


async def chunks(
    answer: Answer, num_choices: int, with_usage: bool, completion: Completion
) -> AsyncGenerator[bytes, None]:
    """The answer as OpenAI streams it; a failure is the last event."""
    usage_field = {"usage": None} if with_usage else {}
    open_choices = num_choices
    last: dict[str, object] = {}
    try:
        async for delta in completion:
            open_choices -= delta.finish_reason is not None
            ready = [answer.chunk([piece], **usage_field) for piece in answer.form.pieces(delta)]
            if open_choices == 0 and ready:
                last = ready.pop()  # waits for the timings, which are complete after the last delta
            for chunk in ready:
                yield sse.event(chunk)
    except Exception as exc:
        yield sse.event(refusal(exc).body)
        return
    yield sse.event({**last, "timings": timings_json(completion.usage, completion.timings)})
    if with_usage:
        yield sse.event(answer.chunk([], usage=usage_json(completion.usage)))
    yield sse.DONE


async def _start(send: Send, headers: dict[str, str]) -> None:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": 200, "headers": raw})


def _in_time(send: Send) -> Send:
    """``send``, but a client that takes nothing for ``SEND_TIMEOUT_S`` counts as one that has left."""

    async def send_in_time(message: Message) -> None:
        try:
            async with asyncio.timeout(SEND_TIMEOUT_S):
                await send(message)
        except TimeoutError:
            log.warning("a client has not read for %g s and is given up", SEND_TIMEOUT_S)
            raise ClientDisconnect from None

    return send_in_time


async def _until_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
