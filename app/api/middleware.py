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
from app.api import page
from app.api.delivery import CLIENT_GONE, FACTS
from app.api.errors import REQUEST_ID, refusal_for
from app.api.keys import Keys
from app.api.message_errors import is_message_path
from app.api.seam import Counting

log = logging.getLogger("mlxcel.access")

HEALTH_PATHS = frozenset({"/health", "/v1/health", "/health/live", "/health/ready"})
OPEN_PATHS = HEALTH_PATHS | page.FILES.keys()
POLLED_ROUTES = HEALTH_PATHS | {"/metrics", "/slots"}  # asked every few seconds for ever: not for the disk
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
MAX_REQUEST_ID = 128
KEY = "mlxcel.key"
LIMITS = "mlxcel.limits"  # where a scope holds what gives the headers about the limits of its key


class Access:
    """Give each response an ``x-request-id``, log one line for it, count it, and let no exception out as text.

    The line has the route's pattern and no path, and what the client chose only where that is checked: nothing of a
    prompt or a key.
    """

    def __init__(self, app: ASGIApp, metrics: Counting) -> None:
        self.app = app
        self.metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        request_id = scope[REQUEST_ID] = _request_id(Headers(scope=scope).get("x-request-id"))
        status: int | None = None
        started_s = time.perf_counter()

        async def send_marked(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                headers.update(scope[LIMITS]() if LIMITS in scope else {})
                if is_message_path(scope["path"]):
                    headers["request-id"] = request_id  # as Anthropic calls it
            await send(message)

        try:
            await self.app(scope, receive, send_marked)
        except ClientDisconnect:
            # Its body is broken off or malformed; should it still be there, it learns so.
            if status is None:
                broken = refusal_for(scope, errors.InvalidRequest("The request body broke off before its end."))
                await broken.response()(scope, receive, send_marked)
                status = None
        except Exception as exc:
            answer = refusal_for(scope, exc).response()
            if status is not None:
                raise  # headers are out: only the server below can still end this connection
            await answer(scope, receive, send_marked)
        finally:
            route = getattr(scope.get("route"), "path", "unmatched")
            final = CLIENT_GONE if status is None else status
            self.metrics.count_response(final)
            log.log(
                logging.DEBUG if route in POLLED_ROUTES else logging.INFO,
                "request",
                extra={
                    "status": final,
                    "method": scope["method"] if scope["method"] in METHODS else "other",
                    "route": route,
                    "request_id": request_id,
                    "seconds": round(time.perf_counter() - started_s, 6),
                    **scope.get(FACTS, {}),
                },
            )


class ApiKeys:
    """Ask for ``Authorization: Bearer <key>``, or ``x-api-key: <key>`` as Anthropic has it, on all paths but the health
    checks and the page's files. A good key stays in the scope."""

    def __init__(self, app: ASGIApp, keys: Keys) -> None:
        self.app = app
        self.keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            key = self._accepted(scope)
            if key is None:
                await refusal_for(scope, errors.Unauthorized()).response()(scope, receive, send)
                return
            scope[KEY] = key
        await self.app(scope, receive, send)

    def _accepted(self, scope: Scope) -> bytes | None:
        # Bytes, not str: compare_digest raises on text outside ASCII. All keys are compared, so time tells nothing.
        headers = dict(reversed(list(scope["headers"])))  # of several, the first
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        given = (bearer.strip() if scheme.lower() == b"bearer" else b"", headers.get(b"x-api-key", b"").strip())
        matches = [key for one in given for key in self.keys.current() if hmac.compare_digest(one, key)]
        return matches[0] if matches else None


def _request_id(given: str | None) -> str:
    if given and len(given) <= MAX_REQUEST_ID and all("!" <= char <= "~" for char in given):
        return given
    return uuid.uuid4().hex
