"""What a simulation says: figures of a run, and how many hosts are enough."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from app.scheduler.fleet import Run
from app.scheduler.simulator import Outcome, preemptions
from app.scheduler.workload import Arrival

SHARES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}


@dataclass(frozen=True, slots=True)
class Target:
    """What makes an answer a good one, in seconds; None: it does not matter. ``itl_s`` is the mean gap of an answer."""

    ttft_s: float | None = None
    itl_s: float | None = None

    def is_met(self, outcome: Outcome) -> bool:
        itl_s = (outcome.ended_s - outcome.first_s) / max(outcome.num_output - 1, 1)
        return (self.ttft_s is None or outcome.first_s - outcome.arrived_s <= self.ttft_s) and (
            self.itl_s is None or itl_s <= self.itl_s
        )


def percentile(ranked: Sequence[float], share: float) -> float:
    """The value that ``share`` of the sorted values do not exceed; 0 of none."""
    return ranked[math.ceil(share * len(ranked)) - 1] if ranked else 0.0


def report(run: Run, workload: Sequence[Arrival], target: Target) -> dict[str, Any]:
    """The figures of a run, ready for JSON. Times in seconds; rates by virtual time from the first arrival to the last
    token. Goodput counts answers that met the target; a refused request is no answer."""
    outcomes = run.outcomes
    began_s = min((outcome.arrived_s for outcome in outcomes), default=0.0)
    ended_s = max((outcome.ended_s for outcome in outcomes), default=0.0)
    span_s = max(ended_s - began_s, 1e-9)
    num_good = sum(1 for outcome in outcomes if target.is_met(outcome))
    num_blocks = sum(host.tables.num_blocks for host in run.hosts)
    caches = [host.tables.prefix_cache for host in run.hosts]
    return {
        "hosts": len(run.hosts),
        "requests": len(workload),
        "refused": len(run.refused),
        "ticks": sum(host.num_ticks for host in run.hosts),
        "span_s": span_s,
        "ttft_s": _spread(outcome.first_s - outcome.arrived_s for outcome in outcomes),
        "queue_s": _spread(outcome.admitted_s - outcome.arrived_s for outcome in outcomes),
        "e2e_s": _spread(outcome.ended_s - outcome.arrived_s for outcome in outcomes),
        "itl_s": {"mean": run.tally.mean_gap_s} | {name: run.tally.gap_s(share) for name, share in SHARES.items()},
        "output_tokens_per_s": sum(outcome.num_output for outcome in outcomes) / span_s,
        "prompt_tokens_per_s": sum(workload[outcome.number].num_prompt for outcome in outcomes) / span_s,
        "requests_per_s": len(outcomes) / span_s,
        "goodput_per_s": num_good / span_s,
        "good_share": num_good / max(len(workload), 1),
        "preemptions": preemptions(run.hosts),
        "prefix_hits": sum(cache.hits for cache in caches),
        "prefix_tokens_reused": sum(cache.tokens_reused for cache in caches),
        "pool_blocks": num_blocks,
        "occupancy": [
            {
                "at_s": span.at_s,
                "pool_share": span.live_blocks / num_blocks,
                "running": span.running,
                "waiting": span.waiting,
            }
            for span in run.tally.occupancy()
        ],
    }


def fewest_hosts(is_enough: Callable[[int], bool], least: int, most: int) -> int | None:
    """The smallest number of hosts from ``least`` to ``most`` that is enough, where more are never worse: doubled until
    it is, then halved between. None: ``most`` is not enough."""
    low, high = least - 1, least
    while not is_enough(high):
        if high == most:
            return None
        low, high = high, min(2 * high, most)
    while high - low > 1:
        middle = (low + high) // 2
        if is_enough(middle):
            high = middle
        else:
            low = middle
    return high


def _spread(values: Iterable[float]) -> dict[str, float]:
    ranked = sorted(values)
    mean = sum(ranked) / len(ranked) if ranked else 0.0
    return {"mean": mean} | {name: percentile(ranked, share) for name, share in SHARES.items()}
