"""Who asks for what, and when: workloads from a trace file, or made up by rule."""

from __future__ import annotations

import csv
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from app.errors import MlxcelError

LAST_S = 1e9  # a lifetime; far beyond it a float no longer tells one tick from the next
COLUMNS = ("arrival_s", "prompt_tokens", "shared_prefix", "shared_tokens", "output_tokens", "priority")


class BadTrace(MlxcelError):
    """A trace file that cannot be used; the text names the line."""


class Arrival(NamedTuple):
    """One request. It comes ``at_s`` seconds after the start, or after the answer to arrival ``after`` has ended.

    The first ``num_shared`` of its ``num_prompt`` tokens are those of the shared text ``prefix`` (0: none). A prompt
    that is all shared belongs to a conversation: what is answered to it becomes part of the shared text.
    """

    at_s: float
    num_prompt: int
    num_output: int
    prefix: int = 0
    num_shared: int = 0
    priority: int = 0
    after: int | None = None


class Lengths(NamedTuple):
    """Numbers of tokens, each from ``least`` to ``most`` as likely as any other."""

    least: int
    most: int

    def draw(self, source: random.Random) -> int:
        return source.randint(self.least, self.most)


class Shape(NamedTuple):
    """What made-up requests look like. Each begins with one of ``num_prefixes`` shared texts of ``num_shared`` tokens,
    which come on top of its own prompt."""

    prompt: Lengths
    output: Lengths
    num_prefixes: int = 0
    num_shared: int = 0

    def arrival(self, at_s: float, source: random.Random) -> Arrival:
        prompt, output = self.prompt.draw(source), self.output.draw(source)
        if not self.num_prefixes:
            return Arrival(at_s, prompt, output)
        prefix = source.randint(1, self.num_prefixes)
        return Arrival(at_s, self.num_shared + prompt, output, prefix, self.num_shared)


def tokens_of(index: int, arrival: Arrival) -> list[int]:
    """The prompt of arrival number ``index``. A token is its position, but for the first one of a text, which no other
    text has: prompts are alike as far as their texts are the same, and most tokens are integers that exist anyway."""
    tokens = list(range(arrival.num_prompt))
    if arrival.num_shared < arrival.num_prompt:
        tokens[arrival.num_shared] = (index + 1) << 32
    if arrival.num_shared:
        tokens[0] = -arrival.prefix
    return tokens


def poisson(num_requests: int, rate: float, shape: Shape, seed: int) -> Iterator[Arrival]:
    """Independent arrivals, ``rate`` a second on average."""
    source = random.Random(seed)
    at_s = 0.0
    for _ in range(num_requests):
        at_s += source.expovariate(rate)
        yield shape.arrival(at_s, source)


def bursty(num_requests: int, rate: float, shape: Shape, seed: int, burst: int) -> Iterator[Arrival]:
    """The same rate on average, but ``burst`` at a time in the same moment."""
    source = random.Random(seed)
    at_s = 0.0
    for i in range(num_requests):
        if i % burst == 0:
            at_s += source.expovariate(rate / burst)
        yield shape.arrival(at_s, source)


def multi_turn(
    num_requests: int, rate: float, shape: Shape, seed: int, turns: int, think_s: float
) -> Iterator[Arrival]:
    """Conversations of ``turns`` requests; ``rate`` counts requests. Each turn comes about ``think_s`` after the answer
    to the one before, and its prompt is all that was said so far and ``shape.prompt`` tokens more."""
    source = random.Random(seed)
    at_s = 0.0
    num_said = 0
    for i in range(num_requests):
        if i % turns == 0:
            at_s += source.expovariate(rate / turns)
            num_said = 0
        asked, answered = shape.prompt.draw(source), shape.output.draw(source)
        num_prompt = num_said + asked
        wait_s = at_s if num_said == 0 else source.expovariate(1 / think_s) if think_s else 0.0
        after = None if num_said == 0 else i - 1
        yield Arrival(wait_s, num_prompt, answered, i // turns + 1, num_prompt, 0, after)
        num_said = num_prompt + answered


def read_trace(path: Path) -> list[Arrival]:
    """A CSV file with a header of ``COLUMNS`` in any order; the last four may be absent or empty, except the output.

    Raises:
        BadTrace: it cannot be read, or a line makes no sense.
    """
    try:
        with path.open(newline="") as file:
            return list(_arrivals(path, csv.DictReader(file)))
    except (OSError, UnicodeDecodeError) as error:
        raise BadTrace(f"{path} cannot be read: {error}") from None


def _arrivals(path: Path, lines: Iterable[dict[str, str | None]]) -> Iterator[Arrival]:
    prefixes: dict[str, int] = {}
    for number, line in enumerate(lines, start=2):
        unknown = [name for name in line if name not in COLUMNS]
        if unknown:
            raise BadTrace(f"{path}, line 1: {unknown[0]} is not a column; there are {', '.join(COLUMNS)}")
        try:
            name = line.get("shared_prefix") or ""
            arrival = Arrival(
                float(line["arrival_s"] or ""),
                int(line["prompt_tokens"] or ""),
                int(line["output_tokens"] or ""),
                prefixes.setdefault(name, len(prefixes) + 1) if name else 0,
                int(line.get("shared_tokens") or 0),
                int(line.get("priority") or 0),
            )
        except (KeyError, ValueError) as error:
            raise BadTrace(f"{path}, line {number}: {error}") from None
        if not arrival.at_s <= LAST_S:
            raise BadTrace(f"{path}, line {number}: arrival_s must be a number, at most {LAST_S:g}")
        if not (arrival.at_s >= 0 and arrival.num_prompt > 0 and arrival.num_output > 0):
            raise BadTrace(f"{path}, line {number}: the arrival is negative, or there are no tokens")
        if not 0 <= arrival.num_shared <= arrival.num_prompt or bool(name) != bool(arrival.num_shared):
            raise BadTrace(f"{path}, line {number}: shared_tokens must be 1 to prompt_tokens where there is a prefix")
        yield arrival
