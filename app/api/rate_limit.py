"""How much one key may ask for in a minute: token buckets, for requests and for tokens."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from app.errors import RateLimited

MINUTE_S = 60.0
MAX_BUCKETS = 1024


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


class RateLimits:
    """Both limits; None is no limit. ``key`` is the API key, or empty where no key is asked for."""

    def __init__(self, requests: int | None, tokens: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._requests = None if requests is None else _Buckets(requests, "requests", clock)
        self._tokens = None if tokens is None else _Buckets(tokens, "tokens", clock)

    def take_request(self, key: bytes) -> None:
        """Count one request. Raises RateLimited."""
        if self._requests:
            self._requests.take(key, 1)

    def reservation(self, key: bytes) -> Reservation:
        """What one request of ``key`` will set aside of its tokens: nothing yet."""
        return Reservation(self._tokens, key)


class Reservation:
    """Tokens set aside for one request when it is admitted, and settled when it has ended."""

    def __init__(self, buckets: _Buckets | None, key: bytes) -> None:
        self._buckets = buckets
        self._key = key
        self._taken = 0.0

    def take(self, num_tokens: int) -> None:
        """Set aside the most that the request can use. One that asks for more than a minute's worth needs a full
        bucket, and pays what it really used beyond that as a debt. Raises RateLimited."""
        if self._buckets:
            self._taken = self._buckets.take(self._key, num_tokens)

    def settle(self, num_used: int) -> None:
        """Put back what was not used. To be called once."""
        if self._buckets:
            self._buckets.give(self._key, self._taken - num_used)
