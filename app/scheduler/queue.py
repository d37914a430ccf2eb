"""Who waits, and who is next."""

from __future__ import annotations

import heapq

from app.request import Request
from app.scheduler import policy


class RequestQueue:
    """Waiting requests in the order of ``policy.place``. A requeued request so gets its old place back.

    Removal leaves a dead entry in the heap; dead entries are swept once they outnumber the living.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int, int], int]] = []
        self._waiting: dict[int, Request] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def push(self, request: Request) -> None:
        """Add a request. Raises ValueError if it waits already."""
        if request.id in self._waiting:
            raise ValueError(f"request {request.id} is queued already")
        self._waiting[request.id] = request
        heapq.heappush(self._heap, (policy.place(request), request.id))

    def peek(self) -> Request | None:
        """The next request, or None if nobody waits."""
        while self._heap:
            request = self._waiting.get(self._heap[0][1])
            if request is not None:
                return request
            heapq.heappop(self._heap)
        return None

    def pop(self) -> Request:
        """Take the next request. Raises IndexError if nobody waits."""
        request = self.peek()
        if request is None:
            raise IndexError("the queue is empty")
        heapq.heappop(self._heap)
        del self._waiting[request.id]
        return request

    def remove(self, request_id: int) -> bool:
        """Take out one request, wherever it stands; says whether it was there."""
        if self._waiting.pop(request_id, None) is None:
            return False
        if len(self._heap) > 2 * len(self._waiting) + 16:
            self._heap = [entry for entry in self._heap if entry[1] in self._waiting]
            heapq.heapify(self._heap)
        return True
