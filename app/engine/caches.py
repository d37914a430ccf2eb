"""What the layers of a model keep of a request, in mlx-lm's own caches."""

from __future__ import annotations

import copy
import resource
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from app.engine.storage import LayerShape


@contextmanager
def file_limit_kept() -> Iterator[None]:
    """Importing mlx_lm lowers RLIMIT_NOFILE to (2048, 4096) for good: too few files for a server with many clients."""
    set_limit = resource.setrlimit
    resource.setrlimit = lambda *_: None
    try:
        yield
    finally:
        resource.setrlimit = set_limit


with file_limit_kept():
    from mlx_lm.models.cache import ArraysCache, KVCache, RotatingKVCache, make_prompt_cache


@dataclass(frozen=True, slots=True)
class Kept:
    """``shapes`` is what each layer keeps of one token, empty where any keeps something else than keys and values.
    ``bytes_per_token`` grow with a request and ``bytes_besides`` do not. ``names`` are the kinds of caches."""

    names: tuple[str, ...]
    shapes: tuple[LayerShape, ...]
    bytes_per_token: int
    bytes_besides: int = 0


def empty_caches(model: nn.Module) -> list[Any]:
    """The caches of a request of which nothing has been read, one a layer."""
    return list(make_prompt_cache(model))


def look(model: nn.Module) -> Kept:
    """Look at what each layer's cache is and what it would hold after one token. Nothing is computed.

    A rotating cache drops what lies behind a sliding window. In blocks it is kept, and attention does not look there.
    Raises whatever the model raises if it cannot read a token.
    """
    caches = empty_caches(model)
    model(mx.array([[0]]), cache=caches)
    names = tuple(sorted({type(cache).__name__ for cache in caches}))
    if all(map(_holds_keys_and_values, caches)):
        shapes = tuple(map(_shape, caches))
        return Kept(names, shapes, sum(shape.bytes_per_token for shape in shapes))
    sums = [_bytes(cache) for cache in caches]
    return Kept(names, (), max(sum(grows for grows, _ in sums), 1), sum(stays for _, stays in sums))


def form(caches: Iterable[Any]) -> tuple[Any, ...]:
    """The shapes of what has no place for every token, without the row. Only caches of one form can be merged: what is
    as long as the context up to some length, as the last tokens of an n-gram are, has another at the beginning."""
    arrays = [array for cache in _leaves(caches) if isinstance(cache, ArraysCache) for array in cache.cache]
    return tuple(None if array is None else array.shape[1:] for array in arrays)


def copied(caches: list[Any]) -> list[Any]:
    """A copy that shares nothing larger than itself: a state may be a slice of all that was computed with it."""
    copies = copy.deepcopy(caches)
    for cache in _leaves(copies):
        if isinstance(cache, ArraysCache):
            cache.cache = [None if array is None else mx.contiguous(array) for array in cache.cache]
            mx.eval([array for array in cache.cache if array is not None])
    return copies


def _leaves(caches: Iterable[Any]) -> Iterator[Any]:
    for cache in caches:
        yield from _leaves(cache.caches) if hasattr(cache, "caches") else (cache,)


def _holds_keys_and_values(cache: Any) -> bool:
    return type(cache) is KVCache or (type(cache) is RotatingKVCache and cache.keep == 0)


def _shape(cache: Any) -> LayerShape:
    return LayerShape(
        num_heads=cache.keys.shape[1],
        key_dim=cache.keys.shape[3],
        value_dim=cache.values.shape[3],
        dtype=cache.keys.dtype,
        window=cache.max_size if type(cache) is RotatingKVCache else None,
    )


def _bytes(cache: Any) -> tuple[int, int]:
    """What a cache that has read one token takes for each token, and what it takes besides."""
    if hasattr(cache, "caches"):
        sums = [_bytes(part) for part in cache.caches]
        return sum(grows for grows, _ in sums), sum(stays for _, stays in sums)
    if isinstance(cache, ArraysCache):
        return 0, cache.nbytes
    if getattr(cache, "keys", None) is None:
        return cache.nbytes, 0
    # Room for keys and values is made in steps of many tokens.
    num_bytes = (cache.keys.nbytes + cache.values.nbytes) // cache.keys.shape[2]
    return (0, num_bytes * cache.max_size) if isinstance(cache, RotatingKVCache) else (num_bytes, 0)
