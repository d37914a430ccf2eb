"""A recording outside of the process: JSON of ids, integers and moments, and nothing that could be read as text.

Decisions depend on tokens only through which prompts and answers begin alike, and how far. So each distinct beginning
gets a number in the order of its first appearance, and each token is replaced by the number of the beginning that it
ends. Two requests have the same numbers exactly as far as they had the same tokens; what the tokens were is gone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

from app.errors import MlxcelError
from app.kv.books import Books, Held, Keyed
from app.scheduler.cost import Load, Sample
from app.scheduler.policy import SchedulerConfig
from app.scheduler.recorder import Checkpoint, Entry, Recorded, RecordedScheduler, Standing

FORMAT = 3

Rows = list[tuple[int, int, int, bool]]


class BadRecording(MlxcelError):
    """A file that is no recording, or one of another version."""


@dataclass(frozen=True, slots=True)
class Recording:
    """What was kept: entries from ``first_tick`` on, each as ``recorder.Segment`` says, and the state before them."""

    first_tick: int
    config: SchedulerConfig
    checkpoint: Checkpoint
    requests: dict[int, Recorded]
    entries: list[Entry]

    @property
    def num_ticks(self) -> int:
        return sum(1 for entry in self.entries if entry[0] in ("plan", "ahead"))

    @property
    def next_tick(self) -> int:
        """The number of the tick that comes after the last one."""
        return self.first_tick + self.num_ticks


def rows_of(plan: Entry) -> Rows:
    """(request id, start, number of tokens, whether it draws) of each row of a ``plan`` or ``ahead`` entry."""
    flat = plan[2] if plan[0] == "plan" else plan[1]
    return [(flat[i], flat[i + 1], flat[i + 2], bool(flat[i + 3])) for i in range(0, len(flat), 4)]


def to_json(scheduler: RecordedScheduler) -> dict[str, Any]:
    """What a scheduler remembers, without its tokens. May be called on any thread while it runs."""
    segments = scheduler.segments
    checkpoint, books = segments[0].checkpoint, segments[0].checkpoint.books
    beginnings, salts = _Numbers(), _Numbers()
    ends: list[int] = []
    keyed = []
    for blocks, parent, salt, tokens in books.keyed:
        named = beginnings.name(tokens, 0 if parent < 0 else ends[parent])
        ends.append(named[-1])
        keyed.append([list(blocks), parent, salts.name([salt])[0], _runs(named)])
    requests = {}
    for request in chain.from_iterable(list(segment.requests.values()) for segment in segments):
        requests[request.id] = {field.name: getattr(request, field.name) for field in fields(Recorded)} | {
            "salt": salts.name([request.salt])[0],
            "tokens": _runs(beginnings.name(request.tokens[:])),
        }
    held = [[i, salts.name([salt])[0], *rest] for i, salt, *rest in books.held]
    entries = chain.from_iterable(segment.entries[:] for segment in segments)
    return {
        "format": FORMAT,
        "first_tick": segments[0].first_tick,
        "config": asdict(scheduler.config),
        "books": {field.name: getattr(books, field.name) for field in fields(Books)} | {"keyed": keyed, "held": held},
        "running": [list(standing) for standing in checkpoint.running],
        "waiting": [list(standing) for standing in checkpoint.waiting],
        "numbers": checkpoint.numbers,
        "requests": list(requests.values()),
        "entries": [
            [list(value) if isinstance(value, Sequence) and not isinstance(value, str) else value for value in entry]
            for entry in entries
        ],
    }


def from_json(data: dict[str, Any]) -> Recording:
    """The inverse. Raises BadRecording."""
    if not isinstance(data, dict) or "format" not in data:
        raise BadRecording("not a recording: it has no format")
    try:
        if data["format"] != FORMAT:
            raise BadRecording(f"the recording has format {data['format']}; this version reads {FORMAT}")
        books = data["books"] | {
            "keyed": tuple(
                Keyed(tuple(blocks), parent, str(salt), tuple(_spelt(runs)))
                for blocks, parent, salt, runs in data["books"]["keyed"]
            ),
            "held": tuple(
                Held(i, str(salt), publishes, tuple(blocks), num_published, num_gone, node)
                for i, salt, publishes, blocks, num_published, num_gone, node in data["books"]["held"]
            ),
            "blank": tuple(data["books"]["blank"]),
            "cached": tuple((block, since_s) for block, since_s in data["books"]["cached"]),
            "windows": tuple(data["books"]["windows"]),
        }
        requests = [
            Recorded(**(request | {"salt": str(request["salt"]), "tokens": list(_spelt(request["tokens"]))}))
            for request in data["requests"]
        ]
        checkpoint = Checkpoint(
            Books(**books),
            tuple(Standing(*values) for values in data["running"]),
            tuple(Standing(*values) for values in data["waiting"]),
            data["numbers"],
        )
        return Recording(
            data["first_tick"],
            SchedulerConfig(**data["config"]),
            checkpoint,
            {request.id: request for request in requests},
            [tuple(entry) for entry in data["entries"]],
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadRecording(f"not a recording of this version: {type(error).__name__}: {error}") from None


def read(path: Path) -> Recording:
    """Raises BadRecording."""
    try:
        data = json.loads(path.read_bytes())
    except OSError as error:
        raise BadRecording(f"{path} cannot be read: {error.strerror}") from None
    except ValueError:
        raise BadRecording(f"{path} is no recording: it is not JSON") from None
    try:
        return from_json(data)
    except BadRecording as error:
        raise BadRecording(f"{path}: {error}") from None


def samples(recording: Recording, first_tick: int = 0) -> list[Sample]:
    """The measured ticks from ``first_tick`` on. One that was followed at once by another lasted until that one was
    planned."""
    size = recording.checkpoint.books.block_size
    ticks: list[tuple[Rows, float, float]] = []
    next_tick = recording.first_tick
    for entry in recording.entries:
        match entry:
            case ("plan", at_s, *_):
                rows, began_s, following = rows_of(entry), at_s, None
                if ticks and _goes_on(ticks[-1][0], rows):
                    ticks[-1] = *ticks[-1][:2], at_s
                next_tick += 1
            case ("ahead", _):
                following = rows_of(entry)
                next_tick += 1
            case ("apply", at_s, *_):
                if next_tick > first_tick:
                    ticks.append((rows, began_s, at_s))
                if following is not None:  # its turn begins
                    rows, began_s, following = following, at_s, None
    measured = []
    for rows, began_s, ended_s in ticks:
        load = Load(
            sum(1 for row in rows if row[2] == 1),
            sum(row[2] for row in rows if row[2] > 1),
            sum(-(-(row[1] + row[2]) // size) for row in rows),
        )
        measured.append(Sample(load, ended_s - began_s))
    return [sample for sample in measured if sample.seconds > 0]


def _goes_on(early: Rows, late: Rows) -> bool:
    return not {row[0] for row in early}.isdisjoint(row[0] for row in late)


class _Numbers:
    """Numbers for beginnings, from 1 on, in the order of their first appearance."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, Any], int] = {}

    def name(self, values: Iterable[Any], after: int = 0) -> list[int]:
        """The number of each beginning of ``values``, which follow on the beginning ``after`` (0: nothing)."""
        known = self._known
        numbers = []
        for value in values:
            after = known.setdefault((after, value), len(known) + 1)
            numbers.append(after)
        return numbers


def _runs(numbers: Sequence[int]) -> list[int]:
    """Consecutive numbers as first, count, first, count, ..."""
    starts = [0, *(i + 1 for i, (a, b) in enumerate(pairwise(numbers)) if b != a + 1), len(numbers)]
    return [value for i, j in pairwise(starts) if i < j for value in (numbers[i], j - i)]


def _spelt(runs: Sequence[int]) -> Iterator[int]:
    return chain.from_iterable(range(first, first + count) for first, count in zip(runs[::2], runs[1::2], strict=True))
