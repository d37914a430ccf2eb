"""Huge pages for what every step reads: weights and block pool, on Linux with a CPU that computes.

A step reads each weight once, half a gigabyte and more, and with pages of 4 KiB the processor's table of addresses does
not hold a hundredth of them: a step of 8 rows takes a tenth longer (docs/benchmarks.md). Nothing depends on it: where
the kernel does not give such pages, the small ones stay.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import mlx.core as mx
import numpy as np

HUGE_BYTES = 2 << 20
MADV_HUGEPAGE, MADV_COLLAPSE = 14, 25  # linux/mman.h; the second is there from Linux 6.1 on
GAP_BYTES = 1 << 16  # what an allocator may leave between two arrays that lie in one stretch of memory
SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def use_huge_pages(arrays: Iterable[mx.array]) -> None:
    """Have evaluated arrays moved to huge pages, in a thread of its own: half a gigabyte takes a second.

    An array that is freed meanwhile is no harm: the advice then meets nothing, or what does not mind it.
    """
    if sys.platform == "linux" and _allowed():
        stretches = list(_stretches(arrays))
        threading.Thread(target=_collapse, args=(stretches,), name="huge-pages", daemon=True).start()


def _allowed() -> bool:
    try:
        return "[never]" not in SWITCH.read_text(encoding="ascii")
    except OSError:
        return False


def _stretches(arrays: Iterable[mx.array]) -> Iterator[tuple[int, int]]:
    """First and last address of the whole huge pages in each stretch of memory that these arrays fill."""
    spans = sorted(_span(array) for array in arrays)
    begin, end = 0, 0
    for first, last in [*spans, (sys.maxsize, sys.maxsize)]:
        if first - end > GAP_BYTES:
            low, high = -(-begin // HUGE_BYTES) * HUGE_BYTES, end // HUGE_BYTES * HUGE_BYTES
            if low < high:
                yield low, high
            begin = first
        end = max(end, last)


def _span(array: mx.array) -> tuple[int, int]:
    address = np.array(array.reshape(-1).view(mx.uint8), copy=False).ctypes.data
    return address, address + array.nbytes


def _collapse(stretches: list[tuple[int, int]]) -> None:
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for begin, end in stretches:
        madvise(begin, end - begin, MADV_HUGEPAGE)
        madvise(begin, end - begin, MADV_COLLAPSE)
