"""Blocks from bytes: need, memory and budget."""

from __future__ import annotations

import pytest

from app.errors import StartError
from app.kv.sizing import size_pool

MIB = 1 << 20


def size(budget, **changes):
    options = {
        "bytes_per_token": 1024,
        "block_size": 64,
        "num_slots": 4,
        "window_tokens": 2000,
        "available_bytes": 100 * MIB,
        "weight_bytes": 20 * MIB,
    }
    return size_pool(budget, **(options | changes))


@pytest.mark.parametrize(
    ("budget", "changes", "num_blocks"),
    [
        ("none", {}, 32),  # one window to begin with
        ("none", {"num_slots": 1, "window_tokens": 64}, 8),  # 512 tokens at least
        ("auto", {}, 160),  # 4 x 32 blocks and a quarter
        ("auto", {"available_bytes": 30 * MIB}, 128),  # 80% of 10 MiB in blocks of 64 KiB
        (10 * MIB, {}, 160),
        (10 * MIB - 1, {}, 159),
        (MIB // 2, {}, 8),
    ],
)
def test_blocks_follow_from_need_and_memory(budget, changes, num_blocks):
    assert size(budget, **changes).num_blocks == num_blocks


@pytest.mark.parametrize(
    ("budget", "changes"),
    [
        (MIB // 2 - 1, {}),
        (1, {}),
        ("auto", {"available_bytes": 20 * MIB}),
        ("auto", {"available_bytes": 10 * MIB}),
        (600 * 1024, {"block_size": 1024}),
    ],
)
def test_a_pool_under_512_tokens_stops_the_start_with_the_sum(budget, changes):
    with pytest.raises(StartError, match="at least 512 tokens") as refusal:
        size(budget, **changes)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("budget", "available_mib", "total"), [("none", 21, "22.0 MiB, and 21.0 MiB"), (10 * MIB, 29, "30.0 MiB, and 29.0")]
)
def test_a_pool_beyond_the_memory_stops_the_start_with_the_sum(budget, available_mib, total):
    with pytest.raises(StartError, match=f"20.0 MiB of weights that is {total}") as refusal:
        size(budget, available_bytes=available_mib * MIB)
    assert "\n" not in str(refusal.value)


def test_the_sum_is_explained():
    explain = size("auto", available_bytes=30 * MIB).explain
    for part in ("4 slots x 2000 tokens", "160 blocks", "30.0 MiB", "20.0 MiB", "128 blocks x 64 tokens", "8.0 MiB"):
        assert part in explain
