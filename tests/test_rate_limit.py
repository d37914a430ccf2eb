"""Token buckets: a minute's worth at once, filled by time, one a key, settled with what was really used."""

from __future__ import annotations

import pytest

from app.api import rate_limit
from app.api.rate_limit import RateLimits
from app.errors import RateLimited


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def wait_s(limits: RateLimits, key: bytes, num_tokens: int) -> float:
    """For how long a reservation is refused; 0: it is taken."""
    try:
        limits.reservation(key).take(num_tokens)
    except RateLimited as error:
        return error.retry_after_s
    return 0.0


def test_requests_a_minute(clock: Clock) -> None:
    limits = RateLimits(3, None, clock)
    for _ in range(3):
        limits.take_request(b"a")
    with pytest.raises(RateLimited, match="3 requests a minute") as refused:
        limits.take_request(b"a")
    assert refused.value.retry_after_s == pytest.approx(20.0)
    limits.take_request(b"b")
    clock.now_s += 20.001
    limits.take_request(b"a")
    with pytest.raises(RateLimited):
        limits.take_request(b"a")


def test_a_long_rest_saves_up_one_minute_at_most(clock: Clock) -> None:
    limits = RateLimits(2, None, clock)
    clock.now_s += 86400
    limits.take_request(b"a")
    limits.take_request(b"a")
    with pytest.raises(RateLimited):
        limits.take_request(b"a")


def test_no_limit_is_no_limit() -> None:
    limits = RateLimits(None, None)
    for _ in range(1000):
        limits.take_request(b"")
        limits.reservation(b"").take(10**9)
    limits.reservation(b"").settle(5)


def test_tokens_are_reserved_and_settled(clock: Clock) -> None:
    limits = RateLimits(None, 600, clock)
    first = limits.reservation(b"a")
    first.take(500)
    assert wait_s(limits, b"a", 200) == pytest.approx(10.0)
    first.settle(100)
    assert wait_s(limits, b"a", 500) == 0.0
    assert wait_s(limits, b"a", 1) == pytest.approx(0.1)


def test_what_was_refused_gives_back_nothing_that_it_had_not_taken(clock: Clock) -> None:
    limits = RateLimits(None, 600, clock)
    limits.reservation(b"a").take(600)
    refused = limits.reservation(b"a")
    with pytest.raises(RateLimited):
        refused.take(100)
    refused.settle(0)
    assert wait_s(limits, b"a", 100) == pytest.approx(10.0)


def test_more_than_a_minutes_worth_needs_a_full_bucket_and_leaves_a_debt(clock: Clock) -> None:
    limits = RateLimits(None, 600, clock)
    large = limits.reservation(b"a")
    large.take(5000)
    large.settle(1800)
    assert wait_s(limits, b"a", 1) == pytest.approx((1200 + 1) / 10)
    clock.now_s += 180
    assert wait_s(limits, b"a", 5000) == 0.0


def test_only_so_many_requests_of_a_key_are_under_way_at_once() -> None:
    limits = RateLimits(None, None, concurrent=2)
    first, second = limits.reservation(b"a"), limits.reservation(b"a")
    with pytest.raises(RateLimited, match="2 requests at once") as refused:
        limits.reservation(b"a")
    assert refused.value.retry_after_s > 0
    limits.reservation(b"b").settle(0)
    first.settle(0)
    limits.reservation(b"a").settle(0)
    second.settle(5)
    assert not limits._under_way


def test_the_headers_tell_what_is_left_and_when_all_of_it_is_back(clock: Clock) -> None:
    limits = RateLimits(4, 600, clock)
    limits.take_request(b"a")
    limits.reservation(b"a").take(450)
    assert limits.headers(b"a") == {
        "x-ratelimit-limit-requests": "4",
        "x-ratelimit-remaining-requests": "3",
        "x-ratelimit-reset-requests": "15s",
        "x-ratelimit-limit-tokens": "600",
        "x-ratelimit-remaining-tokens": "150",
        "x-ratelimit-reset-tokens": "45s",
    }
    assert tuple(limits.headers(b"a")) == rate_limit.LIMIT_HEADERS
    clock.now_s += 14.8765
    assert limits.headers(b"a")["x-ratelimit-reset-requests"] == "124ms"
    assert limits.headers(b"b")["x-ratelimit-reset-tokens"] == "0ms"
    assert RateLimits(None, 5, clock).headers(b"a").keys() == set(rate_limit.LIMIT_HEADERS[3:])
    assert RateLimits(None, None).headers(b"a") == {}


def test_the_headers_of_a_debt(clock: Clock) -> None:
    limits = RateLimits(None, 600, clock)
    limits.reservation(b"a").take(600)
    large = limits.reservation(b"b")
    large.take(600)
    large.settle(1205)
    headers = limits.headers(b"b")
    assert headers["x-ratelimit-remaining-tokens"] == "0"
    assert headers["x-ratelimit-reset-tokens"] == "2m0.5s"


def test_buckets_do_not_pile_up(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys come and go with their file; a bucket that has filled up again is forgotten, one in use is not."""
    monkeypatch.setattr(rate_limit, "MAX_BUCKETS", 8)
    limits = RateLimits(10, None, clock)
    assert limits._requests is not None
    for i in range(8):
        limits.take_request(b"old %d" % i)
    clock.now_s += 30
    for _ in range(10):
        limits.take_request(b"busy")
    assert len(limits._requests._of) <= 8
    with pytest.raises(RateLimited):
        limits.take_request(b"busy")
