"""Drafts change no token: greedy, seeded, penalised, with log-probabilities; alone, in company, adopted, requeued."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from app.engine import loader
from app.engine.engine import Engine
from app.request import FinishReason, Request, SamplingParams
from app.scheduler.plan import Draw, Token
from app.scheduler.scheduler import Scheduler
from app.scheduler.speculation import PromptLookup
from ops.families import tiny
from tests.driving import assert_same_tokens, build_scheduler, greedy_request, plain_greedy, run
from tests.test_families import VOCABULARY
from tests.test_parity import TEXT, Plain

BLOCK_SIZE = 16
NUM_BLOCKS = 128
NUM_NEW = 32


class Oracle:
    """Knows what comes and proposes some of it, often with wrong tokens behind."""

    def __init__(self, answers: dict[int, Sequence[int]], seed: int) -> None:
        self._answers = answers
        self._random = random.Random(seed)
        self.num_checked = 0

    def draft(self, request: Request) -> tuple[int, ...]:
        done = request.num_output
        right = self._answers[request.id][done : done + self._random.randint(0, 6)]
        return (*right, *(self._random.randrange(VOCABULARY) for _ in range(self._random.choice((0, 0, 1, 3)))))

    def may_propose(self, request: Request) -> bool:
        return True

    def learn(self, request_id: int, num_proposed: int, num_right: int) -> None:
        self.num_checked += 1

    def forget(self, request_id: int) -> None:
        pass


@pytest.fixture(scope="module")
def small() -> Engine:
    return Engine(tiny.loaded("llama", tiny.build("llama")), NUM_BLOCKS, BLOCK_SIZE)


PROMPT = [(7 * i * i + 3 * i) % VOCABULARY for i in range(21)]


def draws(engine: Engine, scheduler: Scheduler, *requests: Request) -> dict[int, list[Draw]]:
    for request in requests:
        scheduler.add(request)
    found: dict[int, list[Draw]] = {request.id: [] for request in requests}
    while not scheduler.is_idle:
        plan = scheduler.plan(0.0)
        for event in scheduler.apply(plan, engine.step(plan), 0.0):
            if isinstance(event, Token):
                found[event.request_id].append(event.draw)
        scheduler.check()
    return found


SAMPLINGS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, num_logprobs=3),
    SamplingParams(seed=5),
    SamplingParams(seed=6, top_p=0.8, temperature=0.7),
    SamplingParams(seed=7, top_k=5, num_logprobs=2),
    SamplingParams(seed=8, min_p=0.1, logit_bias=((3, 4.0), (9, -100.0))),
    SamplingParams(seed=9, presence_penalty=0.8, frequency_penalty=0.4),
    SamplingParams(seed=10, repetition_penalty=1.2, banned=(1, 2, 3)),
]


@pytest.mark.parametrize("number", range(len(SAMPLINGS)))
def test_whatever_is_proposed_the_draws_are_those_without(small: Engine, number: int) -> None:
    def request(request_id: int) -> Request:
        return Request(request_id, list(PROMPT), len(PROMPT), NUM_NEW, SAMPLINGS[number])

    want = draws(small, build_scheduler(NUM_BLOCKS, BLOCK_SIZE), request(0))[0]
    tokens = [draw.token for draw in want]
    for seed in range(3):
        drafter = Oracle({0: tokens, 1: tokens}, seed)
        scheduler = build_scheduler(NUM_BLOCKS, BLOCK_SIZE, drafter=drafter)
        for got in draws(small, scheduler, request(0), request(1)).values():
            assert [draw.token for draw in got] == tokens
            assert [[token for token, _ in draw.top] for draw in got] == [[t for t, _ in draw.top] for draw in want]
            for one, other in zip(got, want, strict=True):
                assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
        counters = scheduler.snapshot().counters
        assert drafter.num_checked > 5
        assert 0 < counters.spec_accepted_tokens < counters.spec_proposed_tokens


def test_a_draft_whose_logits_are_no_numbers_ends_its_row_and_no_other(small: Engine) -> None:
    """As without drafts, and the block is clean for whoever gets it."""
    scheduler = build_scheduler(NUM_BLOCKS, BLOCK_SIZE, drafter=Oracle({0: [1] * 99, 1: [1] * 99}, 1))
    compute = small.logits

    def logits(*args: Any) -> mx.array:
        found = compute(*args)
        return mx.concatenate([found[:-1], found[-1:] * mx.nan]) if len(found) > 2 else found

    small.logits = logits  # type: ignore[method-assign]
    try:
        requests = [greedy_request(i, PROMPT, 6) for i in range(2)]
        got = draws(small, scheduler, *requests)
    finally:
        del small.logits
    assert FinishReason.ERROR in {request.finish_reason for request in requests}
    assert all(len(got[request.id]) == 6 for request in requests if request.finish_reason is FinishReason.LENGTH)


# ---- the embedded model, on text that repeats itself ----


@pytest.fixture(scope="module")
def prompts(model_dir: Path) -> list[list[int]]:
    """Texts that have begun for the second or third time, and one with nothing to copy."""
    tokenizer = loader.load_tokenizer(model_dir)
    ids = tokenizer.encode(TEXT)
    code = tokenizer.encode("def add(a, b):\n    total = a + b\n    return total\n\n" * 2 + "def add(a, b):")
    return [ids + ids[:20], code, ids[:40] * 2 + ids[:7], tokenizer.encode("Once upon a time")]


@pytest.fixture(scope="module")
def plain(model_dir: Path, prompts: list[list[int]]) -> Plain:
    model = loader.load(model_dir, "auto").model
    return [plain_greedy(model, prompt, NUM_NEW) for prompt in prompts]


@pytest.fixture(scope="module")
def engine(model_dir: Path, plain: Plain) -> Engine:
    return Engine(loader.load(model_dir, "auto"), NUM_BLOCKS, BLOCK_SIZE)


def check(got: dict[int, list[int]], plain: Plain) -> None:
    for i, tokens in got.items():
        assert_same_tokens(tokens, *plain[i])


def test_greedy_alone(engine: Engine, prompts: list[list[int]], plain: Plain) -> None:
    for i, prompt in enumerate(prompts):
        scheduler = build_scheduler(NUM_BLOCKS, BLOCK_SIZE, drafter=PromptLookup())
        check(run(engine, scheduler, {0: [greedy_request(i, prompt, NUM_NEW)]}), plain)
        counters = scheduler.snapshot().counters
        assert counters.spec_accepted_tokens >= 8 or i == 3
        assert counters.decode_steps + counters.spec_accepted_tokens == NUM_NEW - 1


def test_greedy_beside_others(engine: Engine, prompts: list[list[int]], plain: Plain) -> None:
    """Rows come while others check drafts; for a time too many decode for anybody to propose."""
    scheduler = build_scheduler(NUM_BLOCKS, BLOCK_SIZE, drafter=PromptLookup(), prefill_chunk=30)
    arrivals = {4 * i: [greedy_request(i, prompt, NUM_NEW)] for i, prompt in enumerate(prompts)}
    check(run(engine, scheduler, arrivals), plain)
    assert scheduler.snapshot().counters.spec_accepted_tokens > 0


def test_greedy_behind_an_adopted_prefix(engine: Engine, prompts: list[list[int]], plain: Plain) -> None:
    scheduler = build_scheduler(NUM_BLOCKS, BLOCK_SIZE, prefix_cache=True, drafter=PromptLookup())
    run(engine, scheduler, {0: [greedy_request(0, prompts[0], NUM_NEW)]})
    again = greedy_request(0, prompts[0], NUM_NEW)
    check(run(engine, scheduler, {0: [again]}), plain)
    assert again.num_cached == len(prompts[0]) - 1
    # What the first one left behind includes its answer, of which checked drafts computed the most.
    whole = prompts[0] + plain[0][0][: NUM_NEW - 1]
    longer = greedy_request(9, whole, 1)
    got = run(engine, scheduler, {0: [longer]})
    assert longer.num_cached >= len(whole) - 2
    assert_same_tokens(got[9], plain[0][0][NUM_NEW - 1 :], plain[0][1][NUM_NEW - 1 :])


def test_greedy_requeued_and_resumed(engine: Engine, prompts: list[list[int]], plain: Plain) -> None:
    num_blocks = -(-(len(prompts[0]) + len(prompts[2]) + NUM_NEW) // BLOCK_SIZE)
    scheduler = build_scheduler(num_blocks, BLOCK_SIZE, drafter=PromptLookup())
    arrivals = {0: [greedy_request(i, prompts[i], NUM_NEW) for i in (0, 2)]}
    check(run(engine, scheduler, arrivals), plain)
    counters = scheduler.snapshot().counters
    assert counters.preemptions["reclaim"] >= 1
    assert counters.spec_accepted_tokens > 0


def test_greedy_while_another_is_cancelled(engine: Engine, prompts: list[list[int]], plain: Plain) -> None:
    scheduler = build_scheduler(NUM_BLOCKS, BLOCK_SIZE, prefix_cache=True, drafter=PromptLookup())

    def leave(tick: int, scheduler: Scheduler) -> None:
        if tick == 6:
            scheduler.cancel(2, 6.0)

    arrivals = {0: [greedy_request(0, prompts[0], NUM_NEW), greedy_request(2, prompts[2], NUM_NEW)]}
    got = run(engine, scheduler, arrivals, leave)
    cut = got.pop(2)
    assert cut == plain[2][0][: len(cut)]
    check(got, plain)
