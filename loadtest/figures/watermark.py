"""What the admission watermark does where the KV budget is too small for all chats to reach their ends together."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx

from loadtest.contestants import Running
from loadtest.figures.figure import Cell, Figure
from loadtest.figures.served import client, serving, totals
from loadtest.waves import random_words

TOKEN_BYTES = 30 * 3 * (64 + 64) * 4  # K and V of the embedded model in float32
# Preemptions, decode reclaim passes, turns of 9, seconds: Llama 3.1 8B in 4 bits on a GB10, answers of 600 tokens.
ELSEWHERE: dict[float, tuple[Cell, ...]] = {
    0: (10, 43, 9, "103-104"),
    0.01: (6, 6, 9, "90-91"),
    0.02: (6, 6, 9, "89-90"),
    0.05: (5, 5, 9, "89-90"),
    0.10: (1, 2, 9, "86"),
    0.15: (1, 3, 9, "88"),
}
COLUMNS = (
    *("watermark", "victims: reclaim", "other", "reclaim passes", "prefix keys evicted", "turns", "wall s"),
    *("GB10 8B: preemptions", "reclaim passes", "turns", "wall s"),
)


@dataclass(frozen=True)
class Sizes:
    grid: tuple[float, ...] = (0, 0.01, 0.02, 0.05, 0.10, 0.15)
    num_words: tuple[int, ...] = (20, 60, 10)  # of a question, chat by chat
    num_turns: int = 3
    num_new: int = 56
    num_blocks: int = 37
    block_size: int = 16

    @property
    def num_chats(self) -> int:
        return len(self.num_words)

    @property
    def budget_bytes(self) -> int:
        return self.num_blocks * self.block_size * TOKEN_BYTES


SMALL = Sizes(grid=(0, 0.10), num_turns=2, num_new=40, num_blocks=32)


@dataclass(frozen=True)
class Run:
    """One pass of all chats. ``num_tokens`` is what their last turns came to, all chats added up."""

    victims: dict[str, int]
    passes: int
    evicted: int
    turns: int
    num_tokens: int
    wall_s: float


def measure(folder: Path, small: bool) -> Figure:
    sizes = SMALL if small else Sizes()
    runs = {watermark: _measure(folder, sizes, watermark) for watermark in sizes.grid}
    rows = tuple(
        (
            float(watermark),
            run.victims.get("reclaim", 0),
            sum(number for cause, number in run.victims.items() if cause != "reclaim"),
            run.passes,
            run.evicted,
            f"{run.turns} / {sizes.num_chats * sizes.num_turns}",
            run.wall_s,
            *ELSEWHERE[watermark],
        )
        for watermark, run in runs.items()
    )
    last = next(reversed(runs.values()))
    return Figure(
        "watermark",
        f"{sizes.num_chats} chats of {sizes.num_turns} turns, answers of {sizes.num_new} tokens, at once",
        COLUMNS,
        rows,
        (
            f"The pool has {sizes.num_blocks} blocks of {sizes.block_size} tokens,"
            f" {sizes.num_blocks * sizes.block_size} in all; at their ends the chats have {last.num_tokens} together.",
            "A pass is a tick in which a decoding row got a block at the cost of another row or of a prefix key; keys"
            " are also evicted at admission.",
        ),
        asdict(sizes),
    )


def _measure(folder: Path, sizes: Sizes, watermark: float) -> Run:
    settings = {
        "WEIGHT_DTYPE": "float32",
        "KV_CACHE_BUDGET": str(sizes.budget_bytes),
        "KV_BLOCK_SIZE": str(sizes.block_size),
        "KV_ADMISSION_WATERMARK": str(watermark),
    }
    with serving("watermark", folder, sizes.num_chats, **settings) as server:
        run = asyncio.run(_run(server, sizes))
    print(f"watermark {watermark:4}  {run.victims} {run.wall_s:6.1f} s", file=sys.stderr)
    return run


async def _run(server: Running, sizes: Sizes) -> Run:
    async with client(server) as http:
        began_s = time.perf_counter()
        ends = await asyncio.gather(
            *(_chat(http, server.model, sizes, seed, n) for seed, n in enumerate(sizes.num_words))
        )
        wall_s = time.perf_counter() - began_s
        exposition = (await http.get("/metrics")).text
    victims = totals(exposition, "mlxcel_batch_preemptions_total")
    evicted = totals(exposition, "mlxcel_prompt_cache_evictions_total")["lru"]
    passes = totals(exposition, "mlxcel_batch_reclaim_passes_total")[""]
    return Run(victims, passes, evicted, sum(end[0] for end in ends), sum(end[1] for end in ends), wall_s)


async def _chat(http: httpx.AsyncClient, model: str, sizes: Sizes, seed: int, num_words: int) -> tuple[int, int]:
    """One chat, each answer part of the next prompt: how many turns got their whole answer, tokens at the end."""
    source = random.Random(seed)
    messages: list[dict[str, Any]] = []
    num_whole = num_tokens = 0
    for _ in range(sizes.num_turns):
        messages.append({"role": "user", "content": random_words(source, num_words)})
        body = {"model": model, "messages": messages, "max_tokens": sizes.num_new, "temperature": 0, "ignore_eos": True}
        response = await http.post("/v1/chat/completions", json=body)
        if response.status_code != 200:
            break
        answer = response.json()
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        num_whole += answer["usage"]["completion_tokens"] == sizes.num_new
        num_tokens = answer["usage"]["total_tokens"]
    return num_whole, num_tokens
