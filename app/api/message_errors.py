"""Failures as Anthropic's API tells them, on its own routes."""

from __future__ import annotations

from typing import Any

ROUTE = "/v1/messages"
TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


def is_message_path(path: str) -> bool:
    """Whether a path belongs to Anthropic's API, also where there is no such route."""
    return path == ROUTE or path.startswith(f"{ROUTE}/")


def message_error(status: int, message: str, request_id: str) -> dict[str, Any]:
    """The body of a failure, and the data of an ``error`` event."""
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}
