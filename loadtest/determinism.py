"""Random schedules in deterministic mode: the same requests in ever different company have to give the same bits.

``python -m loadtest.determinism --schedules 1000``. Each schedule has other slots, chunks, arrivals, strangers,
cancels, shared prefixes and shortages of blocks, with and without steps submitted ahead. A request's output is its
tokens and the logits each was drawn from, bit for bit; the exit code is 1 unless every request had one output in all of
them. ``--ordinary`` shows what happens without.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from app.engine.blas import preload
from app.kv.block_pool import BlockPool
from app.kv.block_table import BlockTables
from app.kv.prefix_cache import PrefixCache
from app.pipeline import Pipeline
from app.request import FinishReason, Request, SamplingParams
from app.scheduler.plan import Finished, Row
from app.scheduler.policy import SchedulerConfig
from app.scheduler.scheduler import Scheduler

if TYPE_CHECKING:
    from app.engine.engine import Engine

NUM_BLOCKS = 64
GREEDY = SamplingParams(temperature=0.0)
SEEDED = SamplingParams(temperature=1.0, top_p=0.95, seed=11)
CHUNKS = (None, 0, 1, 3, 7, 16, 50, 64, 100)

Output = tuple[tuple[int, ...], tuple[str, ...]]  # tokens, and a digest of the logits of each


@dataclass(frozen=True, slots=True)
class Subject:
    """A request that is asked again and again."""

    prompt: tuple[int, ...]
    num_new: int
    sampling: SamplingParams


def subjects(vocab_size: int, lengths: Sequence[int] = (1, 23, 77, 150), num_new: int = 6) -> list[Subject]:
    """Prompts of these lengths, drawn greedily and by a seed in turn."""
    rng = random.Random(0)
    return [
        Subject(tuple(rng.randrange(vocab_size) for _ in range(length)), num_new, (GREEDY, SEEDED)[i % 2])
        for i, length in enumerate(lengths)
    ]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Who arrives when, and the rules of the scheduler. ``arrivals`` and ``cancels`` are by tick; ids say whose."""

    config: SchedulerConfig
    num_blocks: int
    has_prefix_cache: bool
    arrivals: dict[int, list[Request]]
    subject_of: dict[int, int]
    cancels: dict[int, int]


def alone(subject: Subject, number: int) -> Schedule:
    """A cold request with nobody beside it."""
    return Schedule(SchedulerConfig(), NUM_BLOCKS, False, {0: [_request(0, subject)]}, {0: number}, {})


