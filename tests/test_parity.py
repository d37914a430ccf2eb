"""The embedded model through scheduler and ragged step, against mlx-lm's own generation, one prompt alone."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest

from app.engine import loader
from app.engine.engine import Engine
from app.request import FinishReason
from app.scheduler.scheduler import Scheduler
from tests.driving import assert_same_tokens, build_scheduler, greedy_request, plain_greedy, run

NUM_NEW = 10
BLOCK_SIZE = 16
NUM_BLOCKS = 256
LENGTHS = (1, 2, 3, 5, 8, 13, 16, 17, 21, 31, 32, 33, 47, 64, 65, 80, 96, 127, 150, 220)
TEXT = (
    "The river rises in the mountains, where the snow melts in spring, and runs for nine hundred miles through "
    "forests, meadows and three old towns before it meets the sea. In 1742 a miller built the first bridge: it stood "
    "for 61 years.\ndef area(width, height):\n    return width * height\n\nQuestion: who built the bridge, and how "
    "long did it stand?\n"
)

Plain = list[tuple[list[int], list[mx.array]]]


@pytest.fixture(scope="module")
def prompts(model_dir: Path) -> list[list[int]]:
    """Twenty prompts of different lengths that share no beginning."""
    ids = loader.load_tokenizer(model_dir).encode(TEXT * 4)
    return [ids[7 * i : 7 * i + length] for i, length in enumerate(LENGTHS)]


@pytest.fixture(scope="module")
def plain(model_dir: Path, prompts: list[list[int]]) -> Plain:
    model = loader.load(model_dir, "auto").model
    return [plain_greedy(model, prompt, NUM_NEW) for prompt in prompts]


@pytest.fixture(scope="module")
def engine(model_dir: Path, plain: Plain) -> Engine:
    return Engine(loader.load(model_dir, "auto"), NUM_BLOCKS, BLOCK_SIZE)


@pytest.fixture(params=[False, True], ids=["step by step", "lookahead"])
def lookahead(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def check(got: dict[int, list[int]], plain: Plain) -> None:
    for i, (tokens, logits) in enumerate(plain):
        assert_same_tokens(got[i], tokens, logits)


def test_alone(engine: Engine, prompts: list[list[int]], plain: Plain, lookahead: bool) -> None:
    got: dict[int, list[int]] = {}
    for i, prompt in enumerate(prompts):
        scheduler = build_scheduler(NUM_BLOCKS, BLOCK_SIZE, lookahead=lookahead)
        got |= run(engine, scheduler, {0: [greedy_request(i, prompt, NUM_NEW)]})
    check(got, plain)


@pytest.mark.parametrize("chunk", [7, 64, 512])
def test_joining_and_leaving(
    engine: Engine, prompts: list[list[int]], plain: Plain, chunk: int, lookahead: bool
) -> None:
    scheduler = build_scheduler(
        NUM_BLOCKS, BLOCK_SIZE, lookahead=lookahead, num_slots=8, max_batch_size=8, prefill_chunk=chunk
    )
    requests = [greedy_request(i, prompt, NUM_NEW) for i, prompt in enumerate(prompts)]
    order = requests[::2] + requests[1::2]
    check(run(engine, scheduler, {2 * at: [request] for at, request in enumerate(order)}), plain)


def test_adopted_prefix_equals_cold(engine: Engine, prompts: list[list[int]], plain: Plain, lookahead: bool) -> None:
    scheduler = build_scheduler(NUM_BLOCKS, BLOCK_SIZE, lookahead=lookahead, prefix_cache=True, num_slots=4)
    for longer in (prompts[-1], prompts[-2]):
        run(engine, scheduler, {0: [greedy_request(99, longer, 1)]})
    # Asked again, the same prompts adopt all their blocks but the last token, the final one by copying it.
    requests = [greedy_request(i, prompts[i], NUM_NEW) for i in (18, 19)]
    got = run(engine, scheduler, {0: [requests[0]], 3: [requests[1]]})
    for request in requests:
        assert request.num_cached == len(prompts[request.id]) - 1
        assert_same_tokens(got[request.id], *plain[request.id])


def test_a_prefix_that_ends_inside_a_block_is_copied(
    engine: Engine, prompts: list[list[int]], plain: Plain, lookahead: bool
) -> None:
    scheduler = build_scheduler(NUM_BLOCKS, BLOCK_SIZE, lookahead=lookahead, prefix_cache=True, num_slots=4)
    shared = prompts[17][: 5 * BLOCK_SIZE + 7]
    run(engine, scheduler, {0: [greedy_request(98, [*shared, 400, 401, 402], 30)]})
    requests = [greedy_request(17, prompts[17], NUM_NEW), greedy_request(97, [*shared, 400, 401, 402], 30)]
    got = run(engine, scheduler, {0: requests})
    assert requests[0].num_cached == len(shared)
    assert_same_tokens(got[17], *plain[17])


def test_requeued_and_resumed_equals_undisturbed(
    engine: Engine, prompts: list[list[int]], plain: Plain, lookahead: bool
) -> None:
    # Eleven blocks hold three of these prompts, but not their output: somebody has to give way.
    chosen = (11, 12, 13, 14)
    scheduler = build_scheduler(11, BLOCK_SIZE, lookahead=lookahead, num_slots=4, prefill_chunk=64)
    got = run(engine, scheduler, {i: [greedy_request(n, prompts[n], NUM_NEW)] for i, n in enumerate(chosen)})
    assert scheduler.snapshot().counters.preemptions["reclaim"] >= 1
    for n in chosen:
        assert_same_tokens(got[n], *plain[n])


def test_a_pool_that_grows_while_rows_decode(
    model_dir: Path, prompts: list[list[int]], plain: Plain, lookahead: bool
) -> None:
    engine = Engine(loader.load(model_dir, "auto"), 4, BLOCK_SIZE)
    scheduler = build_scheduler(4, BLOCK_SIZE, lookahead=lookahead, num_slots=8, max_batch_size=8, grows=True)
    arrivals = {3 * i: [greedy_request(i, prompt, NUM_NEW)] for i, prompt in enumerate(prompts)}
    check(run(engine, scheduler, arrivals), plain)
    assert scheduler.snapshot().pool.num_blocks >= 32
    assert scheduler.snapshot().counters.preemptions == {}


def test_a_cancel_disturbs_nobody(engine: Engine, prompts: list[list[int]], plain: Plain, lookahead: bool) -> None:
    scheduler = build_scheduler(
        NUM_BLOCKS, BLOCK_SIZE, lookahead=lookahead, prefix_cache=True, num_slots=4, prefill_chunk=64
    )

    def leave(tick: int, scheduler: Scheduler) -> None:
        if tick == 3:
            (event,) = scheduler.cancel(19, 3.0)
            assert event.reason is FinishReason.CANCELLED

    requests = [greedy_request(i, prompts[i], NUM_NEW) for i in (5, 10, 15)]
    got = run(engine, scheduler, {0: [requests[0], greedy_request(19, prompts[19], NUM_NEW)], 1: requests[1:]}, leave)
    assert len(got[19]) < NUM_NEW
    for request in requests:
        assert_same_tokens(got[request.id], *plain[request.id])


def test_pool_is_written_in_place(engine: Engine, prompts: list[list[int]], lookahead: bool) -> None:
    scheduler = build_scheduler(NUM_BLOCKS, BLOCK_SIZE, lookahead=lookahead, num_slots=4)
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    run(engine, scheduler, {0: [greedy_request(i, prompts[4], 6) for i in range(4)]})
    assert mx.get_peak_memory() - before < engine.pool_bytes / 2, "a step copied the pool"


def test_the_capital_of_france(model_dir: Path, engine: Engine, lookahead: bool) -> None:
    tokenizer = loader.load_tokenizer(model_dir)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    request = greedy_request(0, prompt, 32, end_tokens=frozenset(tokenizer.eos_token_ids))
    got = run(engine, build_scheduler(NUM_BLOCKS, BLOCK_SIZE, lookahead=lookahead), {0: [request]})
    assert tokenizer.decode(got[0]) == "The capital of France is Paris.<|im_end|>"
    assert request.finish_reason is FinishReason.STOP
