"""What surrounds every request: its id, the access log, the last net under exceptions, and API keys."""

from __future__ import annotations

import hmac
import logging
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app import errors
from app.api.errors import refusal
from app.api.seam import Counting

log = logging.getLogger("mlxcel.access")

OPEN_PATHS = frozenset({"/health", "/v1/health", "/health/live", "/health/ready"})
CLIENT_GONE = 499  # nobody is left to read a status: this one is for the log and the counters
MAX_REQUEST_ID = 128


class Access:
    """Give each response an ``x-request-id``, log one line for it, count it, and let no exception out as text."""

    def __init__(self, app: ASGIApp, metrics: Counting) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = _request_id(Headers(scope=scope).get("x-request-id"))
        status: int | None = None
        started_s = time.perf_counter()

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        try:
            await self.app(scope, receive, send_marked)
        except ClientDisconnect:
            pass
        except Exception as exc:
            answer = refusal(exc).response()
            if status is not None:
                raise  # headers are out: only the server below can still end this connection
            await answer(scope, receive, send_marked)
        finally:
            route = getattr(scope.get("route"), "path", "unmatched")
            final = CLIENT_GONE if status is None else status
            self.metrics.count_response(final)
            log.info(
                "%s %s %d",
                scope["method"],
                route,
                final,
                extra={
                    "method": scope["method"],
                    "route": route,
                    "status": final,
                    "seconds": round(time.perf_counter() - started_s, 6),
                    "request_id": request_id,
                },
            )


class ApiKeys:
    """Ask for ``Authorization: Bearer <key>`` on all paths but the health checks."""

    def __init__(self, app: ASGIApp, keys: tuple[str, ...]) -> None:
        self.app = app
        self.keys = tuple(key.encode() for key in keys)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._admits(scope):
            await self.app(scope, receive, send)
            return
        await refusal(errors.Unauthorized()).response()(scope, receive, send)

    def _admits(self, scope: Scope) -> bool:
        # Bytes, not str: compare_digest raises on text outside ASCII. All keys are compared, so time tells nothing.
        header = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
        scheme, _, given = header.partition(b" ")
        matches = [hmac.compare_digest(given.strip(), key) for key in self.keys]
        return scheme.lower() == b"bearer" and any(matches)


def _request_id(given: str | None) -> str:
    if given and len(given) <= MAX_REQUEST_ID and all("!" <= char <= "~" for char in given):
        return given
    return uuid.uuid4().hex
