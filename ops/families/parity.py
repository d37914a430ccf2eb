"""How far the ways of computing a family's logits are apart, on its tiny model."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from app.engine.caches import empty_caches
from app.engine.dense import DenseEngine
from app.engine.engine import Engine
from app.engine.paths import DENSE_PATHS
from app.engine.probe import difference
from app.request import SamplingParams
from app.scheduler.plan import Row
from ops.families.tiny import build, loaded

# One token, about as many as a sliding window has, three times as many, fewer.
PROMPTS = [[(7 * i + 13 * n) % 97 for i in range(n)] for n in (1, 9, 26, 5)]


def staggered(family: str, path: str) -> float:
    """Prompts that join one after the other and are read in chunks of one to four tokens, on one of the engine's paths,
    against the plain forward of each.

    Raises:
        StartError: the engine refuses the family on this path.
    """
    model = build(family)
    plain = [model(mx.array([prompt]), cache=empty_caches(model))[0] for prompt in PROMPTS]
    mx.eval(plain)
    dense = next((each for each in DENSE_PATHS if each == path), None)
    known = loaded(family, model)
    engine = Engine(known, 64, 4) if dense is None else DenseEngine(known, 64, 4, dense)
    begun = [0] * len(PROMPTS)
    worst = 0.0
    for step in range(16):
        rows = []
        for i, prompt in enumerate(PROMPTS):
            num_new = min((1, 3, 4, 2)[(i + step) % 4], len(prompt) - begun[i])
            if num_new and step >= i:
                rows.append(Row(i, prompt, begun[i], num_new, range(10 * i, 10 * i + 10), True, 0, SamplingParams()))
                begun[i] += num_new
        if rows:
            rows.sort(key=lambda row: row.num_new > 1)
            want = mx.stack([plain[row.request_id][row.start + row.num_new - 1] for row in rows])
            got = engine.logits(rows)
            assert got is not None
            worst = max(worst, difference(got, want))
    assert begun == [len(prompt) for prompt in PROMPTS]
    return worst


def kept(family: str) -> list[Any]:
    """The caches of a prompt longer than a window, as mlx-lm makes and fills them."""
    model = build(family)
    caches = empty_caches(model)
    mx.eval(model(mx.array([PROMPTS[2]]), cache=caches))
    return caches
