"""How long a tick takes: a linear model over what the tick computes, and its fit to ticks that were measured."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import NamedTuple

from app.errors import MlxcelError
from app.scheduler.plan import Plan


class Unfit(MlxcelError):
    """Too few or too uniform ticks to tell what any of them costs."""


class BadCost(MlxcelError):
    """A cost model that is neither known by name nor a file of one."""


class Load(NamedTuple):
    """What a tick computes: rows of one token, tokens of longer rows, and blocks of context, each once for every row
    that attends to it."""

    num_single: int
    num_prefill: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class CostModel:
    """Seconds of a tick: ``tick_s`` whatever it holds, and so much more for each part of its load."""

    tick_s: float
    single_row_s: float
    prefill_token_s: float
    context_block_s: float

    def seconds(self, load: Load) -> float:
        return (
            self.tick_s
            + self.single_row_s * load.num_single
            + self.prefill_token_s * load.num_prefill
            + self.context_block_s * load.num_blocks
        )


class Sample(NamedTuple):
    """A measured tick."""

    load: Load
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """A model and how far it is from the ticks that it was fitted to. Errors are shares of the measured seconds."""

    model: CostModel
    num_ticks: int
    r_squared: float
    median_error: float
    p95_error: float

    def describe(self) -> dict[str, float]:
        return asdict(self.model) | {
            "num_ticks": self.num_ticks,
            "r_squared": self.r_squared,
            "median_error": self.median_error,
            "p95_error": self.p95_error,
        }


# An 8B model with 4-bit weights on an M1 Ultra, in blocks of 32 tokens. Nothing here was measured by this project: see
# docs/simulator.md for where each figure comes from.
M1_ULTRA_8B = CostModel(tick_s=0.0049, single_row_s=0.0118, prefill_token_s=0.00143, context_block_s=0.000006)

PRESETS = {"m1-ultra-8b": M1_ULTRA_8B}


def read_cost(path: Path) -> CostModel:
    """A model that was written down: one JSON object, with seconds for each part.

    Raises:
        BadCost: there is no such file, or it has anything else in it, or a tick of some load would take no time.
    """
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise BadCost(f"--cost {path}: not one of {', '.join(PRESETS)}, and no file: {error.strerror}") from None
    except ValueError:
        raise BadCost(f"--cost {path}: the file is not JSON") from None
    names = [field.name for field in fields(CostModel)]
    if not isinstance(data, dict) or set(data) != set(names):
        raise BadCost(f"--cost {path}: it must be a JSON object with {', '.join(names)}")
    for name, value in data.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise BadCost(f"--cost {path}: {name} must be a number of seconds, at least 0")
    cost = CostModel(**data)
    if not cost.tick_s + min(cost.single_row_s, cost.prefill_token_s) > 0:
        raise BadCost(f"--cost {path}: with these seconds a tick takes no time")
    return cost


def load_of(plan: Plan, block_size: int) -> Load:
    """What a plan asks of the engine."""
    num_single = num_prefill = num_blocks = 0
    for row in plan.rows:
        if row.num_new == 1:
            num_single += 1
        else:
            num_prefill += row.num_new
        num_blocks -= -(row.start + row.num_new) // block_size
    return Load(num_single, num_prefill, num_blocks)


def fit(samples: Sequence[Sample]) -> Fit:
    """Least squares of the relative error, so that a long prefill counts no more than a decode step.

    No part may have a negative cost: the most negative one is set to zero and the others are fitted again. One tick in
    twenty is left out of a second fit, the worst ones: a machine that was busy elsewhere says nothing about the engine.

    Raises:
        Unfit: there are fewer than eight ticks, or they took no time.
    """
    if len(samples) < 8 or any(sample.seconds <= 0 for sample in samples):
        raise Unfit(f"{len(samples)} measured ticks: at least 8 are needed, each of them longer than nothing")
    first = _least_squares(samples)
    ranked = sorted(samples, key=lambda sample: _error(first, sample))
    model = _least_squares(ranked[: max(8, len(ranked) * 19 // 20)])
    errors = sorted(_error(model, sample) for sample in samples)
    mean_s = statistics.fmean(sample.seconds for sample in samples)
    spread = sum((sample.seconds - mean_s) ** 2 for sample in samples)
    missed = sum((sample.seconds - model.seconds(sample.load)) ** 2 for sample in samples)
    r_squared = 1 - missed / spread if spread else 0.0
    return Fit(model, len(samples), r_squared, statistics.median(errors), errors[len(errors) * 95 // 100])


def _error(model: CostModel, sample: Sample) -> float:
    return abs(model.seconds(sample.load) / sample.seconds - 1)


def _least_squares(samples: Sequence[Sample]) -> CostModel:
    rows = [[value / seconds for value in (1, *load)] for load, seconds in samples]
    free = [column for column in range(4) if any(row[column] for row in rows)]
    while True:
        found = _solve(
            [[sum(row[i] * row[j] for row in rows) for j in free] for i in free],
            [sum(row[i] for row in rows) for i in free],
        )
        worst = min(range(len(free)), key=lambda k: found[k])
        if found[worst] >= 0:
            costs = dict(zip(free, found, strict=True))
            return CostModel(*(costs.get(column, 0.0) for column in range(4)))
        del free[worst]


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gauss with pivots, on the normal equations. What cannot be told from the others gets zero."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    largest = [matrix[i][i] for i in range(size)]
    pivots: list[int] = []
    for column in range(size):
        pivot = max(range(len(pivots), size), key=lambda i: abs(rows[i][column]), default=-1)
        if pivot < 0 or abs(rows[pivot][column]) <= 1e-9 * largest[column]:
            continue
        top = len(pivots)
        rows[top], rows[pivot] = rows[pivot], rows[top]
        rows[top] = [value / rows[top][column] for value in rows[top]]
        for i in range(size):
            if i != top:
                rows[i] = [a - rows[i][column] * b for a, b in zip(rows[i], rows[top], strict=True)]
        pivots.append(column)
    solution = [0.0] * size
    for i, column in enumerate(pivots):
        solution[column] = rows[i][-1]
    return solution
