"""Block-table attention of one-token rows, against gathering each row's blocks into one padded context first."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from app.engine.blas import preload
from app.request import SamplingParams
from app.scheduler.plan import Row
from loadtest.figures.figure import Cell, Figure

if TYPE_CHECKING:
    import mlx.core as mx

    from app.engine.storage import LayerPool

QUERY_HEADS, HEADS, DIM = 9, 3, 64  # of the embedded model
ELSEWHERE: dict[int, float] = {512: 1.9, 4096: 10.9}  # Qwen3 0.6B on an M1 Ultra, batch of 4
COLUMNS = ("tokens a row", "block table ms", "gather ms", "gather / block table", "M1 Ultra 0.6B")


@dataclass(frozen=True)
class Sizes:
    lengths: tuple[int, ...] = (512, 4096)
    num_rows: int = 4
    num_layers: int = 8
    rounds: int = 15


SMALL = Sizes(num_layers=2, rounds=3)


def measure(folder: Path, small: bool) -> Figure:
    preload("auto", "auto")
    sizes = SMALL if small else Sizes()
    rows = tuple(_measure(length, sizes) for length in sizes.lengths)
    return Figure(
        "attention",
        f"ms a layer, {sizes.num_rows} rows, {QUERY_HEADS} heads over {HEADS} of {DIM}",
        COLUMNS,
        rows,
        (
            f"Medians of {sizes.rounds} passes through {sizes.num_layers} layers, each with a pool of its own, the"
            " arrays that all layers share included; both ways in turn, same result.",
        ),
        asdict(sizes),
    )


def _measure(length: int, sizes: Sizes) -> tuple[Cell, ...]:
    import mlx.core as mx

    from app.engine.attention import Geometry, layer_caches
    from app.engine.groups import one_group
    from app.engine.kernels import on_cpu
    from app.engine.storage import LayerShape, PagedStorage

    dtype, size = (mx.float32, 64) if on_cpu() else (mx.float16, 32)
    num_blocks = sizes.num_rows * -(-length // size)
    storage = PagedStorage([LayerShape(HEADS, DIM, DIM, dtype)] * sizes.num_layers, num_blocks, size)
    for pool in storage.pools:
        pool.keys, pool.values = (mx.random.normal(pool.keys.shape).astype(dtype) for _ in range(2))
    blocks = random.Random(0).sample(range(num_blocks), num_blocks)
    rows = [_row(i, length, blocks[i :: sizes.num_rows]) for i in range(sizes.num_rows)]
    queries = mx.random.normal((sizes.num_rows, QUERY_HEADS, 1, DIM)).astype(dtype)
    mx.eval(queries, *storage.arrays())

    def by_table() -> mx.array:
        out = queries
        for cache in layer_caches(
            one_group([pool.shape for pool in storage.pools]).places, storage, Geometry(rows, size)
        ):
            out = cache.attend(out, DIM**-0.5)
        return out

    def by_gather() -> mx.array:
        return _gathered(queries, storage.pools, rows)

    assert mx.allclose(by_table(), by_gather(), rtol=1e-2, atol=1e-3), "the two ways differ"
    table_ms, gather_ms = _alternate((by_table, by_gather), sizes)
    return length, table_ms, gather_ms, gather_ms / table_ms, ELSEWHERE.get(length)


def _row(request_id: int, length: int, blocks: Sequence[int]) -> Row:
    """A row that decodes the last of ``length`` tokens."""
    return Row(request_id, [0] * length, length - 1, 1, blocks, True, 1, SamplingParams())


def _gathered(queries: mx.array, pools: Sequence[LayerPool], rows: Sequence[Row]) -> mx.array:
    """The reference: K and V are copied to ``[R, heads, context, dim]``, and what lies behind a row's end masked."""
    import mlx.core as mx

    out = queries
    table = mx.array([list(row.blocks) for row in rows])
    context = mx.arange(table.shape[1] * pools[0].block_size)
    seen = (context < mx.array([[row.start + 1] for row in rows]))[:, None, None]
    for pool in pools:
        keys, values = (
            tiles.reshape(-1, HEADS, pool.block_size, DIM)[table].swapaxes(1, 2).reshape(len(rows), HEADS, -1, DIM)
            for tiles in pool.tiles()
        )
        out = mx.fast.scaled_dot_product_attention(out, keys, values, scale=DIM**-0.5, mask=seen)
    return out


def _alternate(ways: Sequence[Callable[[], mx.array]], sizes: Sizes) -> list[float]:
    """Median milliseconds a layer of each way, taken in turn after a pass that warms up."""
    import mlx.core as mx

    taken_ms: list[list[float]] = [[] for _ in ways]
    for _ in range(1 + sizes.rounds):
        for way, times in zip(ways, taken_ms, strict=True):
            began_s = time.perf_counter()
            mx.eval(way())
            times.append((time.perf_counter() - began_s) * 1000 / sizes.num_layers)
    return [statistics.median(times[1:]) for times in taken_ms]
