"""What requests keep between two steps where that is not keys and values in blocks: mlx-lm's own caches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, TypeAlias

import mlx.core as mx
from mlx.utils import tree_flatten

from app.engine.caches import form

Caches: TypeAlias = list[Any]  # one a layer


def arrays(caches: Caches) -> list[mx.array]:
    """Everything that these caches hold."""
    return [leaf for cache in caches for _, leaf in tree_flatten(cache.state) if isinstance(leaf, mx.array)]


class States:
    """The caches of each request: its own while its prompt is read, then a row of those that all who decode share.

    mlx-lm's caches merge, take others in, let rows go and give single ones back; each row's numbers stay its own.
    """

    def __init__(self, make: Callable[[], Caches]) -> None:
        """``make`` gives the caches of a request of which nothing has been read."""
        self._make = make
        self._apart: dict[int, Caches] = {}
        self._members: list[int] = []
        self._shared: Caches = []

    def begin(self, request_id: int, caches: Caches | None = None) -> None:
        """Give a request ``caches`` of its own, fresh ones if there are none, whatever it had."""
        self.forget([request_id])
        self._apart[request_id] = caches or self._make()

    def apart(self, request_id: int) -> Caches:
        """The caches of one request alone, taken out of the shared ones if they lie there. Raises KeyError."""
        if request_id in self._members:
            self._keep([member for member in self._members if member != request_id])
        return self._apart[request_id]

    def is_apart(self, request_id: int) -> bool:
        return request_id in self._apart

    def joinable(self, request_ids: Sequence[int]) -> list[int]:
        """Those whose caches can be held together, with those that are so already if there are any."""
        forms = {request_id: form(self._apart[request_id]) for request_id in request_ids if request_id in self._apart}
        if not forms:
            return list(request_ids)
        known = [*map(form, [self._shared] if self._shared else ()), *forms.values()]
        return [request_id for request_id in request_ids if forms.get(request_id, known[0]) == known[0]]

    def together(self, request_ids: Sequence[int]) -> tuple[Sequence[int], Caches]:
        """Caches that hold exactly these requests, and which row is whose. Raises KeyError."""
        self._keep([member for member in self._members if member in request_ids])
        joining = [request_id for request_id in request_ids if request_id not in self._members]
        if joining:
            layers = zip(*(self._apart[request_id] for request_id in joining), strict=True)
            merged = [layer[0].merge(list(layer)) for layer in layers]
            for mine, theirs in zip(self._shared, merged, strict=True) if self._shared else ():
                mine.extend(theirs)
            self._shared = self._shared or merged
            self._members += joining
            for request_id in joining:
                del self._apart[request_id]
        return self._members, self._shared

    def forget(self, request_ids: Iterable[int]) -> None:
        """Free what these requests hold. Those that hold nothing are passed over."""
        gone = set(request_ids)
        if gone.intersection(self._members):
            self._keep([member for member in self._members if member not in gone], gone)
        for request_id in gone:
            self._apart.pop(request_id, None)

    def clear(self) -> None:
        """Free everything."""
        self._apart, self._members, self._shared = {}, [], []

    def arrays(self) -> list[mx.array]:
        """Everything that is held."""
        return [array for caches in (self._shared, *self._apart.values()) for array in arrays(caches)]

    def _keep(self, members: list[int], gone: Collection[int] = ()) -> None:
        """Leave only these in the shared caches; the others get theirs back, but for those that are ``gone``."""
        if members == self._members:
            return
        for row, member in enumerate(self._members):
            if member not in members and member not in gone:
                self._apart[member] = [layer.extract(row) for layer in self._shared]
        if members:
            rows = [self._members.index(member) for member in members]
            for layer in self._shared:
                layer.filter(rows)
        else:
            self._shared = []
        self._members = members
