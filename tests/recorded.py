"""A recorded scheduler under a random load that uses all that can happen to it: for tests of recording and replay."""

from __future__ import annotations

import json
import random

import orjson

from app.kv.block_pool import BlockPool
from app.kv.block_table import BlockTables
from app.kv.layout import Layout
from app.kv.prefix_cache import PrefixCache
from app.request import FinishReason, Request, State
from app.scheduler.plan import Draw, Plan, Result
from app.scheduler.policy import SchedulerConfig
from app.scheduler.recorder import RecordedScheduler
from app.scheduler.recording import Recording, from_json, to_json
from app.scheduler.speculation import Drafter, PromptLookup

END = 9


def recorded_scheduler(
    num_ticks: int = 100, num_blocks: int = 40, drafter: Drafter | None = None, **config: object
) -> RecordedScheduler:
    pool = BlockPool(num_blocks)
    tables = BlockTables(pool, PrefixCache(pool, 4, True, 1), 4)
    return RecordedScheduler(SchedulerConfig(**config), tables, num_ticks, drafter)  # type: ignore[arg-type]


def saved(scheduler: RecordedScheduler) -> Recording:
    """What would be read from its file, written the way the route writes it: orjson takes no named tuples."""
    return from_json(json.loads(orjson.dumps(to_json(scheduler))))


def drive(seed: int, num_ticks: int, ticks_kept: int) -> RecordedScheduler:
    """Prompts of two tokens that often begin alike, tight pools, layers with windows, priorities, salts, cancels,
    stops, end tokens, rows that fail, drafts, an ITL budget, prefixes that expire, pools that grow or are lost, caches
    that are reset, and steps that are submitted ahead and may go astray."""
    source = random.Random(seed)
    block_size, num_blocks = source.choice([1, 2, 4, 8]), source.randint(8, 60)
    layout = Layout(random.Random(seed + 50).choice([(None,), (None, 5, 5), (3,)]))
    pool = BlockPool(num_blocks * layout.num_groups)
    prefixes = source.random() < 0.9, source.choice([0, 1, 5]), source.choice([None, 0.7])
    cache = PrefixCache(pool, block_size, *prefixes, layout=layout)
    config = SchedulerConfig(
        num_slots=source.randint(1, 5),
        max_batch_size=5,
        prefill_chunk=source.choice([None, 0, 3, 7]),
        max_batch_prefill=source.randint(1, 3),
        watermark=source.choice([0.0, 0.1]),
        enable_preemption=source.random() < 0.5,
        itl_budget_s=source.choice([None, 0.054]),
        grant_interval=3,
        grows=source.random() < 0.2,
        prompt_lookup_max_batch=source.choice([1, 2, 4]),
        lookahead=source.random() < 0.7,
    )
    drafter = source.choice([None, PromptLookup(), PromptLookup()])
    scheduler = RecordedScheduler(config, BlockTables(pool, cache, block_size), ticks_kept, drafter)
    requests: list[Request] = []
    most = num_blocks * block_size // (1 if config.grows else 3)
    now = 0.0
    in_flight: Plan | None = None
    while scheduler._tick < num_ticks:
        for _ in range(source.choice([0, 0, 1, 2])):
            num_prompt = source.randint(1, most)
            tokens = [source.choice([1, 1, 1, 2]) for _ in range(num_prompt)]
            request = Request(len(requests), tokens, num_prompt, source.randint(1, most))
            request.end_tokens = frozenset({END})
            request.priority, request.arrival_s = source.choice([0, 0, 1]), now
            request.use_prefix_cache, request.cache_salt = source.random() < 0.9, source.choice(["", "x"])
            requests.append(request)
            scheduler.add(request)
        now += 0.01 * source.random()
        alive = [request for request in requests if request.state is not State.FINISHED]
        if alive and source.random() < 0.05:
            scheduler.cancel(source.choice(alive).id, now)
        elif alive and source.random() < 0.05:
            request = source.choice(alive)
            scheduler.finish(request.id, FinishReason.STOP, request.num_output, now)
        if source.random() < 0.01:
            scheduler.reset_prefix_cache()
        if scheduler.is_idle and in_flight is None:
            continue
        plan = in_flight or scheduler.plan(now)
        now += 0.05 + 0.01 * source.random()
        if plan.num_blocks:
            scheduler.resized(plan.num_blocks if source.random() < 0.5 else scheduler._tables.num_blocks, now)
            continue
        in_flight = scheduler.ahead(plan)
        chance = source.random()
        if chance < 0.02:
            in_flight = None
            scheduler.lose_pool(plan, now)
            continue
        draws = {
            row.request_id: tuple(Draw(source.choice([1] * 20 + [2] * 3 + [END])) for _ in row.each_draw())
            for row in plan.rows
            if row.draws
        }
        failures = {plan.rows[0].request_id: "why"} if chance < 0.05 else {}
        if plan.num_ahead and 0.05 < chance < 0.1:
            del draws[plan.rows[-1].request_id]
        scheduler.apply(plan, Result(draws, failures), now)
    scheduler.check()
    return scheduler
