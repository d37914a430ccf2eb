"""Families that are decoded from mlx-lm's own caches, on tiny random models, against their own generation: what
they keep, for whom and how long. That every family gives its own tokens is in test_coverage.py."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import ArraysCache

from app.engine.caches import empty_caches, look
from app.engine.dense import DenseEngine
from app.engine.engine import Engine
from app.engine.loader import LoadedModel
from app.engine.paths import DENSE_PATHS, open_engine
from app.engine.snapshots import Snapshots
from app.engine.states import States, arrays
from app.errors import EngineFault, StartError
from app.request import SamplingParams
from app.scheduler.plan import Plan, Row
from ops.families.tiny import build, described, loaded
from tests.driving import assert_same_tokens, build_scheduler, greedy_request, plain_greedy, run

VOCABULARY = described()["tiny"]["vocab_size"]
BATCHED, BY_ROWS, ALONE = DENSE_PATHS
PROMPTS = [[(7 * i + 13 * n) % VOCABULARY for i in range(n)] for n in (1, 9, 26, 5)]
NUM_NEW = 8


@pytest.fixture(autouse=True)
def _as_on_a_cpu() -> None:
    mx.disable_compile()


def row(request_id: int, tokens: list[int], start: int, num_new: int) -> Row:
    draws = start + num_new == len(tokens)
    return Row(request_id, tokens, start, num_new, (), draws, len(tokens), SamplingParams(temperature=0.0))


def test_what_has_left_is_freed() -> None:
    engine = DenseEngine(loaded("jamba", build("jamba")), 64, 4, BATCHED)
    tokens = list(range(9))
    engine.step(Plan(tuple(row(i, tokens, 0, 9) for i in range(3))))
    engine.step(Plan(tuple(row(i, [*tokens, 1], 9, 1) for i in range(3))))
    held = sum(array.nbytes for array in engine._states.arrays())
    engine.step(Plan((row(0, [*tokens, 1, 2], 10, 1),), gone=(1, 2)))
    assert sum(array.nbytes for array in engine._states.arrays()) < held / 2
    engine.step(Plan((row(5, tokens, 0, 4),), gone=(0,)))
    assert engine._states.together([]) == ([], [])
    assert not engine._states.is_apart(0)


def test_a_row_that_pauses_goes_on_where_it_was() -> None:
    """It leaves the shared caches while others go on, and comes back."""
    model = build("recurrent_gemma")
    prompt = PROMPTS[1]
    tokens, logits = plain_greedy(model, prompt, 4)
    engine = DenseEngine(loaded("recurrent_gemma", build("recurrent_gemma")), 64, 4, BATCHED)
    mine, other = [*prompt], [*PROMPTS[2]]
    got = []
    for step, together in enumerate((True, False, True, False, True, True)):
        rows = [row(1, other, 0 if step == 0 else len(other) - 1, len(other) if step == 0 else 1)]
        if together:
            rows.append(row(0, mine, 0 if not got else len(mine) - 1, len(mine) if not got else 1))
        draws = engine.step(Plan(tuple(rows))).draws
        other.append(draws[1][0].token)
        if together:
            got.append(draws[0][0].token)
            mine.append(got[-1])
    assert_same_tokens(got, tokens, logits)


def test_a_row_whose_logits_are_no_numbers_fails_alone() -> None:
    engine = DenseEngine(loaded("mamba", build("mamba")), 64, 4, BATCHED)
    tokens = list(range(5))
    engine.step(Plan((row(0, tokens, 0, 5), row(1, tokens, 0, 5))))
    for array in arrays(engine._states.apart(0)):
        array[...] = float("nan")
    result = engine.step(Plan((row(0, [*tokens, 1], 5, 1), row(1, [*tokens, 1], 5, 1))))
    assert result.failures == {0: "its logits are not finite numbers"}
    assert result.draws.keys() == {1}


def test_a_step_that_fails_leaves_nothing_behind() -> None:
    engine = DenseEngine(loaded("mamba", build("mamba")), 64, 4, BATCHED)
    engine.step(Plan((row(0, list(range(5)), 0, 5),)))
    with pytest.raises(EngineFault, match="KeyError"):
        engine.step(Plan((row(1, list(range(5)), 4, 1),)))
    assert engine._states.arrays() == []


def test_caches_come_together_and_apart_as_asked() -> None:
    model = build("llama")
    states = States(lambda: empty_caches(model))
    for request_id in (1, 2, 3):
        states.begin(request_id)
        mx.eval(model(mx.array([[request_id] * request_id]), cache=states.apart(request_id)))
    members, shared = states.together([1, 3])
    assert (list(members), shared[0].keys.shape[0]) == ([1, 3], 2)
    members, shared = states.together([2, 3, 1])
    assert (list(members), shared[0].keys.shape[0]) == ([1, 3, 2], 3)
    states.forget([3, 9])
    assert states.apart(2)[0].offset == 2
    members, shared = states.together([1])
    assert (list(members), shared[0].keys.shape[0]) == ([1], 1)
    with pytest.raises(KeyError):
        states.apart(3)
    states.clear()
    assert states.arrays() == []


def test_caches_of_another_form_wait_to_join() -> None:
    """An n-gram of the last tokens is shorter in a request that has read one."""
    states = States(lambda: [ArraysCache(1)])
    for request_id, length in ((1, 1), (2, 2), (3, 2), (4, 1)):
        states.begin(request_id)
        states.apart(request_id)[0][0] = mx.zeros((1, length))
    assert states.joinable([2, 3, 4]) == [2, 3]
    states.together([2, 3])
    assert states.joinable([1, 2, 3]) == [2, 3]
    states.apart(4)[0][0] = mx.zeros((1, 2))
    assert states.joinable([4, 3]) == [4, 3]
    assert states.joinable([2, 3]) == [2, 3]
    assert states.joinable([]) == []


def test_what_a_request_takes() -> None:
    llama, jamba, mamba, gemma = (look(build(name)) for name in ("llama", "jamba", "mamba", "recurrent_gemma"))
    assert llama.names == ("KVCache",)
    assert llama.bytes_per_token == sum(shape.bytes_per_token for shape in llama.shapes) > 0
    assert llama.bytes_besides == 0
    assert (jamba.names, jamba.shapes) == (("ArraysCache", "KVCache"), ())
    assert jamba.bytes_per_token > 1
    assert jamba.bytes_besides > 0
    assert (mamba.bytes_per_token, mamba.shapes) == (1, ())  # nothing grows, and blocks are counted all the same
    assert gemma.bytes_per_token == 1  # a window's keys and values are there whole
    assert gemma.bytes_besides > mamba.bytes_besides / 10


@pytest.mark.parametrize(
    ("family", "backend", "path"),
    [
        ("llama", "auto", "ragged paged"),
        ("llama", "dense", BATCHED),
        ("gemma2", "auto", BY_ROWS),
        ("deepseek_v3", "auto", BATCHED),
        ("mamba", "dense", BATCHED),
    ],
)
def test_the_best_path_is_taken(family: str, backend: str, path: str) -> None:
    assert open_engine(loaded(family, build(family)), 64, 4, backend).decode_path == path


@pytest.mark.parametrize(
    ("backend", "deterministic", "said"),
    [
        ("paged", False, "its layers keep ArraysCache"),
        ("auto", True, "its layers keep ArraysCache"),
        ("dense", True, "MLXCEL_SDPA_DETERMINISTIC=1"),
    ],
)
def test_what_only_blocks_can_do_is_refused(backend: str, deterministic: bool, said: str) -> None:
    with pytest.raises(StartError, match=said):
        open_engine(loaded("mamba", build("mamba")), 64, 4, backend, deterministic)


def test_a_model_that_was_tried_on_one_path_is_whole_on_the_next() -> None:
    """The ragged step puts its own output head in front; what it leaves behind must pick nothing."""
    model = build("gemma2")
    prompt = mx.array([PROMPTS[1]])
    want = model(prompt, cache=empty_caches(model))
    with pytest.raises(StartError):
        Engine(loaded("gemma2", model), num_blocks=8, block_size=4)
    assert mx.allclose(model(prompt, cache=empty_caches(model)), want, rtol=0, atol=1e-4 * mx.abs(want).max().item())


CONTROL = 96


def chat(*turns: list[int]) -> list[int]:
    """A prompt as templates make them: a control token opens each turn, and at last that of the answer."""
    return [token for turn in turns for token in (CONTROL, *turn)] + [CONTROL]


def with_snapshots(family: str, max_bytes: int = 1 << 30, **kept: Any) -> tuple[DenseEngine, Snapshots]:
    snapshots = Snapshots(max_bytes, {CONTROL}, **kept)
    return DenseEngine(loaded(family, build(family)), 64, 4, BATCHED, snapshots), snapshots


@pytest.mark.parametrize("chunk", [3, 64])
@pytest.mark.parametrize("family", ["mamba", "jamba", "recurrent_gemma", "gemma3n", "qwen3_next", "deepseek_v3"])
def test_the_next_turn_of_a_chat_begins_where_its_history_ended(family: str, chunk: int) -> None:
    model = build(family)
    engine, _ = with_snapshots(family)
    scheduler = build_scheduler(64, 4, prefill_chunk=chunk, whole_states=True)
    first = chat(PROMPTS[2][:14])
    answer = plain_greedy(model, first, NUM_NEW)[0]
    second = chat(PROMPTS[2][:14], answer, PROMPTS[1])
    for prompt, num_cached in ((first, 0), (second, len(first) - 1), (second, len(second) - 1)):
        tokens, logits = plain_greedy(model, prompt, NUM_NEW)
        request = greedy_request(num_cached, prompt, NUM_NEW)
        assert_same_tokens(run(engine, scheduler, {0: [request]})[num_cached], tokens, logits)
        assert request.num_cached == num_cached
    cache = scheduler._tables.prefix_cache
    assert (cache.hits, cache.misses, cache.tokens_reused) == (
        2,
        {"cold": 1, "short": 0, "off": 0},
        len(first) + len(second) - 2,
    )
    scheduler.reset_prefix_cache()
    request = greedy_request(7, second, NUM_NEW)
    run(engine, scheduler, {0: [request]})
    assert request.num_cached == 0


def test_a_chat_is_nobody_elses() -> None:
    engine, snapshots = with_snapshots("jamba")
    scheduler = build_scheduler(64, 4, whole_states=True)
    prompt = chat(PROMPTS[2])
    for i, (fields, num_cached) in enumerate(
        (
            ({"use_prefix_cache": False}, 0),
            ({"cache_salt": "a"}, 0),
            ({"cache_salt": "b"}, 0),
            ({"cache_salt": "a"}, len(prompt) - 1),
            ({"cache_salt": "a", "use_prefix_cache": False}, 0),
        )
    ):
        request = greedy_request(i, prompt, 2, **fields)
        run(engine, scheduler, {0: [request]})
        assert request.num_cached == num_cached
    assert len(snapshots) == 2


def test_snapshots_are_bounded_by_bytes_and_by_age() -> None:
    now_s = 0.0
    engine, snapshots = with_snapshots("mamba", ttl_s=10.0, clock=lambda: now_s)
    first, second, third = (chat([n] * 6) for n in (1, 2, 3))

    def ask(request_id: int, prompt: list[int]) -> int:
        result = engine.step(Plan((row(request_id, prompt, 0, len(prompt))._replace(salt=""),), gone=(request_id - 1,)))
        return result.reused[request_id]

    assert [ask(i, prompt) for i, prompt in enumerate((first, second, first))] == [0, 0, 7]
    assert len(snapshots) == 2
    snapshots._max_bytes = snapshots.num_bytes
    assert ask(3, third) == 0  # in place of the second, which was used longest ago
    assert [ask(4, first), ask(5, second)] == [7, 0]
    now_s = 11.0
    assert ask(6, second) == 0
    assert len(snapshots) == 1
    snapshots._max_bytes = snapshots.num_bytes - 1
    assert ask(7, third) == 0
    assert ask(8, second) == 7  # what is too large by itself does not push out what is there


def test_what_a_failed_request_left_is_not_trusted() -> None:
    engine, snapshots = with_snapshots("mamba")
    prompt = chat(PROMPTS[1])
    engine.step(Plan((row(0, prompt, 0, len(prompt))._replace(salt=""),)))
    assert len(snapshots) == 1
    for array in arrays(engine._states.apart(0)):
        array[...] = float("nan")
    assert engine.step(Plan((row(0, [*prompt, 1], len(prompt), 1),))).failures.keys() == {0}
    assert len(snapshots) == 0


def test_what_a_failed_request_began_from_is_not_trusted_either() -> None:
    engine, snapshots = with_snapshots("mamba")
    prompt = chat(PROMPTS[1])
    for request_id in (0, 1):
        engine.step(Plan((row(request_id, prompt, 0, len(prompt))._replace(salt=""),)))
    assert len(snapshots) == 1
    for array in arrays(engine._states.apart(1)):
        array[...] = float("nan")
    engine.step(Plan((row(1, [*prompt, 1], len(prompt), 1),), gone=(0,)))
    assert len(snapshots) == 0


def test_rows_share_caches_only_while_the_padding_fits_the_pool() -> None:
    engine = DenseEngine(loaded("jamba", build("jamba")), 8, 4, BATCHED)
    long, short = PROMPTS[2], PROMPTS[3]
    engine.step(Plan((row(0, long, 0, 26), row(1, short, 0, 5), row(2, short, 0, 5))))
    assert sorted(engine._states.together([1, 2])[0]) == [1, 2]
    assert engine._states.is_apart(0)
    engine.step(Plan((row(0, [*long, 1], 26, 1), row(1, [*short, 1], 5, 1), row(2, [*short, 1], 5, 1))))
    assert engine._states.is_apart(0)


def test_a_prompt_without_a_turn_leaves_nothing() -> None:
    engine, snapshots = with_snapshots("mamba", min_tokens=8)
    for i, prompt in enumerate((PROMPTS[1], [*PROMPTS[1][:4], CONTROL, 1], [CONTROL])):
        engine.step(Plan((row(i, prompt, 0, len(prompt))._replace(salt=""),)))
    assert len(snapshots) == 0


def with_a_memory_of_its_own(family: str) -> LoadedModel:
    """A model that counts in itself how far it has read, and adds that to its logits: a new count begins with empty
    caches, whoever they belong to."""
    model = build(family)
    plain = type(model)

    class Remembering(plain):  # type: ignore[misc, valid-type]
        num_read = 0

        def __call__(self, inputs: mx.array, cache: Any = None, **rest: Any) -> mx.array:
            if cache is None or getattr(cache[0], "offset", 1) == 0:
                type(self).num_read = 0
            places = mx.arange(self.num_read, self.num_read + inputs.shape[1])
            type(self).num_read += inputs.shape[1]
            bend = mx.sin(places[:, None] * mx.arange(1, VOCABULARY + 1)[None])
            return super().__call__(inputs, cache=cache, **rest) + bend

    model.__class__ = Remembering
    return loaded(family, model)


def test_a_model_that_cannot_take_turns_has_one_request_at_a_time() -> None:
    engine = open_engine(with_a_memory_of_its_own("llama"), 64, 4, snapshots=Snapshots(10**9, frozenset(), 0, None))
    assert (engine.decode_path, engine.max_rows) == (ALONE, 1)
    want = [plain_greedy(with_a_memory_of_its_own("llama").model, prompt, NUM_NEW) for prompt in PROMPTS]
    scheduler = build_scheduler(64, 4, whole_states=True, prefill_chunk=7, num_slots=4, max_batch_size=1)
    requests = [greedy_request(i, prompt, NUM_NEW) for i, prompt in enumerate(PROMPTS)]
    got = run(engine, scheduler, {0: requests[:2], 3: requests[2:]})
    for i, (tokens, logits) in enumerate(want):
        assert_same_tokens(got[i], tokens, logits)
    assert scheduler.snapshot().prefix.hits == 0
