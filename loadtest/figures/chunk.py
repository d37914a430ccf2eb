"""What the chunk size trades: the pace of live streams against the first token of a long prompt beside them. And what
an ITL budget makes of it, which chooses the chunk by what it measures."""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path

from loadtest.contestants import Running
from loadtest.figures.figure import Cell, Figure
from loadtest.figures.served import ask, client, gaps_between, live_streams, prompt_of, serving
from loadtest.waves import percentile

# ITL p95 in ms and TTFT in s: four streams of Llama 3.2 1B in 4 bits, a prompt of 8192 tokens.
ELSEWHERE: dict[int, tuple[Cell, Cell]] = {512: (56, 4), 2048: (128, 2)}
COLUMNS = (
    *("chunk", "ITL p95 ms", "ITL mean ms", "gaps", "ITL mean ms before", "TTFT s"),
    *("Llama 1B: ITL p95 ms", "TTFT s"),
)


@dataclass(frozen=True)
class Sizes:
    chunks: tuple[int, ...] = (512, 2048)
    num_streams: int = 4
    num_prompt: int = 6000
    before_s: float = 2.0
    budget_ms: int = 400


SMALL = Sizes(chunks=(128, 512), num_streams=2, num_prompt=600)


def measure(folder: Path, small: bool) -> Figure:
    sizes = SMALL if small else Sizes()
    rows: list[tuple[Cell, ...]] = []
    for chunk in sizes.chunks:
        with serving("chunk", folder, sizes.num_streams + 1, PREFILL_CHUNK=str(chunk)) as server:
            rows.append((str(chunk), *asyncio.run(_run(server, sizes)), *ELSEWHERE.get(chunk, (None, None))))
    with serving("chunk", folder, sizes.num_streams + 1, ITL_BUDGET_MS=str(sizes.budget_ms)) as server:
        rows.append((f"budget of {sizes.budget_ms} ms", *asyncio.run(_run(server, sizes)), None, None))
    return Figure(
        "chunk",
        f"{sizes.num_streams} live streams while a prompt of {sizes.num_prompt} tokens is admitted",
        COLUMNS,
        tuple(rows),
        ("ITL of the live streams from the sending of the prompt to its first token: one gap a stream and tick.",),
        asdict(sizes),
    )


async def _run(server: Running, sizes: Sizes) -> tuple[Cell, ...]:
    async with client(server) as http:
        prompt = await prompt_of(http, sizes.num_prompt, seed=1)
        async with live_streams(http, server, sizes.num_streams) as streams:
            await asyncio.sleep(sizes.before_s)
            admitted = await ask(http, server, prompt, 1)
    begin_s, end_s = admitted.sent_s, admitted.sent_s + admitted.ttft_s
    before_ms = [gap * 1000 for stream in streams for gap in gaps_between(stream.moments_s, 0.0, begin_s)]
    during_ms = [gap * 1000 for stream in streams for gap in gaps_between(stream.moments_s, begin_s, end_s)]
    return (
        percentile(during_ms, 0.95),
        statistics.mean(during_ms),
        len(during_ms),
        statistics.mean(before_ms),
        admitted.ttft_s,
    )
