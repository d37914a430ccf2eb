"""What a scenario is: who comes, how many and for how long, and which server it is meant for. Data only, no locust."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from loadtest import scenarios

Deed = Literal["ask", "chat", "leave", "read_slowly", "send_broken", "send_huge", "send_wrong_key"]
EXPECTED: dict[Deed, int] = {"send_broken": 400, "send_huge": 413, "send_wrong_key": 401}
API_KEY = "loadtest"  # of servers that a scenario starts with keys


@dataclass(frozen=True)
class Kind:
    """One kind of user. Prompts have about ``num_prompt`` tokens (a range: drawn anew for each), of which the first
    ``num_shared`` are the same for all; answers have ``num_new``.

    A user asks, waits ``think_s``, and asks again; with ``once`` it asks a single time, at a random moment of the first
    ``within_s``. With ``rate_per_s`` it does not
    wait for answers: requests leave at random moments (Poisson) at that rate, however many are open. ``chat`` asks
    ``num_turns`` times in one conversation. ``leave`` hangs up after a time drawn from ``stays_s``.
    """

    name: str
    num_prompt: int | tuple[int, int]
    num_new: int
    does: Deed = "ask"
    weight: int = 1
    num_shared: int = 0
    num_turns: int = 1
    priority: int = 0
    think_s: float = 0.0
    once: bool = False
    within_s: float = 0.0
    rate_per_s: float | None = None
    stays_s: tuple[float, float] = (0.0, 0.0)

    @property
    def expects(self) -> int:
        """The status that is right for what it sends."""
        return EXPECTED.get(self.does, 200)


@dataclass(frozen=True)
class Stage:
    """``num_users`` for ``for_s`` seconds, of the kinds by their weights."""

    name: str
    for_s: float
    num_users: int


@dataclass(frozen=True)
class Scenario:
    """``server`` are settings (without their prefix) of the server it is made for. ``small`` is the shape of the smoke
    test; scenarios without one are not in it.

    ``ratios`` are measures made of two others. With ``refuses`` 503 is an answer to be expected, and a run without any
    says nothing. ``intruder`` is the kind whose prefill the token gaps of the others are looked at beside.
    ``drain_after_s``: the server is told to end then, in seconds after the start.
    """

    name: str
    proves: str
    kinds: tuple[Kind, ...]
    shape: tuple[Stage, ...]
    small: tuple[Stage, ...] = ()
    server: Mapping[str, str] = field(default_factory=dict)
    ratios: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    refuses: bool = False
    intruder: str | None = None
    drain_after_s: float | None = None

    @property
    def agrees(self) -> bool:
        """Whether client and server can be asked to agree: not where users leave, or the server does."""
        return self.drain_after_s is None and all(kind.does != "leave" for kind in self.kinds)

    @property
    def api_key(self) -> str | None:
        return API_KEY if "API_KEYS" in self.server else None

    def scaled(self, time: float, load: float) -> Scenario:
        """The same with durations multiplied by ``time``, and users and arrival rates by ``load``."""

        def stages(shape: tuple[Stage, ...]) -> tuple[Stage, ...]:
            is_open = any(kind.rate_per_s for kind in self.kinds)
            return tuple(
                replace(
                    stage,
                    for_s=stage.for_s * time,
                    num_users=stage.num_users if is_open else max(1, round(stage.num_users * load)),
                )
                for stage in shape
            )

        kinds = tuple(replace(kind, rate_per_s=kind.rate_per_s and kind.rate_per_s * load) for kind in self.kinds)
        drain_after_s = self.drain_after_s and self.drain_after_s * time
        return replace(
            self, kinds=kinds, shape=stages(self.shape), small=stages(self.small), drain_after_s=drain_after_s
        )

    def small_one(self) -> Scenario:
        """The same with the shape of the smoke test."""
        return replace(self, shape=self.small)


def names() -> list[str]:
    """Every scenario there is: one module each in ``loadtest.scenarios``."""
    return sorted(module.name for module in pkgutil.iter_modules(scenarios.__path__))


def scenario(name: str) -> Scenario:
    """Raises KeyError, with the names there are, for a scenario that does not exist."""
    if name not in names():
        raise KeyError(f"no such scenario: {name} (there are {', '.join(names())})")
    found: Scenario = importlib.import_module(f"loadtest.scenarios.{name}").SCENARIO
    return found
