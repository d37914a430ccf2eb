"""This server for one figure: started with its settings, asked, read, and kept busy."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from loadtest.contestants import Running, ours, running
from loadtest.stream import Stream
from loadtest.waves import random_words

LIVE_PROMPT, LIVE_NEW = 64, 1500


@contextmanager
def serving(name: str, folder: Path, rows: int, **settings: str) -> Iterator[Running]:
    """A server of the embedded model with ``rows`` slots, until the block ends. Log and model stay in ``folder``."""
    with running(ours(Path("embedded"), rows, name, CACHE_DIR=str(folder), **settings), folder) as server:
        yield server


def client(server: Running) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=1200, limits=httpx.Limits())


async def prompt_of(http: httpx.AsyncClient, num_tokens: int, seed: int) -> list[int]:
    """Exactly ``num_tokens`` tokens of random words; prompts of two seeds differ from the start."""
    text = random_words(random.Random(seed), num_tokens)
    tokens: list[int] = (await http.post("/tokenize", json={"content": text})).json()["tokens"]
    return tokens[:num_tokens]


async def ask(http: httpx.AsyncClient, server: Running, prompt: Sequence[int], num_new: int, **fields: Any) -> Stream:
    """Send one request, to its end."""
    stream = Stream()
    await stream.run(http, server.model, prompt, num_new, **{"ignore_eos": True} | fields)
    return stream


async def cache_stats(http: httpx.AsyncClient) -> dict[str, Any]:
    stats: dict[str, Any] = (await http.get("/v1/cache/stats")).raise_for_status().json()
    return stats


@asynccontextmanager
async def live_streams(http: httpx.AsyncClient, server: Running, num_streams: int) -> AsyncIterator[list[Stream]]:
    """Requests that decode from the start of the block to its end, where they are cancelled.

    Raises:
        ExceptionGroup: one of them failed, or ended before.
    """
    prompts = [await prompt_of(http, LIVE_PROMPT, 100 + i) for i in range(num_streams)]
    streams = [Stream() for _ in prompts]
    async with asyncio.TaskGroup() as group:
        fields = {"ignore_eos": True, "cache_prompt": False}
        tasks = [
            group.create_task(stream.run(http, server.model, prompt, LIVE_NEW, **fields))
            for stream, prompt in zip(streams, prompts, strict=True)
        ]
        for stream in streams:
            await stream.begun.wait()
        yield streams
        if any(task.done() for task in tasks):
            raise RuntimeError("a live stream ended too early")
        for task in tasks:
            task.cancel()


def gaps_between(moments_s: Sequence[float], begin_s: float, end_s: float) -> list[float]:
    """Seconds from each moment to the next, of those gaps whose middle lies between ``begin_s`` and ``end_s``."""
    pairs = itertools.pairwise(moments_s)
    return [after - before for before, after in pairs if begin_s < (before + after) / 2 < end_s]


def totals(exposition: str, name: str) -> dict[str, int]:
    """A counter of a scrape: its values by the value of its only label, "" where it has none."""
    return {
        next(iter(sample.labels.values()), ""): int(sample.value)
        for family in text_string_to_metric_families(exposition)
        for sample in family.samples
        if sample.name == name
    }
