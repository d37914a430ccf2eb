"""policy: one table a rule."""

from __future__ import annotations

import pytest

from app.request import FinishReason, Request, State
from app.scheduler import policy


def row(arrival: int, num_output: int, priority: int = 0) -> Request:
    tokens = [0] * (3 + num_output)
    return Request(arrival, tokens, num_prompt=3, max_tokens=100, priority=priority, arrival=arrival)


@pytest.mark.parametrize(
    ("setting", "num_decoding", "tokens"),
    [(None, 0, 2048), (None, 1, 512), (None, 9, 512), (64, 0, 64), (64, 3, 64), (4096, 1, 4096), (0, 0, 0), (0, 5, 0)],
)
def test_chunk_tokens(setting, num_decoding, tokens):
    config = policy.SchedulerConfig(prefill_chunk=setting)
    assert policy.chunk_tokens(config, num_decoding) == tokens
    assert policy.chunk_tokens(config, num_decoding, 2) == (512 if setting is None else setting)
    capped = policy.SchedulerConfig(prefill_chunk=setting, max_batch_prefill_tokens=40)
    assert policy.chunk_tokens(capped, num_decoding) == (40 if setting is None else setting)


@pytest.mark.parametrize(
    ("num_tokens", "token_s", "tokens"),
    [
        (2048, 0.0001, 2048),
        (2048, 0.002, 250),
        (0, 0.002, 250),
        (100, 0.002, 100),
        (2048, 10.0, 64),
        (2048, 0.0, 2048),
        (2048, None, 256),
        (0, None, 256),
    ],
)
def test_brief(num_tokens, token_s, tokens):
    assert policy.brief(num_tokens, token_s) == tokens


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
    ("lefts", "chunk", "room", "shares"),
    [
        ([1000], 512, 512, [512]),
        ([300, 300], 512, 512, [300, 212]),
        ([8000, 20], 512, 512, [492, 20]),
        ([8000, 8000, 20], 512, 512, [384, 108, 20]),
        ([8000, 8000], 512, 512, [384, 128]),
        ([8000, 100, 28, 5000], 512, 512, [384, 100, 28, 0]),
        ([1000, 1000, 1000], 512, None, [512, 512, 512]),
        ([8000, 8000, 8000], 2048, 4096, [2048, 2048, 0]),
        ([8000, 20], 1, 1, [1, 0]),
        ([10, 20], 512, 512, [10, 20]),
        ([], 512, 512, []),
        ([5000, 10], 0, 4096, [5000, 0]),
        ([1000, 5000, 10], 0, 4096, [1000, 0, 10]),
        ([5000, 5000], 0, None, [5000, 5000]),
    ],
)
def test_deal(lefts, chunk, room, shares):
    assert policy.deal(lefts, [0] * len(lefts), chunk, room) == shares


def test_a_lower_priority_takes_nothing_from_the_first_in_line():
    assert policy.deal([8000, 20, 20], [1, 0, 2], 512, 512) == [492, 0, 20]


@pytest.mark.parametrize(
    ("chunk", "budget_s", "decode_s", "token_s", "tokens"),
    [
        (512, 0.1, 0.05, 0.0001, 500),
        (512, 0.1, 0.05, 0.00001, 512),
        (512, 0.1, 0.05, 0.01, 0),
        (512, 0.1, 0.2, 0.0001, 0),
        (512, 0.1, 0.05, 0.0, 512),
        (8, 0.1, 0.05, 0.001, 8),
        (8, 0.1, 0.05, 0.02, 0),
    ],
)
def test_affordable_chunk(chunk, budget_s, decode_s, token_s, tokens):
    assert policy.affordable_chunk(chunk, budget_s, decode_s, token_s) == tokens


@pytest.mark.parametrize(
    ("num_held_back", "interval", "granted"), [(15, 16, False), (16, 16, True), (99, 0, False), (0, 1, False)]
)
def test_is_granted(num_held_back, interval, granted):
    assert policy.is_granted(num_held_back, interval) is granted


@pytest.mark.parametrize(("num_blocks", "num_needed", "size"), [(8, 8, 8), (8, 9, 16), (8, 33, 64), (1, 0, 1)])
def test_doubled_pool(num_blocks, num_needed, size):
    assert policy.doubled_pool(num_blocks, num_needed) == size


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


def test_waiting_makes_up_for_priority():
    def at(arrival_s, priority):
        request = row(int(arrival_s), 0, priority)
        request.arrival_s = arrival_s
        return request

    ahead, behind = at(0.0, 0), at(50.0, 1)
    assert min([ahead, behind], key=policy.place) is behind
    assert min([ahead, at(60.0, 1)], key=policy.place) is ahead
    # However high a priority, and however low: no more than twenty minutes.
    assert min([at(0.0, -(2**31)), at(1200.0, 2**31 - 1)], key=policy.place).priority < 0
    assert min([at(0.0, -(2**31)), at(1190.0, 2**31 - 1)], key=policy.place).priority > 0
    assert min([at(0.0, 2**31 - 2), at(0.0, 2**31 - 1)], key=policy.place).priority == 2**31 - 1


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


def test_reclaim_takes_a_parked_prompt_before_any_that_decodes():
    rows = [row(0, 1), row(1, 9)]
    rows[0].state, rows[1].state = State.DECODING, State.PREFILLING
    assert policy.reclaim_victim(rows).arrival == 1


def test_only_a_strictly_lower_priority_is_preempted():
    rows = [row(0, 1, priority=0), row(1, 1, priority=1), row(2, 1, priority=2)]
    assert [each.arrival for each in policy.preemptible(rows, row(3, 0, priority=1))] == [0]
    assert policy.preemptible(rows, row(3, 0, priority=0)) == []


def test_what_has_waited_long_enough_is_not_preempted():
    newcomer = row(9, 0, priority=1)
    newcomer.arrival_s = 500.0
    assert policy.preemptible([row(0, 1)], newcomer) == []


@pytest.mark.parametrize(
    ("name", "victim"),
    [("longest-first", 1), ("lowest-priority", 2)],
)
def test_preemption_policies(name, victim):
    rows = [row(0, 3, priority=0), row(1, 8, priority=1), row(2, 4, priority=0), row(3, 4, priority=1)]
    assert policy.preemption_victim(rows, name).arrival == victim


@pytest.mark.parametrize(
    ("output", "reason"),
    [
        ([5], None),
        ([5, 6], None),
        ([5, 6, 7], FinishReason.LENGTH),
        ([5, 1], FinishReason.STOP),
        ([5, 6, 1], FinishReason.STOP),
    ],
)
def test_end_reason(output, reason):
    assert policy.end_reason(Request(0, [1, 1, *output], 2, 3, end_tokens=frozenset({1}))) is reason
