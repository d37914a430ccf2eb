"""Huge pages under what every step reads."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import mlx.core as mx
import pytest

from app.engine import pages
from app.engine.pages import GAP_BYTES, HUGE_BYTES, use_huge_pages

ROOT = Path(__file__).parent.parent

# In a process of its own: elsewhere memory may lie on such pages already.
SCRIPT = """
import threading
import mlx.core as mx
import numpy as np
from app.engine.pages import use_huge_pages

def huge_kib():
    with open("/proc/self/smaps_rollup") as rollup:
        return next(int(line.split()[1]) for line in rollup if line.startswith("AnonHugePages"))

arrays = [mx.full((4 << 20,), float(n)) for n in range(3)]
mx.eval(arrays)
before_kib = huge_kib()
use_huge_pages(arrays)
for thread in threading.enumerate():
    if thread.name == "huge-pages":
        thread.join()
assert all((np.array(array) == n).all() for n, array in enumerate(arrays))
print(huge_kib() - before_kib)
"""


def test_weights_lie_on_huge_pages_and_are_what_they_were() -> None:
    if not Path("/proc/self/smaps_rollup").exists() or not pages._allowed():
        pytest.skip("this system has no huge pages to give")
    ended = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True, cwd=ROOT)
    if int(ended.stdout) == 0:
        pytest.skip("this kernel moves nothing to huge pages at once: Linux 6.1 does")
    assert int(ended.stdout) >= 3 * 14 * 1024  # of three arrays of 16 MiB


def test_neighbours_are_taken_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three small arrays fill a huge page between them, and the next lies too far away."""
    third = HUGE_BYTES // 3
    spans = {
        0: (HUGE_BYTES, HUGE_BYTES + third),
        1: (HUGE_BYTES + third + GAP_BYTES, HUGE_BYTES + 2 * third),
        2: (HUGE_BYTES + 2 * third + 16, 2 * HUGE_BYTES + 16),
        3: (2 * HUGE_BYTES + 17 + GAP_BYTES, 5 * HUGE_BYTES - 1),
    }
    monkeypatch.setattr(pages, "_span", lambda number: spans[number])
    assert list(pages._stretches([2, 0, 3, 1])) == [  # type: ignore[list-item]
        (HUGE_BYTES, 2 * HUGE_BYTES),
        (3 * HUGE_BYTES, 4 * HUGE_BYTES),
    ]
    assert list(pages._stretches([])) == []


def test_nothing_is_asked_where_there_are_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for text in (None, "always madvise [never]\n"):
        switch = tmp_path / "enabled"
        if text is not None:
            switch.write_text(text)
        monkeypatch.setattr(pages, "SWITCH", switch)
        monkeypatch.setattr(pages, "_collapse", lambda stretches: pytest.fail("asked"))
        use_huge_pages([mx.zeros((1 << 20,))])
        assert all(thread.name != "huge-pages" for thread in threading.enumerate())
