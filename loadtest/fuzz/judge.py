"""What a server may answer: nothing that its OpenAPI document does not tell, and no failure of its own."""

from __future__ import annotations

import json
from typing import Any

import jsonschema

from loadtest.fuzz.shot import Ask
from loadtest.fuzz.wire import Answer

# A balancer asks these, and knows what 503 means there; everywhere else it says when to come again.
WITHOUT_RETRY = ("/health", "/v1/health", "/health/live", "/health/ready", "/slots")
PASSING = ("overloaded", "unavailable_error", "overloaded_error")


class Judge:
    """Knows one OpenAPI document."""

    def __init__(self, document: dict[str, Any]) -> None:
        self._operations = {
            (method.upper(), path): operation
            for path, operations in document["paths"].items()
            for method, operation in operations.items()
        }
        self._document = document
        self._validators: dict[str, jsonschema.Draft202012Validator] = {}

    def fault(self, ask: Ask | None, answer: Answer) -> str | None:
        """What is wrong with an answer; None if nothing is. Without ``ask`` only what holds for all of them is looked
        at: what was sent may not even have reached a route."""
        if answer.status >= 500 and answer.status != 501:  # that is a feature the model lacks, or is turned off
            if answer.status != 503:
                return f"status {answer.status}"
            if not answer.headers.get("retry-after", "").isdigit() and (ask is None or ask.route not in WITHOUT_RETRY):
                return "503 without Retry-After"
        operation = self._operations.get((ask.method, ask.route or "")) if ask else None
        if ask is None or operation is None:
            return None
        if "x-request-id" not in answer.headers:
            return "no x-request-id"
        described = operation["responses"].get(str(answer.status))
        if described is None:
            return f"status {answer.status} is not in the document"
        kind = answer.headers.get("content-type", "").partition(";")[0]
        if kind not in described["content"]:
            return f"content type {kind!r} is not in the document"
        if kind == "application/json":
            return self._misshapen(described["content"][kind]["schema"], answer.body)
        if kind == "text/event-stream":
            return self._stream_fault(described["content"][kind]["x-itemSchema"], answer.body)
        return None

    def _misshapen(self, schema: dict[str, Any], body: bytes) -> str | None:
        try:
            value = json.loads(body)
        except ValueError:
            return "a body that is not JSON"
        key = json.dumps(schema, sort_keys=True)
        if key not in self._validators:
            whole = {**schema, "components": self._document["components"]}
            self._validators[key] = jsonschema.Draft202012Validator(whole)
        error = next(self._validators[key].iter_errors(value), None)
        return f"{error.json_path}: {error.message[:200]}" if error else None

    def _stream_fault(self, schema: dict[str, Any], body: bytes) -> str | None:
        """What is wrong with events. Only OpenAI's streams end with [DONE]."""
        events = [event for event in body.decode().split("\n\n") if event and not event.startswith(":")]
        data = [line.removeprefix("data: ") for event in events for line in event.split("\n") if line[:6] == "data: "]
        if not data or len(data) != len(events):
            return "a stream with something else than data"
        for chunk in data[: -1 if data[-1] == "[DONE]" else None]:
            value = json.loads(chunk)
            if error := (value.get("response") or value).get("error"):
                return None if error.get("type") in PASSING else f"a stream with {chunk[:300]}"
            if fault := self._misshapen(schema, chunk.encode()):
                return fault
        return None
