"""How much one key may ask for: token buckets for requests and tokens a minute, and a count of what is under way."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from app.errors import RateLimited

MINUTE_S = 60.0
MAX_BUCKETS = 1024
LIMIT_HEADERS = tuple(
    f"x-ratelimit-{figure}-{what}" for what in ("requests", "tokens") for figure in ("limit", "remaining", "reset")
)
# When a request of the same key ends cannot be told.
CONCURRENT_RETRY_S = 1.0


@dataclass(slots=True)
class _Bucket:
    """``level`` is what was left at ``at_s``; below zero it is a debt that time pays off."""

    level: float
    at_s: float


class _Buckets:
    """One bucket for each key, full at first. It holds a minute's worth, and a minute fills it."""

    def __init__(self, per_minute: int, what: str, clock: Callable[[], float]) -> None:
        self.per_minute = per_minute
        self._what = what
        self._clock = clock
        self._of: dict[bytes, _Bucket] = {}

    def take(self, key: bytes, amount: float) -> float:
        """Take ``amount``, at most a whole bucket; returns what was taken.

        Raises:
            RateLimited: it is not there yet.
        """
        amount = min(amount, self.per_minute)
        bucket = self._at_present(key)
        missing = amount - bucket.level
        if missing > 0:
            raise RateLimited(f"{self.per_minute} {self._what} a minute", missing * MINUTE_S / self.per_minute)
        bucket.level -= amount
        return amount

    def give(self, key: bytes, amount: float) -> None:
        """Put ``amount`` back; a negative one takes more, whether it is there or not."""
        bucket = self._at_present(key)
        bucket.level = min(self.per_minute, bucket.level + amount)

    def headers(self, key: bytes) -> dict[str, str]:
        """OpenAI's headers: the limit, what is left of it, and how long until it is whole again."""
        level = self._at_present(key).level
        reset_s = (self.per_minute - level) * MINUTE_S / self.per_minute
        return {
            f"x-ratelimit-limit-{self._what}": str(self.per_minute),
            f"x-ratelimit-remaining-{self._what}": str(max(0, math.floor(level))),
            f"x-ratelimit-reset-{self._what}": _duration(reset_s),
        }

    def _at_present(self, key: bytes) -> _Bucket:
        now_s = self._clock()
        bucket = self._of.get(key)
        if bucket is None:
            if len(self._of) >= MAX_BUCKETS:
                # A full bucket says nothing that a missing one does not.
                self._of = {key: one for key, one in self._of.items() if self._level(one, now_s) < self.per_minute}
            bucket = self._of[key] = _Bucket(self.per_minute, now_s)
        bucket.level, bucket.at_s = self._level(bucket, now_s), now_s
        return bucket

    def _level(self, bucket: _Bucket, now_s: float) -> float:
        return min(self.per_minute, bucket.level + (now_s - bucket.at_s) * self.per_minute / MINUTE_S)


def _duration(seconds: float) -> str:
    """As OpenAI writes it: ``120ms``, ``7.66s``, ``6m0s``."""
    ms = math.ceil(seconds * 1000)
    minutes, rest = divmod(ms, 60_000)
    if minutes:
        return f"{minutes}m{rest / 1000:g}s"
    return f"{ms}ms" if ms < 1000 else f"{ms / 1000:g}s"


class RateLimits:
    """The limits; None is no limit. ``key`` is the API key, or empty where no key is asked for. ``concurrent`` is of
    requests under way at once."""

    def __init__(
        self,
        requests: int | None,
        tokens: int | None,
        clock: Callable[[], float] = time.monotonic,
        concurrent: int | None = None,
    ) -> None:
        self._requests = None if requests is None else _Buckets(requests, "requests", clock)
        self._tokens = None if tokens is None else _Buckets(tokens, "tokens", clock)
        self._concurrent = concurrent
        self._under_way: Counter[bytes] = Counter()

    def take_request(self, key: bytes) -> None:
        """Count one request. Raises RateLimited, also where as many as allowed are under way: then none is counted."""
        self._check_concurrent(key)
        if self._requests:
            self._requests.take(key, 1)

    def reservation(self, key: bytes) -> Reservation:
        """One request of ``key`` under way, which has set no tokens aside yet. Raises RateLimited."""
        self._check_concurrent(key)
        self._under_way[key] += 1
        return Reservation(self._tokens, key, self._ended)

    def headers(self, key: bytes) -> dict[str, str]:
        """The state of the limits a minute, for the client to see."""
        requests = self._requests.headers(key) if self._requests else {}
        return requests | (self._tokens.headers(key) if self._tokens else {})

    def _check_concurrent(self, key: bytes) -> None:
        if self._concurrent is not None and self._under_way[key] >= self._concurrent:
            raise RateLimited(f"{self._concurrent} requests at once", CONCURRENT_RETRY_S)

    def _ended(self, key: bytes) -> None:
        self._under_way[key] -= 1
        if not self._under_way[key]:
            del self._under_way[key]


class Reservation:
    """The place of one request among those under way, and the tokens that are set aside for it when it is admitted.
    Both are given back when it has ended."""

    def __init__(self, buckets: _Buckets | None, key: bytes, ended: Callable[[bytes], None]) -> None:
        self._buckets = buckets
        self._key = key
        self._ended = ended
        self._taken = 0.0

    def take(self, num_tokens: int) -> None:
        """Set aside the most that the request can use. One that asks for more than a minute's worth needs a full
        bucket, and pays what it really used beyond that as a debt. Raises RateLimited."""
        if self._buckets:
            self._taken = self._buckets.take(self._key, num_tokens)

    def settle(self, num_used: int) -> None:
        """Put back what was not used, and the place. To be called once."""
        self._ended(self._key)
        if self._buckets:
            self._buckets.give(self._key, self._taken - num_used)
