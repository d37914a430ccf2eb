"""What is written down of a run: one JSON line for each request, stage, look at the client and look at the server."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import orjson

DRAINING = ("Draining", "Shutting down")  # messages of a server that ends


@dataclass
class Exchange:
    """One request and what came of it. ``at_s`` and ``planned_s`` are seconds since the epoch, others since sending.

    ``status`` is None where no answer came, ``is_whole`` tells of an answer read to its proper end, ``left`` of a user
    who hung up. ``is_proper`` is whether a refusal was as documented: body and Retry-After.
    """

    kind: str
    user: str
    at_s: float = 0.0
    planned_s: float | None = None
    expects: int = 200
    status: int | None = None
    error: str = ""
    is_whole: bool = False
    is_proper: bool = True
    left: bool = False
    retry_after_s: float | None = None
    moments_s: list[float] = field(default_factory=list)  # when text came
    end_s: float = 0.0
    prompt_s: float | None = None  # slot to first token, as the server tells it
    num_prompt: int = 0
    num_cached: int = 0
    num_new: int = 0

    @property
    def is_good(self) -> bool:
        return self.status == 200 and self.is_whole

    @property
    def is_refused(self) -> bool:
        """Whether there was no place for it, also where that was said after the headers had left."""
        return self.status == 503 or (self.status == 200 and not self.moments_s and self.error in DRAINING)

    @property
    def has_failed(self) -> bool:
        """Whether it is neither what was asked for, nor a refusal, nor a user's own leaving, nor an absent server."""
        if self.left or self.is_refused or self.status is None:
            return False
        return self.status != self.expects or (self.status == 200 and not self.is_whole)

    @property
    def ttft_s(self) -> float | None:
        return self.moments_s[0] if self.moments_s else None

    @property
    def queue_s(self) -> float | None:
        """TTFT less what the server says it took from slot to first token; None where it does not say."""
        if self.ttft_s is None or self.prompt_s is None:
            return None
        return max(0.0, self.ttft_s - self.prompt_s)

    @property
    def gaps_s(self) -> list[float]:
        return [late - early for early, late in itertools.pairwise(self.moments_s)]

    @property
    def tokens_at_s(self) -> Iterator[tuple[float, float]]:
        """Moments (since the epoch) at which text came, and how many tokens each stands for."""
        share = self.num_new / len(self.moments_s) if self.num_new and self.moments_s else 1.0
        return ((self.at_s + moment_s, share) for moment_s in self.moments_s)


@dataclass
class StageBegin:
    """The shape moved on to a stage, at ``at_s`` since the epoch."""

    name: str
    at_s: float
    num_users: int


@dataclass
class ClientLook:
    """One look at a load-generating process: the share of a core it used since the last one, and how late it was."""

    at_s: float
    cpu: float
    late_s: float


@dataclass
class ServerLook:
    """One scrape of the server. ``values`` are its samples by name and labels; ``rss_bytes`` None: not ours."""

    at_s: float
    values: dict[str, float]
    rss_bytes: int | None = None


Line = Exchange | StageBegin | ClientLook | ServerLook
LINES: dict[str, type[Line]] = {kind.__name__: kind for kind in (Exchange, StageBegin, ClientLook, ServerLook)}


def to_json(line: Line) -> bytes:
    return orjson.dumps({"line": type(line).__name__, **asdict(line)}) + b"\n"


def from_json(text: bytes | str) -> Line:
    """Raises KeyError or TypeError for what ``to_json`` has not made."""
    members: dict[str, Any] = orjson.loads(text)
    return LINES[members.pop("line")](**members)


@dataclass
class Run:
    """All that was written down of one run, in the order of time."""

    exchanges: list[Exchange] = field(default_factory=list)
    stages: list[StageBegin] = field(default_factory=list)
    clients: list[ClientLook] = field(default_factory=list)
    servers: list[ServerLook] = field(default_factory=list)
    drained_s: float | None = None  # when the server was told to end
    exit_code: int | None = None  # of a server of ours, once it has ended

    def add(self, lines: Iterable[Line]) -> Run:
        for line in lines:
            place: Any = {
                Exchange: self.exchanges,
                StageBegin: self.stages,
                ClientLook: self.clients,
                ServerLook: self.servers,
            }[type(line)]
            place.append(line)
        for kind in (self.exchanges, self.stages, self.clients, self.servers):
            kind.sort(key=lambda line: line.at_s)
        return self

    def span_of(self, stage: str) -> tuple[float, float]:
        """Begin and end of a stage, seconds since the epoch. Raises KeyError where the run never came to it."""
        for i, one in enumerate(self.stages):
            if one.name == stage:
                return one.at_s, self.stages[i + 1].at_s if i + 1 < len(self.stages) else self.end_s
        raise KeyError(stage)

    @property
    def end_s(self) -> float:
        return max([one.at_s for one in self.stages[-1:]] + [one.at_s for one in self.clients[-1:]], default=0.0)


def read(path: Path) -> list[Line]:
    """The lines of a raw file."""
    return [from_json(text) for text in path.read_bytes().splitlines()]
