"""RequestQueue: by priority, then by arrival, whoever left or came back in between."""

from __future__ import annotations

import pytest

from app.request import Request
from app.scheduler.queue import RequestQueue


def request(arrival: int, priority: int = 0) -> Request:
    return Request(id=1000 - arrival, tokens=[1], num_prompt=1, max_tokens=1, priority=priority, arrival=arrival)


def drain(queue: RequestQueue) -> list[int]:
    return [queue.pop().arrival for _ in range(len(queue))]


def test_priority_then_arrival():
    queue = RequestQueue()
    for arrival, priority in enumerate((0, 1, 0, 2, 1, -1)):
        queue.push(request(arrival, priority))
    assert drain(queue) == [3, 1, 4, 0, 2, 5]


def test_a_requeued_request_gets_its_place_back():
    queue = RequestQueue()
    for arrival in range(3):
        queue.push(request(arrival))
    first = queue.pop()
    queue.push(first)
    assert queue.peek() is first
    assert drain(queue) == [0, 1, 2]


def test_peek_does_not_take():
    queue = RequestQueue()
    assert queue.peek() is None
    queue.push(request(0))
    assert queue.peek() is queue.peek()
    assert len(queue) == 1


def test_removed_requests_are_passed_over():
    queue = RequestQueue()
    requests = [request(arrival) for arrival in range(5)]
    for each in requests:
        queue.push(each)
    assert queue.remove(requests[0].id)
    assert queue.remove(requests[3].id)
    assert not queue.remove(requests[3].id)
    assert len(queue) == 3
    assert drain(queue) == [1, 2, 4]
    assert queue.peek() is None
    with pytest.raises(IndexError):
        queue.pop()


def test_a_request_waits_once():
    queue = RequestQueue()
    queue.push(request(0))
    with pytest.raises(ValueError, match="queued already"):
        queue.push(request(0))


def test_ten_thousand_removals_leave_no_dead_entries_behind():
    queue = RequestQueue()
    requests = [request(arrival, arrival % 3) for arrival in range(10_000)]
    for each in requests:
        queue.push(each)
    for each in requests[:9_990]:
        queue.remove(each.id)
    assert len(queue._heap) < 100
    assert drain(queue) == [9992, 9995, 9998, 9991, 9994, 9997, 9990, 9993, 9996, 9999]
