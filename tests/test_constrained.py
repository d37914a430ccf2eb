"""Constrained requests through scheduler and engine, tick by tick: whole batches, requeues, and what is left behind."""

from __future__ import annotations

import gc
import json
import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jsonschema
import mlx.core as mx
import pytest

from app.engine import loader
from app.engine.engine import Engine
from app.engine.loader import LoadedModel
from app.request import FinishReason, Request, SamplingParams
from app.scheduler.recorder import RecordedScheduler
from app.scheduler.scheduler import Scheduler
from app.text import grammar as grammar_module
from app.text.grammar import Grammar, Grammars, Matcher
from tests.driving import build_scheduler, greedy_request, run

BLOCK_SIZE = 16
NUM_BLOCKS = 128
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["river", "town"]},
        "code": {"type": "string", "pattern": "^[A-Z]{2}[0-9]{3}$"},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["kind", "code", "sizes"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def loaded(tiny_model_dir: Path) -> LoadedModel:
    return loader.load(tiny_model_dir, "auto")


@pytest.fixture(scope="module")
def engine(loaded: LoadedModel) -> Engine:
    return Engine(loaded, NUM_BLOCKS, BLOCK_SIZE)


@pytest.fixture(scope="module")
def deterministic_engine(tiny_model_dir: Path) -> Engine:
    return Engine(loader.load(tiny_model_dir, "auto"), NUM_BLOCKS, BLOCK_SIZE, deterministic=True)


@pytest.fixture(scope="module")
def grammar(loaded: LoadedModel) -> Grammar:
    grammars = Grammars(loaded.tokenizer, loaded.end_tokens, loaded.vocab_size)
    found = grammars.compile("json_schema", json.dumps(SCHEMA)).result(60)
    assert isinstance(found, Grammar)
    return found


def prompt(index: int) -> list[int]:
    return [(31 * index + 7 * i + 11) % 40000 + 100 for i in range(5 + 3 * index)]


def asked(
    loaded: LoadedModel, index: int, grammar: Grammar | None = None, seed: int | None = None, max_tokens: int = 200
) -> Request:
    request = greedy_request(index, prompt(index), max_tokens, end_tokens=loaded.end_tokens)
    if seed is not None:
        request.sampling = SamplingParams(seed=seed)
    if grammar is not None:
        request.constraint = grammar.start(request.num_prompt)
    return request


def check(loaded: LoadedModel, request: Request) -> str:
    """The text of an answer, which has to be valid and to end because it was complete."""
    assert request.finish_reason is FinishReason.STOP
    *tokens, last = request.tokens[request.num_prompt :]
    assert last in loaded.end_tokens
    text = str(loaded.tokenizer.decode(tokens))
    jsonschema.validate(json.loads(text), SCHEMA)
    return text


def all_at_once(requests: Iterable[Request]) -> dict[int, list[Request]]:
    return {0: list(requests)}


def test_random_answers_are_valid(engine: Engine, loaded: LoadedModel, grammar: Grammar) -> None:
    requests = [asked(loaded, i, grammar, seed=i) for i in range(8)]
    run(engine, build_scheduler(NUM_BLOCKS, BLOCK_SIZE, num_slots=8, max_batch_size=8), all_at_once(requests))
    assert len({check(loaded, request) for request in requests}) > 4


def test_an_answer_without_room_ends_with_length(engine: Engine, loaded: LoadedModel, grammar: Grammar) -> None:
    request = asked(loaded, 0, grammar, max_tokens=5)
    run(engine, build_scheduler(NUM_BLOCKS, BLOCK_SIZE), all_at_once([request]))
    assert request.finish_reason is FinishReason.LENGTH
    assert request.num_output == 5


def test_an_answer_beyond_the_limits_of_its_grammar_ends_there_and_nobody_else_does(
    engine: Engine, loaded: LoadedModel, grammar: Grammar
) -> None:
    grammars = Grammars(loaded.tokenizer, loaded.end_tokens, loaded.vocab_size)
    endless = grammars.compile(
        "grammar", 'root ::= ("x" | "y") tail\ntail ::= ("abc" | "abd") more | "z" tail\nmore ::= "ab" more'
    )
    found = endless.result(60)
    assert isinstance(found, Grammar)
    stuck, other = asked(loaded, 0, found, seed=1), asked(loaded, 1, grammar, seed=1)
    run(engine, build_scheduler(NUM_BLOCKS, BLOCK_SIZE), all_at_once([stuck, other]))
    assert stuck.finish_reason is FinishReason.GRAMMAR_LIMIT
    assert loaded.tokenizer.decode(stuck.tokens[stuck.num_prompt :])[0] in "xy"
    check(loaded, other)


def test_a_step_that_takes_too_long_ends_its_answer_and_no_other(
    engine: Engine, loaded: LoadedModel, grammar: Grammar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grammar_module, "STEP_S", -1.0)
    slow, plain = asked(loaded, 0, grammar, seed=1), asked(loaded, 1, seed=1, max_tokens=9)
    run(engine, build_scheduler(NUM_BLOCKS, BLOCK_SIZE), all_at_once([slow, plain]))
    assert (slow.finish_reason, slow.num_output) == (FinishReason.GRAMMAR_LIMIT, 0)
    assert (plain.finish_reason, plain.num_output) == (FinishReason.LENGTH, 9)
    assert plain.num_faults == 0


@pytest.mark.parametrize("batch", [1, 8])
@pytest.mark.parametrize("name", ["engine", "deterministic_engine"])
def test_neighbours_draw_as_without_the_constrained_row(
    loaded: LoadedModel, grammar: Grammar, batch: int, name: str, request: pytest.FixtureRequest
) -> None:
    """Plain, strict, plain: the same plans but for the constraint, so that the shapes of all forwards are the same."""
    used = request.getfixturevalue(name)

    def answers(*constrained: int) -> dict[int, list[int]]:
        requests = [asked(loaded, i, seed=i, max_tokens=10) for i in range(batch + 2)]
        for each in requests:
            each.end_tokens = frozenset()
            if each.id in constrained:
                each.constraint = grammar.start(each.num_prompt)
        scheduler = build_scheduler(NUM_BLOCKS, BLOCK_SIZE, num_slots=batch, max_batch_size=batch)
        return run(used, scheduler, all_at_once(requests))

    strict = (1, 5) if batch > 1 else (1,)
    plain, mixed = answers(), answers(*strict)
    for index in plain:
        assert (plain[index] == mixed[index]) == (index not in strict)


def test_a_requeued_answer_goes_on_where_it_was(engine: Engine, loaded: LoadedModel, grammar: Grammar) -> None:
    """Four answers in blocks for two: rows are pushed out in the midst of theirs."""

    def answers(num_blocks: int) -> tuple[list[str], Scheduler]:
        requests = [asked(loaded, i, grammar, seed=70 + i, max_tokens=110) for i in range(4)]
        scheduler = build_scheduler(num_blocks, BLOCK_SIZE, num_slots=4, max_batch_size=4)
        run(engine, scheduler, all_at_once(requests))
        return [check(loaded, request) for request in requests], scheduler

    roomy, calm = answers(NUM_BLOCKS)
    tight, busy = answers(8)
    assert sum(calm.snapshot().counters.preemptions.values()) == 0
    assert sum(busy.snapshot().counters.preemptions.values()) > 0
    assert len(roomy) == len(tight) == 4


def test_nothing_of_a_cancelled_answer_stays(engine: Engine, loaded: LoadedModel, grammar: Grammar) -> None:
    scheduler = build_scheduler(NUM_BLOCKS, BLOCK_SIZE)
    scheduler = RecordedScheduler(scheduler._config, scheduler._tables, 1000)
    request = asked(loaded, 0, grammar)
    assert isinstance(request.constraint, Matcher)
    matcher = weakref.ref(request.constraint)

    def leave(tick: int, scheduler: Scheduler) -> None:
        if tick == 5:
            scheduler.cancel(0, 5.0)

    run(engine, scheduler, all_at_once([request]), leave)
    assert request.finish_reason is FinishReason.CANCELLED
    assert 0 < request.num_output < 6
    scheduler.snapshot()
    del request
    gc.collect()
    assert matcher() is None


def test_masks_are_computed_after_the_forward_has_begun(
    engine: Engine, loaded: LoadedModel, grammar: Grammar, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[str] = []
    begin, mask = mx.async_eval, Matcher.mask
    monkeypatch.setattr(mx, "async_eval", lambda *arrays: (seen.append("begin"), begin(*arrays)))
    monkeypatch.setattr(Matcher, "mask", lambda matcher, tokens: (seen.append("mask"), mask(matcher, tokens))[1])
    run(engine, build_scheduler(NUM_BLOCKS, BLOCK_SIZE), {0: [asked(loaded, 0, grammar, max_tokens=2)]})
    assert seen == ["begin", "mask", "begin"] * 2
