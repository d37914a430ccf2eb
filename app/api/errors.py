"""Every failure as HTTP tells it: one status, one body, for plain answers and for errors inside a stream alike."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, field, replace
from typing import Any

import orjson
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from app import errors
from app.api.message_errors import is_message_path, message_error

log = logging.getLogger("mlxcel.api")

STATUS_AND_TYPE: dict[type[errors.MlxcelError], tuple[int, str]] = {
    errors.InvalidRequest: (400, "invalid_request_error"),
    errors.ModelNotFound: (404, "invalid_request_error"),
    errors.ResponseNotFound: (404, "invalid_request_error"),
    errors.Unauthorized: (401, "authentication_error"),
    errors.FeatureOff: (501, "not_supported_error"),
    errors.RateLimited: (429, "rate_limit_error"),
    errors.Overloaded: (503, "overloaded"),
    errors.MemoryShortage: (503, "overloaded"),
    errors.Unavailable: (503, "unavailable_error"),
    errors.BackendError: (500, "server_error"),
}

HTTP_TEXTS = {
    404: "There is no such route.",
    405: "This route does not take that method.",
    413: "The request body is larger than this server accepts.",
    415: "The request body must be JSON, with content-type application/json.",
}

RETRY_AFTER_S = 1
REQUEST_ID = "mlxcel.request_id"  # where a scope holds its request id


@dataclass(frozen=True, slots=True)
class Refusal:
    """A failure ready to be sent: ``body`` is the whole JSON object, with the text at ``["error"]["message"]``."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str] = field(default_factory=dict)

    def response(self) -> Response:
        return Response(orjson.dumps(self.body), self.status, self.headers, "application/json")


def refusal(exc: Exception) -> Refusal:
    """Translate any exception. One that is not of our tree is logged with its traceback, told as a bare 500."""
    if isinstance(exc, HTTPException):
        text = HTTP_TEXTS.get(exc.status_code, exc.detail)
        headers = dict(exc.headers or {})
        if exc.status_code == 413:
            # The rest of the body stays unread, so the server below closes the connection: say so, or a client that
            # keeps it for its next request finds it gone.
            headers["connection"] = "close"
        return Refusal(exc.status_code, _envelope(text, "invalid_request_error"), headers)
    if isinstance(exc, RecursionError):  # nothing here is nested but what a client sends
        return Refusal(400, _envelope("The request is nested too deeply.", "invalid_request_error"))
    known = next((kind for kind in type(exc).__mro__ if kind in STATUS_AND_TYPE), None)
    if known is None:
        log.error("unexpected failure", exc_info=exc)
        return Refusal(500, _envelope("internal error", "server_error"))
    status, kind = STATUS_AND_TYPE[known]
    match exc:
        case errors.Overloaded():
            # Load balancers and clients match on this body: it has these two members and no other.
            body: dict[str, Any] = {"error": {"message": str(exc), "type": kind}}
        case errors.Unauthorized():
            body = {"error": {"message": str(exc), "type": kind, "code": status}}
        case errors.MemoryShortage():
            body = _envelope(str(exc), kind, code="request_memory_budget_exceeded")
        case errors.InvalidRequest():
            body = _envelope(str(exc), kind, exc.param, exc.code)
        case _:
            body = _envelope(str(exc), kind)
    wait_s = getattr(exc, "retry_after_s", RETRY_AFTER_S if status == 503 else None)
    headers = {} if wait_s is None else {"retry-after": str(max(1, math.ceil(wait_s)))}
    if status == 401:
        headers["www-authenticate"] = "Bearer"
    return Refusal(status, body, headers)


def refusal_for(scope: Scope, exc: Exception) -> Refusal:
    """``refusal``, in the shape of the API that the request came for."""
    found = refusal(exc)
    if is_message_path(scope["path"]):
        text = found.body["error"]["message"]
        return replace(found, body=message_error(found.status, text, scope.get(REQUEST_ID, "")))
    return found


def respond(request: Request, exc: Exception) -> Response:
    """The application's exception entry, for our own tree and for starlette's HTTPException."""
    return refusal_for(request.scope, exc).response()


def _envelope(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}
