"""Shots that schemathesis makes of the server's own OpenAPI document: such as fit it, and such as do not."""

from __future__ import annotations

import contextlib
import copy
import itertools
import multiprocessing
import queue
import warnings
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import hypothesis
import requests
import schemathesis
from schemathesis.generation import GenerationMode

from loadtest.fuzz.shot import Ask, Shot

START_S = 300.0
CASES_A_ROUND = 100  # to find out how costs as much as dozens of them
# What a new schema costs, and what makes an answer long or another model's, is left to chance once in so many rounds.
WIDE_EVERY = 8
SHAPES = ("response_format", "json_schema", "grammar", "text", "output_config")
SETTINGS = hypothesis.settings(
    max_examples=CASES_A_ROUND,
    deadline=None,
    database=None,
    phases=[hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck),
)


@contextlib.contextmanager
def made_ahead(document: dict[str, Any], model: str, seed: int) -> Iterator[Callable[[], Shot | None]]:
    """Make shots in a process of its own, since that takes longer than to send them. Gives a function that gives the
    next one, None while none is ready.

    Raises:
        queue.Empty: there is not even a first one after ``START_S``.
    """
    context = multiprocessing.get_context("spawn")
    ready = context.Queue(1000)
    maker = context.Process(target=_make, args=(document, model, seed, ready), daemon=True)
    maker.start()

    def take() -> Shot | None:
        with contextlib.suppress(queue.Empty):
            shot: Shot = ready.get_nowait()
            return shot
        return None

    try:
        ready.put(ready.get(timeout=START_S))  # only to know that they come
        yield take
    finally:
        maker.kill()
        maker.join()


def _make(document: dict[str, Any], model: str, seed: int, ready: Any) -> None:
    for shot in shots(document, model, Random(seed)):
        ready.put(shot)


def shots(document: dict[str, Any], model: str, rng: Random) -> Iterator[Shot]:
    """Shots without end. Operations take turns; those without a body, which are soon tried, every fourth time."""
    wide, narrow = (
        [result.ok() for result in schemathesis.openapi.from_dict(one).get_all_operations()]
        for one in (copy.deepcopy(document), narrowed(document, model))
    )
    for number in itertools.count():
        for operation in wide if number % WIDE_EVERY == WIDE_EVERY - 1 else narrow:
            if operation.body or operation.query:
                mode = GenerationMode.NEGATIVE if number % 3 == 2 else GenerationMode.POSITIVE
                yield from _round(operation, mode, rng.getrandbits(64))
            elif number % 4 == 0:
                yield from _round(operation, GenerationMode.POSITIVE, rng.getrandbits(64))


def narrowed(document: dict[str, Any], model: str) -> dict[str, Any]:
    """The document with less room: what fits it is mostly answered, and soon."""
    document = copy.deepcopy(document)
    for schema in document["components"]["schemas"].values():
        members = schema.get("properties", {})
        for name in SHAPES:
            members.pop(name, None)
        for name, narrow in {
            "model": {"const": model},
            "max_tokens": {"type": "integer", "minimum": 1, "maximum": 12},
            "max_output_tokens": {"type": "integer", "minimum": 1, "maximum": 12},
            "n_predict": {"type": "integer", "minimum": 1, "maximum": 12},
            "max_completion_tokens": {"type": "null"},
            "n": {"type": "integer", "minimum": 1, "maximum": 3},
            "n_cmpl": {"type": "null"},
            "logit_bias": {"type": "object", "maxProperties": 3, "propertyNames": {"pattern": "^[0-9]{1,4}$"}},
        }.items():
            if name in members:
                members[name] = narrow
    return document


def _round(operation: Any, mode: GenerationMode, seed: int) -> list[Shot]:
    found: list[Shot] = []

    @hypothesis.seed(seed)
    @SETTINGS
    @hypothesis.given(operation.as_strategy(generation_mode=mode))
    def collect(case: schemathesis.Case) -> None:
        if (shot := _shot(case)) is not None:
            found.append(shot)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        collect()
    return found


def _shot(case: schemathesis.Case) -> Shot | None:
    try:
        sent = requests.Request(**case.as_transport_kwargs(base_url="http://fuzz")).prepare()
    except (requests.RequestException, ValueError):
        return None  # a header that no client can send
    body = sent.body.encode() if isinstance(sent.body, str) else sent.body or b""
    head = [f"{case.method} {sent.path_url} HTTP/1.1", "Host: fuzz"]
    lines = [
        f"{name}: {value}" for name, value in sent.headers.items() if name.lower() not in ("host", "content-length")
    ]
    head += [*lines, f"Content-Length: {len(body)}", "", ""]
    data = "\r\n".join(head).encode("utf-8", "surrogateescape") + body
    return Shot("document", data, (Ask(case.method, case.path),))
