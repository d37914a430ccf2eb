"""Our own OpenAPI 3.1 document, out of the routes, ``app.api.operations`` and the request bodies."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cache
from http import HTTPStatus
from importlib import metadata
from typing import Any

from pydantic.json_schema import models_json_schema
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from app.api.middleware import OPEN_PATHS
from app.api.operations import OPERATIONS, Operation, Schema
from app.api.protocol import Body, ModelBody
from app.api.seam import Wiring

COMPONENT = "#/components/schemas/{model}"
ERROR: Schema = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer", "null"]},
            },
            "required": ["message", "type"],
        }
    },
    "required": ["error"],
}
# Two ways to send a key, each enough alone: OpenAI's and Anthropic's.
KEY_SCHEMES = {
    "key": {"type": "http", "scheme": "bearer"},
    "x_api_key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}
METHODS = ("DELETE", "GET", "PATCH", "POST", "PUT")
RETRY_AFTER = {"Retry-After": {"schema": {"type": "integer"}, "description": "seconds; absent from health checks"}}


async def openapi(request: Request) -> Response:
    """The document as JSON. It needs no model, so it is there while one is being loaded."""
    wiring: Wiring = request.app.state.wiring
    asks_for_key = bool(wiring.settings.api_keys) or wiring.settings.api_key_file is not None
    # Not orjson, which knows no number as large as a seed's bound.
    return Response(json.dumps(document(request.app.routes, asks_for_key)), media_type="application/json")


def document(routes: Iterable[BaseRoute], asks_for_key: bool = False) -> dict[str, Any]:
    """Describe ``routes``. HEAD, which comes with every GET, is left out. Raises KeyError for a route that has no
    operation."""
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        if isinstance(route, Route) and route.include_in_schema:
            path = re.sub(r":\w+}", "}", route.path)
            for method in methods(route):
                paths.setdefault(path, {})[method.lower()] = _operation(method, path, asks_for_key)
    return {
        "openapi": "3.1.0",
        "info": {"title": "mlxcel", "version": metadata.version("mlxcel"), "summary": "Inference server"},
        "security": [{name: []} for name in KEY_SCHEMES] if asks_for_key else [],
        "paths": paths,
        "components": {
            "schemas": {"Error": ERROR, **_body_schemas()},
            "securitySchemes": KEY_SCHEMES,
        },
    }


def methods(route: Route) -> list[str]:
    """What a route answers to; an endpoint that is a class has a function for each."""
    answered = route.methods or {name for name in METHODS if hasattr(route.endpoint, name.lower())}
    return sorted(answered - {"HEAD"})


def _operation(method: str, path: str, asks_for_key: bool) -> dict[str, Any]:
    operation = OPERATIONS[path]
    is_open = path in OPEN_PATHS
    refusals = [*operation.statuses, *([401] if asks_for_key and not is_open else [])]
    described: dict[str, Any] = {
        "operationId": method.lower() + re.sub(r"\W", "_", path),
        "summary": operation.summary,
        "responses": {"200": _answer(operation), **{str(status): _refusal(status) for status in sorted(refusals)}},
    }
    if is_open:
        described["security"] = []
    if parameters := [*_in_path(path), *_in_query(operation)]:
        described["parameters"] = parameters
    if operation.body is not None:
        schema = {"$ref": COMPONENT.format(model=operation.body.__name__)}
        described["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return described


def _answer(operation: Operation) -> dict[str, Any]:
    if operation.answer is None:
        content: dict[str, Any] = {"text/plain": {"schema": {"type": "string"}}}
    else:
        content = {"application/json": {"schema": operation.answer}}
    if operation.chunk is not None:
        # OpenAPI 3.1 has no words for the events of a stream: itemSchema is what 3.2 calls them.
        content["text/event-stream"] = {"schema": {"type": "string"}, "x-itemSchema": operation.chunk}
    return {"description": "OK", "content": content}


def _refusal(status: int) -> dict[str, Any]:
    refusal: dict[str, Any] = {
        "description": HTTPStatus(status).phrase,
        "content": {"application/json": {"schema": {"$ref": COMPONENT.format(model="Error")}}},
    }
    return refusal | ({"headers": RETRY_AFTER} if status in (429, 503) else {})


def _in_path(path: str) -> list[dict[str, Any]]:
    names = re.findall(r"{(\w+)}", path)
    return [{"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names]


def _in_query(operation: Operation) -> list[dict[str, Any]]:
    return [{"name": name, "in": "query", "schema": schema} for name, schema in operation.query.items()]


@cache
def _body_schemas() -> dict[str, Schema]:
    """The schemas of all bodies and of what they are made of, by name."""
    bodies = [operation.body for operation in OPERATIONS.values() if operation.body is not None]
    pairs = [(body, "validation") for body in dict.fromkeys(bodies)]
    found: dict[str, Schema] = models_json_schema(pairs, ref_template=COMPONENT)[1]["$defs"]  # type: ignore[arg-type]
    for body in dict.fromkeys(bodies):
        schema = found[body.__name__]
        schema["properties"] = _members(body, schema)
    return found


def _members(body: type[Body], schema: Schema) -> dict[str, Schema]:
    """The members of a body, with those that are no fields of ours, and with null for whatever may be absent."""
    members: dict[str, Schema] = dict(schema["properties"])
    if issubclass(body, ModelBody):
        for name, neutral in body.neutral.items():
            members[name] = {"description": "not supported", "enum": list(neutral)} if neutral else {"type": "null"}
        members |= {name: {"description": f"no effect: {why}"} for name, why in body.inert.items()}
    required = schema.get("required", ())
    return {name: member if name in required else _or_null(member) for name, member in members.items()}


def _or_null(schema: Schema) -> Schema:
    options = schema.get("anyOf")
    if {"type": "null"} in (options or [schema]) or not schema.keys() - {"description"}:
        return schema
    notes: Schema = {name: schema[name] for name in ("title", "description", "default") if name in schema}
    options = options or [{name: item for name, item in schema.items() if name not in notes}]
    return {"anyOf": [*options, {"type": "null"}], **notes}
