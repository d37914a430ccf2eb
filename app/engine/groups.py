"""Which layers keep their tokens in the same blocks, and in which pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from app.engine.storage import LayerShape
from app.scheduler.plan import Row

MOST_WASTED = 0.1


class Place(NamedTuple):
    """Where a layer keeps its tokens: in ``pool``, in the blocks of ``group``, of which the last ``kept`` tokens are
    there for certain; None: all. It looks back ``window`` tokens, if the model does not say otherwise."""

    pool: int
    group: int = 0
    window: int | None = None
    kept: int | None = None


@dataclass(frozen=True, slots=True)
class Groups:
    """``pools`` has one shape for each layer of a group, ``places`` one entry for each layer of the model. ``windows``
    has one for each group: how many tokens back its layers look; None: all, or what lies behind is kept all the same.
    A row has the blocks of the same tokens side by side, one a group."""

    pools: tuple[LayerShape, ...]
    places: tuple[Place, ...]
    windows: tuple[int | None, ...] = (None,)

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    @property
    def gives_back(self) -> bool:
        return any(self.windows)

    @property
    def bytes_per_token(self) -> int:
        """All groups together, with what a group has too few layers for."""
        return self.num_groups * sum(shape.bytes_per_token for shape in self.pools)

    def spread(self, row: Row) -> Row:
        """A row with a block of each group in place of each of its blocks."""
        num_groups = self.num_groups
        return row._replace(blocks=[block * num_groups + k for block in row.blocks for k in range(num_groups)])


def one_group(shapes: Sequence[LayerShape]) -> Groups:
    """Every layer has a pool of its own, and all share block ids. Nothing is given back while a request runs."""
    return Groups(tuple(shapes), tuple(Place(i, window=shape.window) for i, shape in enumerate(shapes)))


def grouped(shapes: Sequence[LayerShape], longest: int) -> Groups:
    """Groups of equally many layers that are alike, so that a block of any group takes the same memory. Layers whose
    window is less than half of ``longest``, the longest context, are in groups that give back what lies behind.

    A group has as many layers as there are of the rarer kind, as in the hybrid KV cache manager of vLLM, or fewer,
    where more than ``MOST_WASTED`` of the memory would be that of layers which the last group of a kind does not have.
    One group, where no layer has such a window, or not all keep the same of a token.
    """
    sliding = [i for i, shape in enumerate(shapes) if shape.window is not None and 2 * shape.window < longest]
    full = [i for i in range(len(shapes)) if i not in sliding]
    if not sliding or len({replace(shape, window=None) for shape in shapes}) > 1:
        return one_group(shapes)
    most = min(len(sliding), len(full)) or len(sliding)
    padded = {size: sum(-(-len(kind) // size) * size for kind in (full, sliding)) for size in range(most, 0, -1)}
    size = next(size for size, num_layers in padded.items() if num_layers <= (1 + MOST_WASTED) * len(shapes))
    parts = [kind[first : first + size] for kind in (full, sliding) for first in range(0, len(kind), size)]
    kept = max(shapes[i].window or 0 for i in sliding) + 1  # a mask may see a token more than the cache has (plamo3)
    windows = tuple(kept if part[0] in sliding else None for part in parts)
    at = {layer: (pool, group) for group, part in enumerate(parts) for pool, layer in enumerate(part)}
    places = [Place(*at[i], shape.window, kept if i in sliding else None) for i, shape in enumerate(shapes)]
    return Groups((replace(shapes[0], window=None),) * size, tuple(places), windows)
