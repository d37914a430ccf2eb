"""Requests sent at set moments, streamed, and timed token by token."""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import httpx

from loadtest.contestants import Running
from loadtest.stream import Stream

END_TOKENS = {"0": -100, "2": -100}
CONNECT_ATTEMPTS = 5  # the peer's listen queue holds five: of sixteen that come at once it may cut some off
WORDS = ("river", "stone", "window", "garden", "market", "engine", "letter", "winter", "bridge", "candle", "forest")


@dataclass(frozen=True)
class Ask:
    """One request: when it is sent (seconds after the start), its prompt, how many tokens it wants."""

    at_s: float
    prompt: str
    max_tokens: int


@dataclass(frozen=True)
class Outcome:
    """Seconds since its own sending, and the number of tokens that came."""

    sent_s: float
    ttft_s: float
    end_s: float
    num_tokens: int

    @property
    def itl_s(self) -> float:
        return (self.end_s - self.ttft_s) / max(self.num_tokens - 1, 1)


@dataclass(frozen=True)
class Wave:
    """What a set of requests came to: tokens/s from the first sending to the last token, and the raw outcomes."""

    tokens_per_s: float
    outcomes: tuple[Outcome, ...]

    def ttft_s(self, share: float) -> float:
        """The TTFT that ``share`` of the requests did not exceed, from the raw values."""
        return percentile([outcome.ttft_s for outcome in self.outcomes], share)

    @property
    def itl_s(self) -> float:
        return statistics.mean(outcome.itl_s for outcome in self.outcomes)


def percentile(values: Iterable[float], share: float) -> float:
    """The value that ``share`` of the values do not exceed (nearest rank)."""
    ranked = sorted(values)
    return ranked[max(math.ceil(share * len(ranked)), 1) - 1]


def equal_wave(num_requests: int, num_prompt: int, num_new: int, seed: int) -> list[Ask]:
    """Requests that come at once, with prompts of about ``num_prompt`` tokens that share no beginning."""
    source = random.Random(seed)
    return [Ask(0.0, random_words(source, num_prompt), num_new) for _ in range(num_requests)]


def mixed_wave(num_requests: int, shortest: int, longest: int, over_s: float, num_new: int, seed: int) -> list[Ask]:
    """Prompts from ``shortest`` to ``longest`` tokens in a mixed order, arriving evenly over ``over_s``."""
    source = random.Random(seed)
    step = (longest - shortest) / max(num_requests - 1, 1)
    lengths = [int(shortest + i * step) for i in range(num_requests)]
    source.shuffle(lengths)
    return [Ask(i * over_s / num_requests, random_words(source, n), num_new) for i, n in enumerate(lengths)]


def random_words(source: random.Random, num_tokens: int) -> str:
    """About one token a word."""
    return " ".join(source.choice(WORDS) for _ in range(max(num_tokens, 1)))


def run_wave(server: Running, asks: Sequence[Ask]) -> Wave:
    """Send the requests at their moments, and return when all have ended.

    Raises:
        RuntimeError: a request got anything but a whole answer: such a wave is no measurement.
    """
    return asyncio.run(_run(server, asks))


async def _run(server: Running, asks: Sequence[Ask]) -> Wave:
    limits = httpx.Limits(max_connections=len(asks))
    async with httpx.AsyncClient(base_url=server.url, timeout=1200, limits=limits) as http:
        began_s = time.perf_counter()
        outcomes = await asyncio.gather(*(_send(http, server.model, ask, began_s) for ask in asks))
        took_s = max(outcome.sent_s + outcome.end_s for outcome in outcomes)
    return Wave(sum(outcome.num_tokens for outcome in outcomes) / took_s, tuple(outcomes))


async def _send(http: httpx.AsyncClient, model: str, ask: Ask, began_s: float) -> Outcome:
    await asyncio.sleep(max(0.0, began_s + ask.at_s - time.perf_counter()))
    sent_s = time.perf_counter()
    for attempt in range(CONNECT_ATTEMPTS):
        stream = Stream()
        try:
            await stream.run(http, model, ask.prompt, ask.max_tokens, logit_bias=END_TOKENS)
            break
        except httpx.TransportError:
            if stream.moments_s or attempt + 1 == CONNECT_ATTEMPTS:
                raise
    stream.sent_s = sent_s
    return Outcome(stream.sent_s - began_s, stream.ttft_s, stream.end_s, stream.num_tokens)
