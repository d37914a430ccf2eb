"""The judgement of a run: invalid, failed or passed, and why."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

from loadtest.agreement import Comparison
from loadtest.measures import Measures
from loadtest.validity import ClientLimits

SLO = Path(__file__).parent / "slo.toml"


class Outcome(Enum):
    PASSED = "passed"
    FAILED = "failed"
    INVALID = "invalid"


@dataclass(frozen=True)
class Check:
    """One thing that had to hold. ``value`` None: the run does not have it, and so it does not hold."""

    name: str
    value: float | None
    limit: str
    holds: bool

    def __str__(self) -> str:
        value = "missing" if self.value is None else f"{self.value:.4g}"
        return f"{self.name} is {value}, wanted {self.limit}"


@dataclass(frozen=True)
class Verdict:
    """``faults`` are what makes a run invalid. ``notes`` are for who reads it and judge nothing."""

    scenario: str
    faults: tuple[str, ...]
    checks: tuple[Check, ...]
    notes: tuple[str, ...] = ()
    measures: Measures = field(default_factory=dict)

    @property
    def outcome(self) -> Outcome:
        if self.faults:
            return Outcome.INVALID
        return Outcome.PASSED if all(check.holds for check in self.checks) else Outcome.FAILED

    @property
    def reasons(self) -> list[str]:
        """What is against it: for an invalid run its faults, else the checks that do not hold."""
        return list(self.faults) or [str(check) for check in self.checks if not check.holds]


@dataclass(frozen=True)
class Objectives:
    """What ``slo.toml`` asks of one scenario."""

    at_most: Mapping[str, float]
    at_least: Mapping[str, float]
    client: ClientLimits
    ttft_share: float
    ttft_floor_s: float
    worse: float
    lower_is_better: tuple[str, ...]
    higher_is_better: tuple[str, ...]


def objectives(scenario: str, small: bool, path: Path = SLO) -> Objectives:
    """Raises KeyError or tomllib.TOMLDecodeError for a file that lacks a section it must have, or is none."""
    slo: dict[str, Any] = tomllib.loads(path.read_text())
    shorter = slo["small"]
    own = shorter.get(scenario, {}) if small else slo.get(scenario, {})
    agreement, baseline = slo["agreement"], slo["baseline"]
    return Objectives(
        at_most={**slo["default"].get("at_most", {}), **own.get("at_most", {})},
        at_least={**slo["default"].get("at_least", {}), **own.get("at_least", {})},
        client=ClientLimits(**slo["client"] | (shorter.get("client", {}) if small else {})),
        ttft_share=agreement["ttft_share"],
        ttft_floor_s=agreement["ttft_floor_s"],
        worse=baseline["worse"],
        lower_is_better=tuple(baseline["lower_is_better"]),
        higher_is_better=tuple(baseline["higher_is_better"]),
    )


def judge(
    scenario: str,
    measures: Measures,
    wanted: Objectives,
    faults: Sequence[str],
    comparisons: Sequence[Comparison],
    baseline: Mapping[str, float] | None,
    unknowable: frozenset[str] = frozenset(),
    notes: Sequence[str] = (),
) -> Verdict:
    """Hold a run against its limits, against what the server counted, and against a kept run. Limits of measures that
    are ``unknowable`` with such a server are left out."""
    limits = [(name, limit, True) for name, limit in wanted.at_most.items() if name not in unknowable]
    limits += [(name, limit, False) for name, limit in wanted.at_least.items()]
    checks = [_check(name, measures.get(name), limit, is_ceiling) for name, limit, is_ceiling in limits]
    checks += [
        Check(f"server agrees on {one.name}", one.clients, f"{one.server:.4g} ± {one.tolerance:.3g}", one.agrees)
        for one in comparisons
    ]
    for name, kept in (baseline or {}).items():
        if name in wanted.lower_is_better:
            checks.append(_check(f"{name} to baseline", _ratio(measures.get(name), kept), wanted.worse, True))
        elif name in wanted.higher_is_better:
            checks.append(_check(f"{name} to baseline", _ratio(measures.get(name), kept), 1 / wanted.worse, False))
    return Verdict(scenario, tuple(faults), tuple(checks), tuple(notes), measures)


def _check(name: str, value: float | None, limit: float, is_ceiling: bool) -> Check:
    holds = value is not None and (value <= limit if is_ceiling else value >= limit)
    return Check(name, value, f"{'at most' if is_ceiling else 'at least'} {limit:.4g}", holds)


def _ratio(value: float | None, kept: float) -> float | None:
    return None if value is None or not kept else value / kept
