"""Whether a run is a measurement at all: was the load there that it set out to offer, and could the client keep up?"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.record import Exchange, Run
from loadtest.scenario import Kind, Scenario, Stage
from loadtest.waves import percentile

PRESENT = 0.95  # of a stage's users must have asked in it
IN_FLIGHT = 0.85  # of a stage's users must have had a request open, on average
RATE = 0.95  # of a set arrival rate must have been sent
DEVIATIONS = 4.0  # that the number of random arrivals may lie below its mean


@dataclass(frozen=True)
class ClientLimits:
    """``cpu``: mean share of one core; ``late_p95_s``: how late a sleeping greenlet may wake."""

    cpu: float
    late_p95_s: float


def faults(run: Run, scenario: Scenario, limits: ClientLimits) -> list[str]:
    """Why the run says nothing about the server; empty if it does."""
    if not any(one.status is not None for one in run.exchanges):
        return ["no request was answered"]
    found = [*_missing_stages(run, scenario), *_client_faults(run, limits)]
    for stage in scenario.shape:
        if any(one.name == stage.name for one in run.stages):
            found += _load_faults(run, scenario, stage)
    found += _short_stages(run, scenario)
    if scenario.refuses and not any(one.is_refused for one in run.exchanges):
        found.append("nothing was refused: the load never went beyond slots and queue")
    if scenario.drain_after_s is not None and run.drained_s is None:
        found.append("the server was not told to end: only a server that is started here can be")
    return found


def _missing_stages(run: Run, scenario: Scenario) -> list[str]:
    seen = [one.name for one in run.stages]
    wanted = [stage.name for stage in scenario.shape] + ["end"]
    return [] if seen == wanted else [f"the stages were {', '.join(seen) or 'none'} instead of {', '.join(wanted)}"]


def _short_stages(run: Run, scenario: Scenario) -> list[str]:
    """A stage that a ratio is made of must be long enough, on this machine, for an answer to each of its users."""
    used = {name.partition(".")[2] for pair in scenario.ratios.values() for name in pair}
    found = []
    for stage in scenario.shape:
        if stage.name in used and any(one.name == stage.name for one in run.stages):
            begin_s, end_s = run.span_of(stage.name)
            ended = [one for one in run.exchanges if one.is_good and begin_s <= one.at_s + one.end_s < end_s]
            if len(ended) < stage.num_users and not scenario.refuses:
                found.append(f"{stage.name}: {len(ended)} answers ended: too short for its {stage.num_users} users")
    return found


def _client_faults(run: Run, limits: ClientLimits) -> list[str]:
    if not run.clients:
        return ["the load generator left no record of itself"]
    cpu, late_s = (
        statistics.mean(look.cpu for look in run.clients),
        percentile([look.late_s for look in run.clients], 0.95),
    )
    found = []
    if cpu > limits.cpu:
        found.append(f"the client was the bottleneck: it used {cpu:.2f} of a core (at most {limits.cpu})")
    if late_s > limits.late_p95_s:
        found.append(
            f"the client was the bottleneck: p95 of its own lateness was {late_s:.3f} s (at most {limits.late_p95_s})"
        )
    return found


def _load_faults(run: Run, scenario: Scenario, stage: Stage) -> list[str]:
    span = run.span_of(stage.name)
    closed = [kind for kind in scenario.kinds if kind.rate_per_s is None]
    found = []
    for kind in scenario.kinds:
        if kind.rate_per_s is not None:
            ones = [one for one in run.exchanges if one.kind == kind.name and span[0] <= one.at_s < span[1]]
            num_users = stage.num_users * kind.weight / sum(one.weight for one in scenario.kinds)
            found += _rate_faults(ones, kind, kind.rate_per_s * num_users, span[1] - span[0])
    open_ones = [
        one
        for one in run.exchanges
        if one.at_s < span[1] and one.at_s + one.end_s > span[0] and any(one.kind == kind.name for kind in closed)
    ]
    share = sum(kind.weight for kind in closed) / sum(kind.weight for kind in scenario.kinds)
    num_wanted = stage.num_users * share
    num_present = len({one.user for one in open_ones})
    if num_present < PRESENT * num_wanted and run.drained_s is None:
        found.append(f"{stage.name}: {num_present} users asked instead of {num_wanted:.0f}")
    is_steady = all(kind.does == "ask" and not kind.think_s and not kind.once for kind in closed)
    if closed and is_steady and not any(one.is_refused for one in open_ones) and run.drained_s is None:
        busy_s = sum(min(one.at_s + one.end_s, span[1]) - max(one.at_s, span[0]) for one in open_ones)
        mean = busy_s / max(span[1] - span[0], 1e-9)
        if mean < IN_FLIGHT * num_wanted:
            found.append(f"{stage.name}: {mean:.1f} requests were open on average instead of {num_wanted:.0f}")
    return found


def _rate_faults(ones: Sequence[Exchange], kind: Kind, rate_per_s: float, for_s: float) -> list[str]:
    """The number sent must be one that the rate explains, and sending must have kept up with the plan."""
    least = rate_per_s * for_s - DEVIATIONS * math.sqrt(rate_per_s * for_s)
    if len(ones) < max(least, 1):
        return [f"{kind.name}: {len(ones)} requests were sent in {for_s:.0f} s instead of {rate_per_s * for_s:.0f}"]
    planned = [one.planned_s for one in ones if one.planned_s is not None]
    sent = [one.at_s for one in ones]
    if len(planned) > 1 and max(planned) - min(planned) < RATE * (max(sent) - min(sent)):
        return [f"{kind.name}: requests left more slowly than the rate of {rate_per_s:g}/s had planned"]
    return []
