"""The OpenAPI document: every route is in it, and what it says of bodies and answers is what the server does."""

from __future__ import annotations

import json
import re
from typing import Any, get_args

import jsonschema
import pytest
import schemathesis

from app.api.app import routes
from app.api.fields import ROLES
from app.api.openapi import document, methods
from app.api.operations import OPERATIONS
from app.api.parse import parse
from app.api.protocol import Body
from app.api.written import Role
from app.errors import InvalidRequest
from loadtest.fuzz.bodies import SHAPED, VALID
from loadtest.fuzz.judge import Judge
from loadtest.fuzz.shot import Ask
from loadtest.fuzz.wire import Answer
from tests.scripted import call, make_app

DOCUMENT = document(routes())
BODIES = {path: operation.body for path, operation in OPERATIONS.items() if operation.body is not None}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
HI = [{"role": "user", "content": "hi"}]
LEAST: dict[str, dict[str, Any]] = {
    CHAT: {"messages": HI},
    TEXT: {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/messages": {"messages": HI, "max_tokens": 5},
    "/v1/messages/count_tokens": {"messages": HI},
    "/completion": {"prompt": "hi"},
    "/completions": {"prompt": "hi"},
    "/infill": {"input_prefix": "a", "input_suffix": "b"},
    "/tokenize": {"content": "hi"},
    "/detokenize": {"tokens": [1]},
    "/apply-template": {"messages": HI},
}


def is_described(path: str, value: Any) -> bool:
    schema = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    whole = {**schema, "components": DOCUMENT["components"]}
    return jsonschema.Draft202012Validator(whole).is_valid(value)


def is_taken(kind: type[Body], value: Any) -> bool:
    try:
        parse(kind, value)
    except InvalidRequest:
        return False
    return True


def test_every_route_is_in_the_document_and_nothing_else() -> None:
    found = {path: set(operations) for path, operations in DOCUMENT["paths"].items()}
    there: dict[str, set[str]] = {}
    for route in routes():
        if route.include_in_schema:
            there.setdefault(re.sub(r":\w+}", "}", route.path), set()).update(map(str.lower, methods(route)))
    assert found == there
    assert set(OPERATIONS) == set(there)


def test_it_is_valid_openapi_and_json() -> None:
    schemathesis.openapi.from_dict(json.loads(json.dumps(DOCUMENT))).validate()
    ids = [operation["operationId"] for methods in DOCUMENT["paths"].values() for operation in methods.values()]
    assert len(set(ids)) == len(ids)


def test_every_body_is_tried_here() -> None:
    assert set(LEAST) == set(BODIES)


@pytest.mark.parametrize(("path", "body"), [*LEAST.items(), *VALID, *SHAPED])
def test_a_body_that_is_taken_is_described(path: str, body: dict[str, Any]) -> None:
    assert is_taken(BODIES[path], body)
    assert is_described(path, body)


@pytest.mark.parametrize("path", LEAST)
def test_null_is_as_good_as_absent(path: str) -> None:
    properties = DOCUMENT["components"]["schemas"][BODIES[path].__name__]["properties"]
    for name in properties.keys() - LEAST[path].keys():
        body = {**LEAST[path], name: None}
        assert is_taken(BODIES[path], body), name
        assert is_described(path, body), name


@pytest.mark.parametrize(
    ("path", "more"),
    [
        (CHAT, {"messages": []}),
        (CHAT, {"messages": "hi"}),
        (CHAT, {"messages": [{"role": "nobody", "content": "hi"}]}),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
        (CHAT, {"tools": [{"type": "retrieval"}]}),
        (CHAT, {"tools": [{"type": "function", "function": {"name": "a b"}}]}),
        (CHAT, {"temperature": 2.1}),
        (CHAT, {"temperature": "1"}),
        (CHAT, {"n": 0}),
        (CHAT, {"seed": 2**64}),
        (CHAT, {"stop": ["a"] * 17}),
        (CHAT, {"stop": ""}),
        (CHAT, {"audio": {"voice": "alloy"}}),
        (CHAT, {"store": True}),
        (CHAT, {"reasoning_effort": "immense"}),
        (TEXT, {"prompt": []}),
        (TEXT, {"prompt": [[]]}),
        (TEXT, {"prompt": 5}),
        (TEXT, {"prompt": ["a", 5]}),
        (TEXT, {"logprobs": 21}),
        (TEXT, {"logit_bias": {"5": 101}}),
        ("/tokenize", {"content": 5}),
        ("/detokenize", {"tokens": "a"}),
        ("/apply-template", {"messages": [{}]}),
    ],
)
def test_a_body_that_is_refused_is_not_described(path: str, more: dict[str, Any]) -> None:
    body = {**LEAST[path], **more}
    assert not is_taken(BODIES[path], body)
    assert not is_described(path, body)


def test_roles_are_those_that_are_checked() -> None:
    assert set(get_args(Role)) == ROLES


@pytest.mark.parametrize(("path", "body"), [*LEAST.items(), (CHAT, {"messages": HI, "stream": True}), (TEXT, {})])
def test_answers_to_bodies_are_described(path: str, body: dict[str, Any]) -> None:
    response = call(make_app(), "POST", path, json=body)
    assert response.status_code == (400 if not body else 501 if path == "/infill" else 200)
    answer = Answer(response.status_code, dict(response.headers), response.content)
    assert Judge(DOCUMENT).fault(Ask("POST", path), answer) is None


@pytest.mark.parametrize("path", [path for path, found in DOCUMENT["paths"].items() if "get" in found])
def test_answers_of_other_routes_are_described(path: str) -> None:
    response = call(make_app(), "GET", path.replace("{model_id}", "small").replace("{response_id}", "resp_none"))
    assert response.status_code == (404 if "{response_id}" in path else 200)
    answer = Answer(response.status_code, dict(response.headers), response.content)
    assert Judge(DOCUMENT).fault(Ask("GET", path), answer) is None


def test_with_keys_the_document_says_so_and_needs_one() -> None:
    app = make_app(api_keys=("k",))
    assert call(app, "GET", "/openapi.json").status_code == 401
    found = call(app, "GET", "/openapi.json", headers={"authorization": "Bearer k"}).json()
    assert found == document(routes(), asks_for_key=True)
    assert found["security"] == [{"key": []}, {"x_api_key": []}]
    assert "401" in found["paths"][CHAT]["post"]["responses"]
    assert "401" not in found["paths"]["/health"]["get"]["responses"]
    assert found["paths"]["/health"]["get"]["security"] == []
    assert call(make_app(), "GET", "/openapi.json").json()["security"] == []


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_each_way_to_send_a_key_that_is_described_is_enough(path: str) -> None:
    schemes = DOCUMENT["components"]["securitySchemes"]
    assert {name for way in document(routes(), asks_for_key=True)["security"] for name in way} == set(schemes)
    for scheme in schemes.values():
        headers = {"authorization": "Bearer k"} if scheme["type"] == "http" else {scheme["name"]: "k"}
        assert call(make_app(api_keys=("k",)), "POST", path, json=LEAST[path], headers=headers).status_code == 200
