"""From the bytes of a body to a checked model, with errors that a person can act on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import orjson
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.requests import Request

from app.api.protocol import Body, ModelBody
from app.errors import InvalidRequest

B = TypeVar("B", bound=Body)

MAX_NAMED_FIELDS = 20
MAX_NAME_CHARS = 64

# pydantic's error type -> our words; the names in braces are its own.
TEXTS = {
    "missing": "is required",
    "int_type": "must be an integer",
    "int_from_float": "must be an integer",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "bool_type": "must be true or false",
    "string_type": "must be a string",
    "list_type": "must be a list",
    "dict_type": "must be an object",
    "model_type": "must be an object",
    "string_too_short": "must not be empty",
    "too_long": "must have at most {max_length} entries",
    "extra_forbidden": "is not supported by this server",
    "literal_error": "must be one of {expected}",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
}


async def read_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """Read the body, at most ``max_bytes`` of it, as one JSON object.

    Raises:
        HTTPException: 415 for a content type that is not JSON, 413 for a body that is too large.
        InvalidRequest: not JSON, or JSON but not an object.
    """
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise HTTPException(415)
    declared = request.headers.get("content-length", "")
    if declared.isascii() and declared.isdigit() and int(declared[:20]) > max_bytes:
        raise HTTPException(413)
    raw = bytearray()
    async for piece in request.stream():
        raw += piece
        if len(raw) > max_bytes:
            raise HTTPException(413)
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError:
        raise InvalidRequest("The request body is not valid JSON.") from None
    if not isinstance(value, dict):
        raise InvalidRequest("The request body must be a JSON object.")
    return value


def parse(kind: type[B], value: Mapping[str, Any]) -> B:
    """Check ``value`` against ``kind``. A member that is null counts as absent.

    Raises:
        InvalidRequest: the first fault, naming the field.
    """
    given = {name: item for name, item in value.items() if item is not None}
    if issubclass(kind, ModelBody):
        for name, neutral in kind.neutral.items():
            if name in given and not any(given[name] == item and type(given[name]) is type(item) for item in neutral):
                raise InvalidRequest(f"{name}: this value is not supported by this server", name)
    try:
        return kind.model_validate(given)
    except ValidationError as exc:
        raise _readable(exc) from None
    except RecursionError:
        raise InvalidRequest("The request body is nested too deeply.") from None


def unknown_fields(kind: type[ModelBody], value: Mapping[str, Any]) -> list[str]:
    """Names that no API we follow knows, fit for a header: printable ASCII, short, and not too many."""
    given = {name for name, item in value.items() if item is not None}
    names = sorted(given - kind.known_fields())
    for part, inside in kind.parts.items():
        if isinstance(options := value.get(part), dict):
            names += sorted(f"{part}.{name}" for name in set(options) - set(inside.model_fields))
    return [_printable(name) for name in names[:MAX_NAMED_FIELDS]]


def _printable(name: str) -> str:
    return "".join(char if "!" <= char <= "~" and char != "," else "?" for char in name[:MAX_NAME_CHARS])


def _readable(exc: ValidationError) -> InvalidRequest:
    fault = exc.errors(include_url=False)[0]
    where = _path(fault["loc"])
    text = TEXTS.get(fault["type"])
    bounds = {name: _short(bound) for name, bound in fault.get("ctx", {}).items()}
    said = text.format(**bounds) if text else fault["msg"]
    number = fault["input"]
    got = f", got {number}" if isinstance(number, int | float) and not isinstance(number, bool) else ""
    return InvalidRequest(f"{where}: {said}{got}", where)


def _short(bound: Any) -> Any:
    return int(bound) if isinstance(bound, float) and bound.is_integer() else bound


def _path(loc: tuple[int | str, ...]) -> str:
    path = ""
    for step in loc:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path[:128]
