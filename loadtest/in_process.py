"""The same waves without HTTP: scheduler and engine alone, in one process. Prints tokens/s by concurrency as JSON.

``python -m loadtest.in_process MODEL_DIRECTORY NUM_PROMPT NUM_NEW CONCURRENCY... [--deterministic]``
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from app.engine.blas import preload
from app.engine.threads import compute_in_batches


def main(
    model: Path, num_prompt: int, num_new: int, levels: list[int], deterministic: bool = False
) -> dict[int, float]:
    """Tokens/s of a wave of each concurrency, after one that warms up. Lengths in tokens."""
    compute_in_batches()
    preload("auto", "auto")
    from app.engine.engine import Engine
    from app.engine.loader import load
    from app.kv.block_pool import BlockPool
    from app.kv.block_table import BlockTables
    from app.kv.prefix_cache import PrefixCache
    from app.request import Request, SamplingParams
    from app.scheduler.policy import SchedulerConfig
    from app.scheduler.scheduler import Scheduler

    num_blocks, block_size, most = 176, 64, max(levels)
    engine = Engine(load(model, "auto"), num_blocks, block_size, deterministic)
    pool = BlockPool(num_blocks)
    tables = BlockTables(pool, PrefixCache(pool, block_size, enabled=False), block_size)
    scheduler = Scheduler(SchedulerConfig(num_slots=most, max_batch_size=most), tables)
    rates: dict[int, float] = {}
    for level in [1, *levels]:
        for i in range(level):
            tokens = [(7919 * i + 104729 * k) % 40000 + 100 for k in range(num_prompt)]
            scheduler.add(Request(i, tokens, num_prompt, num_new, SamplingParams(temperature=0.0)))
        began_s = time.perf_counter()
        while not scheduler.is_idle:
            plan = scheduler.plan(0.0)
            scheduler.apply(plan, engine.step(plan), 0.0)
        rates[level] = level * num_new / (time.perf_counter() - began_s)
    return rates


if __name__ == "__main__":
    path, *numbers = [word for word in sys.argv[1:] if word != "--deterministic"]
    num_prompt, num_new, *levels = (int(number) for number in numbers)
    print(json.dumps(main(Path(path), num_prompt, num_new, levels, "--deterministic" in sys.argv)))