def drawn_up(seed: int, asked: Sequence[Subject], vocab_size: int, block_size: int) -> Schedule:
    """A random schedule in which every subject comes once or twice, among up to six strangers."""
    rng = random.Random(seed)
    requests: list[Request] = []
    subject_of: dict[int, int] = {}
    for number, subject in enumerate(asked):
        for _ in range(rng.choice((1, 1, 2))):
            subject_of[len(requests)] = number
            requests.append(_request(len(requests), subject, priority=rng.randrange(3)))
    cancels: dict[int, int] = {}
    for _ in range(rng.randrange(7)):
        begin = rng.choice(asked).prompt[: rng.randrange(100)] if rng.random() < 0.6 else ()
        tail = tuple(rng.randrange(vocab_size) for _ in range(rng.randint(1, 60)))
        stranger = Subject(begin + tail, rng.randint(1, 12), GREEDY)
        if rng.random() < 0.2:
            cancels[len(requests)] = rng.randrange(25)
        requests.append(_request(len(requests), stranger, priority=rng.randrange(3)))
    arrivals: dict[int, list[Request]] = defaultdict(list)
    for request in requests:
        arrivals[rng.randrange(20)].append(request)
    slots = rng.randint(1, 10)
    config = replace(
        SchedulerConfig(num_slots=slots, max_batch_size=slots, prefill_chunk=rng.choice(CHUNKS)),
        max_batch_prefill=rng.randint(1, 4),
        enable_preemption=rng.random() < 0.5,
        lookahead=rng.random() < 0.5,
    )
    longest = max(-(-(request.num_prompt + request.max_tokens) // block_size) for request in requests)
    num_blocks = NUM_BLOCKS if rng.random() < 0.6 else min(NUM_BLOCKS, longest + rng.randrange(1 + 2 * longest))
    return Schedule(config, num_blocks, rng.random() < 0.7, arrivals, subject_of, cancels)


def play(engine: Engine, block_size: int, schedule: Schedule) -> Iterator[tuple[int, Output]]:
    """Run a schedule to its end; gives each subject's number and output, once for each time it was asked."""
    pool = BlockPool(schedule.num_blocks)
    cache = PrefixCache(pool, block_size, schedule.has_prefix_cache, min_tokens=1)
    scheduler = Scheduler(schedule.config, BlockTables(pool, cache, block_size))
    digests: dict[tuple[int, int], str] = {}
    ended: dict[int, FinishReason] = {}
    pipeline = Pipeline(engine, scheduler)
    tick, last = 0, max(schedule.arrivals)
    with _logits_kept(engine, digests):
        while tick <= last or not pipeline.is_idle:
            for request in schedule.arrivals.get(tick, ()):
                scheduler.add(request)
            for request_id in (who for who, when in schedule.cancels.items() if when == tick):
                scheduler.cancel(request_id, float(tick))
            plan = pipeline.plan(time.monotonic())
            if plan.rows:
                for event in pipeline.run(plan):
                    if isinstance(event, Finished):
                        ended[event.request_id] = event.reason
            tick += 1
    for request in (request for group in schedule.arrivals.values() for request in group):
        if request.id in schedule.subject_of:
            assert ended[request.id] is FinishReason.LENGTH, f"request {request.id} ended by {ended[request.id]}"
            drawn = range(request.num_prompt, len(request.tokens))
            output = tuple(request.tokens[request.num_prompt :]), tuple(digests[request.id, at] for at in drawn)
            yield schedule.subject_of[request.id], output


def outputs(
    engine: Engine, block_size: int, asked: Sequence[Subject], vocab_size: int, seeds: Iterable[int]
) -> Iterator[list[set[Output]]]:
    """The different outputs of each subject so far, after each schedule. The first are those of being alone."""
    seen: list[set[Output]] = [set() for _ in asked]
    for number, subject in enumerate(asked):
        for _, output in play(engine, block_size, alone(subject, number)):
            seen[number].add(output)
    for seed in seeds:
        for number, output in play(engine, block_size, drawn_up(seed, asked, vocab_size, block_size)):
            seen[number].add(output)
        yield seen


@contextmanager
def _logits_kept(engine: Engine, digests: dict[tuple[int, int], str]) -> Iterator[None]:
    """Note a digest of the logits of every draw, by request and position."""
    import numpy as np

    compute: Callable[..., Any] = engine.logits

    def logits(rows: Sequence[Row], before: Any = None) -> Any:
        found = compute(rows, before)
        drawing = [row for row in rows if row.draws]
        if drawing:
            for row, numbers in zip(drawing, np.array(found), strict=True):
                digests[row.request_id, row.start + row.num_new] = hashlib.blake2b(numbers.tobytes()).hexdigest()
        return found

    engine.logits = logits  # type: ignore[method-assign]
    try:
        yield
    finally:
        del engine.logits  # the instance's; the method shows again


def _request(request_id: int, subject: Subject, priority: int = 0) -> Request:
    return Request(
        request_id,
        list(subject.prompt),
        len(subject.prompt),
        subject.num_new,
        sampling=subject.sampling,
        priority=priority,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtest.determinism", description=__doc__)
    parser.add_argument("--model", type=Path, help="model directory (unset: the embedded model)")
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first schedule; the others count up from it")
    parser.add_argument("--block-size", type=int, default=64)
    parser.add_argument("--ordinary", action="store_true", help="without deterministic mode, to see the difference")
    options = parser.parse_args()
    report = preload("auto", "auto")
    from app.engine import loader
    from app.engine.engine import Engine

    with tempfile.TemporaryDirectory() as folder:
        path = options.model or loader.model_directory("embedded", Path(folder), offline=True)
        loaded = loader.load(path, "auto")
    engine = Engine(loaded, NUM_BLOCKS, options.block_size, deterministic=not options.ordinary)
    asked = subjects(loaded.vocab_size)
    seeds = range(options.seed, options.seed + options.schedules)
    print(f"BLAS {report.version}, {options.schedules} schedules", file=sys.stderr)
    seen: list[set[Output]] = []
    for done, seen in enumerate(outputs(engine, options.block_size, asked, loaded.vocab_size, seeds), 1):
        if done % 50 == 0:
            print(f"{done} schedules, outputs {[len(found) for found in seen]}", file=sys.stderr)
    for subject, found in zip(asked, seen, strict=True):
        kind = "greedy" if subject.sampling.is_greedy else "seeded"
        tokens = len({output[0] for output in found})
        print(f"{len(subject.prompt):4} prompt tokens, {kind}: {len(found)} outputs by logits, {tokens} by tokens")
    return 0 if all(len(found) == 1 for found in seen) else 1


if __name__ == "__main__":
    sys.exit(main())
