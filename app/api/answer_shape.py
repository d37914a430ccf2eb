"""What an answer must look like: OpenAI's ``response_format``, ``json_schema`` and ``grammar`` of llama-server, and the
arguments of calls that are forced."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import orjson

from app.errors import InvalidRequest
from app.service import Shape

MAX_SCHEMA_BYTES = 1 << 16
MAX_GRAMMAR_BYTES = 1 << 14
MAX_FORCED_BYTES = 1 << 18
NO_PARAMETERS: dict[str, Any] = {"properties": {}, "additionalProperties": False}
# The members that each type of response_format may have.
MEMBERS = {"text": (), "json_object": ("schema",), "json_schema": ("json_schema",)}
# The members of response_format.json_schema, and what they must be. The schema holds whether or not strict is true.
NAMED_SCHEMA = {"name": str, "description": str, "strict": bool, "schema": dict}


def shape_of(response_format: dict[str, Any] | None, json_schema: dict[str, Any] | None, grammar: str) -> Shape | None:
    """The shape that is asked for, None if any text will do.

    Raises:
        InvalidRequest: naming the field: more than one shape, not a shape, too large, or nested too deeply.
    """
    shapes = [
        _from_format(response_format) if response_format is not None else None,
        schema_shape(json_schema, "json_schema") if json_schema is not None else None,
        _grammar(grammar) if grammar else None,
    ]
    given = [shape for shape in shapes if shape is not None]
    if len(given) > 1:
        one, other = given[0].param, given[1].param
        raise InvalidRequest(f"{other}: cannot go together with {one}", other)
    return given[0] if given else None


def forced_calls(tools: Sequence[dict[str, Any]], names: Collection[str]) -> tuple[tuple[str, str], ...]:
    """The functions of ``names``, each with the JSON schema of its arguments.

    Raises:
        InvalidRequest: naming the tool: its parameters do not describe an object, are too large, or nested too deeply.
    """
    found: list[tuple[str, str]] = []
    for index, tool in enumerate(tools):
        function = tool["function"]
        if function["name"] in names:
            where = f"tools[{index}].function.parameters"
            parameters = function.get("parameters", NO_PARAMETERS)
            if parameters.get("type", "object") != "object":
                raise _fault(where, "must describe an object, for a call to be forced")
            found.append((function["name"], schema_shape({"type": "object", **parameters}, where).source))
    num_bytes = sum(len(schema.encode()) for _, schema in found)
    if num_bytes > MAX_FORCED_BYTES:
        raise _fault("tools", f"to force a call, {MAX_FORCED_BYTES} bytes of parameters are allowed, not {num_bytes}")
    return tuple(found)


def _from_format(value: dict[str, Any]) -> Shape | None:
    given = {name: item for name, item in value.items() if item is not None}
    kind = given.pop("type", None)
    if not isinstance(kind, str) or kind not in MEMBERS:
        raise _fault("response_format.type", f"must be one of {', '.join(MEMBERS)}")
    _check_members(given, MEMBERS[kind], "response_format")
    if kind == "text":
        return None
    if kind == "json_object":
        schema = given.get("schema", {})
        if not isinstance(schema, dict):
            raise _fault("response_format.schema", "must be an object")
        return schema_shape({"type": "object", **schema}, "response_format")
    named = given.get("json_schema")
    if not isinstance(named, dict):
        raise _fault("response_format.json_schema", "must be an object")
    named = {name: item for name, item in named.items() if item is not None}
    _check_members(named, tuple(NAMED_SCHEMA), "response_format.json_schema")
    for name, item in named.items():
        if not isinstance(item, NAMED_SCHEMA[name]):
            expected = {str: "a string", bool: "true or false", dict: "an object"}[NAMED_SCHEMA[name]]
            raise _fault(f"response_format.json_schema.{name}", f"must be {expected}")
    if "schema" not in named:
        raise _fault("response_format.json_schema.schema", "is required")
    return schema_shape(named["schema"], "response_format")


def schema_shape(schema: dict[str, Any], param: str) -> Shape:
    """JSON that fits ``schema``. Raises InvalidRequest naming ``param``: too large, or nested too deeply."""
    try:
        source = orjson.dumps(schema)
    except orjson.JSONEncodeError:
        raise _fault(param, "the schema is nested too deeply") from None
    if len(source) > MAX_SCHEMA_BYTES:
        raise _fault(param, f"the schema has {len(source)} bytes, and {MAX_SCHEMA_BYTES} are allowed")
    return Shape("json_schema", source.decode(), param)


def _grammar(grammar: str) -> Shape:
    num_bytes = len(grammar.encode())
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise _fault("grammar", f"has {num_bytes} bytes, and {MAX_GRAMMAR_BYTES} are allowed")
    return Shape("grammar", grammar, "grammar")


def _check_members(given: dict[str, Any], allowed: tuple[str, ...], where: str) -> None:
    for name in given:
        if name not in allowed:
            raise _fault(where, f"{name[:64]!r} is not known here")


def _fault(param: str, what: str) -> InvalidRequest:
    return InvalidRequest(f"{param}: {what}", param)
