"""policy: one table a rule."""

from __future__ import annotations

import pytest

from app.request import Request
from app.scheduler import policy


def row(arrival: int, num_output: int, priority: int = 0) -> Request:
    tokens = [0] * (3 + num_output)
    return Request(arrival, tokens, num_prompt=3, max_tokens=100, priority=priority, arrival=arrival)


@pytest.mark.parametrize(
    ("setting", "num_decoding", "tokens"),
    [(None, 0, 2048), (None, 1, 512), (None, 9, 512), (64, 0, 64), (64, 3, 64), (4096, 1, 4096), (0, 0, 0), (0, 5, 0)],
)
def test_chunk_tokens(setting, num_decoding, tokens):
    assert policy.chunk_tokens(setting, num_decoding) == tokens


@pytest.mark.parametrize(
    ("setting", "max_batch_prefill", "chunk_setting", "tokens"),
    [
        (None, 4, None, 4096),
        (None, 4, 2048, 4096),
        (None, 4, 100, 800),
        (None, 1, 512, 1024),
        (None, 2, 0, 2048),
        (0, 4, None, 0),
        (7, 4, 512, 7),
    ],
)
def test_max_prefill_tokens(setting, max_batch_prefill, chunk_setting, tokens):
    assert policy.max_prefill_tokens(setting, max_batch_prefill, chunk_setting) == tokens


@pytest.mark.parametrize(
    ("chunk", "max_tokens", "num_decoding", "room"),
    [
        (2048, 4096, 0, 4096),
        (512, 4096, 2, 512),
        (512, 100, 0, 512),
        (512, 0, 0, None),
        (512, 0, 1, 512),
        (0, 4096, 0, 4096),
        (0, 4096, 3, 4096),
        (0, 0, 3, None),
    ],
)
def test_prefill_room(chunk, max_tokens, num_decoding, room):
    assert policy.prefill_room(chunk, max_tokens, num_decoding) == room


@pytest.mark.parametrize(
    ("num_left", "chunk", "room", "is_first", "share"),
    [
        (1000, 512, 512, True, 512),
        (1000, 512, 100, False, 100),
        (10, 512, 100, False, 10),
        (10, 512, 0, False, 0),
        (1000, 512, None, False, 512),
        (1000, 0, 4096, False, 1000),
        (5000, 0, 4096, False, 0),
        (5000, 0, 4096, True, 5000),
        (5000, 0, None, False, 5000),
    ],
)
def test_prefill_share(num_left, chunk, room, is_first, share):
    assert policy.prefill_share(num_left, chunk, room, is_first) == share


@pytest.mark.parametrize(
    ("num_needed", "num_free", "num_blocks", "watermark", "num_decoding", "admitted"),
    [
        (10, 10, 100, 0.0, 1, True),
        (11, 10, 100, 0.0, 1, False),
        (9, 10, 100, 0.01, 1, True),
        (10, 10, 100, 0.01, 1, False),
        (10, 10, 100, 0.01, 0, True),
        (100, 100, 100, 0.5, 0, True),
        (8, 8, 8, 0.01, 1, False),
        (0, 0, 8, 0.0, 1, True),
    ],
)
def test_may_admit(num_needed, num_free, num_blocks, watermark, num_decoding, admitted):
    assert policy.may_admit(num_needed, num_free, num_blocks, watermark, num_decoding) is admitted


def test_place_is_by_priority_then_arrival():
    rows = [row(0, 0), row(1, 5, priority=2), row(2, 0, priority=2), row(3, 9, priority=-1)]
    assert [each.arrival for each in sorted(rows, key=policy.place)] == [1, 2, 0, 3]


@pytest.mark.parametrize(
    ("rows", "victim"),
    [
        ([row(0, 5), row(1, 2), row(2, 9)], 1),
        ([row(0, 2), row(1, 2), row(2, 2)], 2),
        ([row(0, 9), row(1, 0, priority=9)], 1),
        ([row(4, 7)], 4),
    ],
)
def test_reclaim_takes_the_least_progressed_and_the_latest_of_equals(rows, victim):
    assert policy.reclaim_victim(rows).arrival == victim


def test_only_a_strictly_lower_priority_is_preempted():
    rows = [row(0, 1, priority=0), row(1, 1, priority=1), row(2, 1, priority=2)]
    assert [each.arrival for each in policy.preemptible(rows, 1)] == [0]
    assert policy.preemptible(rows, 0) == []


@pytest.mark.parametrize(
    ("name", "victim"),
    [("longest-first", 1), ("lowest-priority", 2)],
)
def test_preemption_policies(name, victim):
    rows = [row(0, 3, priority=0), row(1, 8, priority=1), row(2, 4, priority=0), row(3, 4, priority=1)]
    assert policy.preemption_victim(rows, name).arrival == victim
