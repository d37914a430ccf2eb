"""What checking drafts brings: tokens/s of answers that quote, of answers that edit code, and where nothing repeats."""

from __future__ import annotations

import asyncio
import statistics
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from loadtest.contestants import Running
from loadtest.figures.figure import Cell, Figure
from loadtest.figures.served import client, serving, totals
from loadtest.stream import Stream
from loadtest.waves import END_TOKENS

HARBOUR = (
    "The harbour of Lindholm freezes from December to March. For three hundred years its fishermen cut a channel with "
    "saws, a kilometre long, and cut it again each morning. In 1931 the town bought an ice-breaker, the Alma, with "
    "money that forty families had put together. She was slow and burned nine tonnes of coal a day, but the channel "
    "stayed open. When the railway came, nobody needed the channel, and the Alma lay at the quay for six years. A "
    "teacher had her painted, and today she carries visitors to the islands in summer, at eleven knots."
)
ORCHARD = (
    "Behind the old brewery lies an orchard of two hundred apple trees, and no two of them are of the same kind. A "
    "chemist planted it in 1902 to find an apple that keeps until May without a cellar. He wrote down the weight of "
    "each harvest in eleven notebooks. The apple that he looked for was tree number 88: small, green and so hard that "
    "it was used to drive nails. Children of the village still call it the hammer. The notebooks were found in a "
    "chimney when the brewery was torn down, and they are now in the town hall, in a glass case."
)
STOCK = """class Stock:
    def __init__(self):
        self.items = {}

    def add(self, name, amount):
        if amount <= 0:
            raise ValueError("amount must be positive")
        self.items[name] = self.items.get(name, 0) + amount

    def remove(self, name, amount):
        if self.items.get(name, 0) < amount:
            raise KeyError(f"not enough of {name}")
        self.items[name] -= amount
        if self.items[name] == 0:
            del self.items[name]

    def total(self):
        return sum(self.items.values())
"""
TIMETABLE = """class Timetable:
    def __init__(self, opens, closes):
        self.opens = opens
        self.closes = closes
        self.lessons = []

    def book(self, begin, end, teacher):
        if begin < self.opens or end > self.closes:
            raise ValueError("the school is closed")
        for lesson in self.lessons:
            if lesson.teacher == teacher and begin < lesson.end and end > lesson.begin:
                raise ValueError("the teacher is busy")
        self.lessons.append(Lesson(begin, end, teacher))

    def of(self, teacher):
        return [lesson for lesson in self.lessons if lesson.teacher == teacher]
"""
QUOTES = '{}\n\nThe same text once more, sentence by sentence, each in quotes:\n"'
EDIT = "```python\n{}```\n\nThe same code with a docstring in each method:\n```python\n"
COLUMNS = ("answer", "C", "tokens/s off", "tokens/s on", "on / off", "proposed", "accepted", "accepted share")


@dataclass(frozen=True)
class Workload:
    """One prompt for each request of a level. With a seed the text is drawn at temperature 1, else greedily."""

    name: str
    prompts: tuple[str, str]
    seed: int | None = None


WORKLOADS = (
    Workload("quotes a text", (QUOTES.format(HARBOUR), QUOTES.format(ORCHARD))),
    Workload("edits code", (EDIT.format(STOCK), EDIT.format(TIMETABLE))),
    Workload("copies nothing", ("My grandmother used to say that", "The first thing I saw in the city was"), seed=3),
)


@dataclass(frozen=True)
class Sizes:
    levels: tuple[int, ...] = (1, 2)
    num_new: int = 160
    rounds: int = 5


SMALL = Sizes(num_new=16, rounds=1)


def measure(folder: Path, small: bool) -> Figure:
    sizes = SMALL if small else Sizes()
    with ExitStack() as stack:
        off, on = (
            stack.enter_context(serving(f"speculation-{kind}", folder, 4, DRAFT_KIND=kind))
            for kind in ("none", "prompt-lookup")
        )
        rows = tuple(asyncio.run(_run(off, on, sizes)))
    return Figure(
        "speculation",
        f"prompt lookup, C requests at once, {sizes.num_new} tokens each",
        COLUMNS,
        rows,
        (
            f"Tokens/s from the first token to the last, medians of {sizes.rounds} rounds, both servers in turn. Quotes"
            " and code are drawn greedily, what copies nothing at temperature 1, by the same seeds.",
        ),
        asdict(sizes),
    )


async def _run(off: Running, on: Running, sizes: Sizes) -> list[tuple[Cell, ...]]:
    rows: list[tuple[Cell, ...]] = []
    async with client(off) as http_off, client(on) as http_on:
        for workload in WORKLOADS:
            for level in sizes.levels:
                rates: tuple[list[float], list[float]] = [], []
                await _rate(http_off, off, workload, level, sizes.num_new)  # leaves the prompts in the cache
                await _rate(http_on, on, workload, level, sizes.num_new)
                before = await _drafts(http_on)
                for _ in range(sizes.rounds):
                    rates[0].append(await _rate(http_off, off, workload, level, sizes.num_new))
                    rates[1].append(await _rate(http_on, on, workload, level, sizes.num_new))
                after = await _drafts(http_on)
                slow, fast = (statistics.median(each) for each in rates)
                proposed, accepted = ((a - b) // sizes.rounds for a, b in zip(after, before, strict=True))
                share = accepted / proposed if proposed else None
                rows.append((workload.name, level, slow, fast, fast / slow, proposed, accepted, share))
    return rows


async def _rate(http: httpx.AsyncClient, server: Running, workload: Workload, level: int, num_new: int) -> float:
    """Tokens/s of ``level`` requests at once."""
    streams = [Stream() for _ in range(level)]
    chosen = {} if workload.seed is None else {"temperature": 1.0, "seed": workload.seed}
    fields = {"logit_bias": END_TOKENS} | chosen
    prompts = workload.prompts[:level]
    await asyncio.gather(
        *(
            stream.run(http, server.model, prompt, num_new, **fields)
            for stream, prompt in zip(streams, prompts, strict=True)
        )
    )
    begin_s = min(stream.moments_s[0] for stream in streams)
    return level * (num_new - 1) / (max(stream.moments_s[-1] for stream in streams) - begin_s)


async def _drafts(http: httpx.AsyncClient) -> tuple[int, int]:
    """Tokens that were proposed and accepted so far."""
    text = (await http.get("/metrics")).raise_for_status().text
    proposed, accepted = (totals(text, f"mlxcel_spec_{what}_tokens_total")[""] for what in ("proposed", "accepted"))
    return proposed, accepted
