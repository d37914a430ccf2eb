"""How long a short request waits for its first token when it comes just behind a long one."""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from loadtest.contestants import Running
from loadtest.figures.figure import Cell, Figure
from loadtest.figures.served import ask, client, live_streams, prompt_of, serving

COLUMNS = ("short request", "TTFT s", "times alone", "TTFT s of the long one", "short came first")


@dataclass(frozen=True)
class Sizes:
    num_long: int = 8000
    num_short: int = 20
    after_s: float = 0.2
    num_streams: int = 2
    num_alone: int = 5


SMALL = Sizes(num_long=600, num_alone=2)


def measure(folder: Path, small: bool) -> Figure:
    sizes = SMALL if small else Sizes()
    with serving("behind", folder, sizes.num_streams + 2) as server:
        rows = asyncio.run(_run(server, sizes))
    return Figure(
        "behind",
        f"a prompt of {sizes.num_short} tokens, {sizes.after_s} s behind one of {sizes.num_long}",
        COLUMNS,
        rows,
        (f"Alone: median of {sizes.num_alone}.",),
        asdict(sizes),
    )


async def _run(server: Running, sizes: Sizes) -> tuple[tuple[Cell, ...], ...]:
    async with client(server) as http:
        alone_s = statistics.median([await _alone(http, server, sizes, i) for i in range(sizes.num_alone)])
        idle = await _behind(http, server, sizes, seed=20)
        async with live_streams(http, server, sizes.num_streams):
            beside_s = await _alone(http, server, sizes, 10)
            busy = await _behind(http, server, sizes, seed=30)
    return (
        ("alone", alone_s, 1.0, None, None),
        ("behind the long one", idle[0], idle[0] / alone_s, *idle[1:]),
        (f"beside {sizes.num_streams} live streams", beside_s, beside_s / alone_s, None, None),
        ("behind the long one, beside live streams", busy[0], busy[0] / alone_s, *busy[1:]),
    )


async def _alone(http: httpx.AsyncClient, server: Running, sizes: Sizes, seed: int) -> float:
    prompt = await prompt_of(http, sizes.num_short, seed)
    return (await ask(http, server, prompt, 2, cache_prompt=False)).ttft_s


async def _behind(http: httpx.AsyncClient, server: Running, sizes: Sizes, seed: int) -> tuple[float, float, str]:
    """TTFT of the short request and of the long one, and whether the short one's first token came first."""
    long, short = await prompt_of(http, sizes.num_long, seed), await prompt_of(http, sizes.num_short, seed + 1)
    first = asyncio.create_task(ask(http, server, long, 2, cache_prompt=False))
    await asyncio.sleep(sizes.after_s)
    second = await ask(http, server, short, 2, cache_prompt=False)
    ahead = await first
    return second.ttft_s, ahead.ttft_s, "yes" if second.moments_s[0] < ahead.moments_s[0] else "no"
