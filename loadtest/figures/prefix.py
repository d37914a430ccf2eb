"""What sharing a prefix saves: bytes of the pool that are held, and the prefill of those who adopt it."""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from loadtest.contestants import Running
from loadtest.figures.figure import Cell, Figure
from loadtest.figures.served import ask, cache_stats, client, prompt_of, serving

SAVED_ELSEWHERE_MIB = 784  # Qwen3 0.6B in 4 bits on an M1 Ultra, 112 KiB a token
COLUMNS = ("prefix", "held MiB", "cached tokens", "TTFT s alone", "TTFT s at once, median", "M1 Ultra 0.6B: MiB")


@dataclass(frozen=True)
class Sizes:
    num_prefix: int = 1024
    num_requests: int = 8
    num_own: int = 16
    num_new: int = 48


SMALL = Sizes(num_prefix=256, num_requests=4)


@dataclass(frozen=True)
class Group:
    """One request alone, then all at once."""

    held_mib: float
    num_cached: int
    alone_s: float
    median_s: float


def measure(folder: Path, small: bool) -> Figure:
    sizes = SMALL if small else Sizes()
    with serving("prefix", folder, sizes.num_requests) as server:
        cold, shared, token_bytes = asyncio.run(_run(server, sizes))
    rows: list[tuple[Cell, ...]] = [
        (name, group.held_mib, group.num_cached, group.alone_s, group.median_s, None)
        for name, group in (("stored by each", cold), ("shared", shared))
    ]
    saved_mib = cold.held_mib - shared.held_mib
    rows.append(
        ("saved", saved_mib, None, cold.alone_s - shared.alone_s, cold.median_s - shared.median_s, SAVED_ELSEWHERE_MIB)
    )
    return Figure(
        "prefix",
        f"{sizes.num_requests} requests with {sizes.num_prefix} tokens in common and {sizes.num_own} of their own",
        COLUMNS,
        tuple(rows),
        (
            f"Held: the most bytes of blocks in use at a time; {token_bytes / 1024:.0f} KiB a token, so"
            f" {sizes.num_requests - 1} copies of the prefix are"
            f" {(sizes.num_requests - 1) * sizes.num_prefix * token_bytes / 2**20:.0f} MiB.",
        ),
        asdict(sizes),
    )


async def _run(server: Running, sizes: Sizes) -> tuple[Group, Group, float]:
    async with client(server) as http:
        prefix = await prompt_of(http, sizes.num_prefix, seed=1)
        prompts = [prefix + await prompt_of(http, sizes.num_own, seed=10 + i) for i in range(sizes.num_requests + 1)]
        cold = await _group(http, server, prompts, sizes.num_new, shares=False)
        await ask(http, server, prefix + await prompt_of(http, sizes.num_own, seed=2), 1)  # leaves the prefix behind
        shared = await _group(http, server, prompts, sizes.num_new, shares=True)
        stats = await cache_stats(http)
    return cold, shared, stats["paged_bytes_reserved"] / stats["paged_blocks_allocated"] / stats["paged_block_size"]


async def _group(
    http: httpx.AsyncClient, server: Running, prompts: list[list[int]], num_new: int, shares: bool
) -> Group:
    alone = await ask(http, server, prompts[0], 2, cache_prompt=shares)
    asks = asyncio.gather(*(ask(http, server, prompt, num_new, cache_prompt=shares) for prompt in prompts[1:]))
    held_bytes = 0
    while not asks.done():
        held_bytes = max(held_bytes, (await cache_stats(http))["paged_bytes_in_use"])
        await asyncio.sleep(0.1)
    streams = await asks
    num_cached = sum(stream.num_cached for stream in streams)
    return Group(held_bytes / 2**20, num_cached, alone.ttft_s, statistics.median(s.ttft_s for s in streams))
