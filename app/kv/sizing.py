"""How many blocks the pool gets, and the sum that says why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from app.errors import StartError

Budget = int | Literal["auto", "none"]
"""Bytes, or who decides: ``auto`` by need and memory, ``none`` nobody: the pool grows as it is needed."""

MIN_TOKENS = 512
"""What a pool has to hold at least, in tokens."""


@dataclass(frozen=True, slots=True)
class PoolSize:
    """``explain`` is one line with the arithmetic, for the log."""

    num_blocks: int
    explain: str


def size_pool(
    budget: Budget,
    *,
    bytes_per_token: int,
    block_size: int,
    num_slots: int,
    window_tokens: int,
    available_bytes: int,
    weight_bytes: int,
    slot_bytes: int = 0,
) -> PoolSize:
    """Settle the number of blocks.

    The need is every slot at its whole window, a quarter more for cached prefixes, and 512 tokens at least. ``none``
    gives one window to begin with: the pool is doubled while it runs. ``auto`` gives the need or, if that is less,
    what fits into four fifths of the memory the weights leave; the last fifth is for activations. A byte count gives
    as many whole blocks as it pays for.

    Args:
        budget: bytes, ``auto`` or ``none``.
        bytes_per_token: K and V of one token over all layers.
        block_size: tokens a block.
        num_slots: requests that can be under way at once.
        window_tokens: the longest context of one request.
        available_bytes: memory that this process may use, weights included.
        weight_bytes: what the weights take.
        slot_bytes: what a request takes however long it is; it comes on top of the budget, and no prefix is shared
            where there is any.

    Raises:
        StartError: the pool would hold fewer than 512 tokens, or no block, or be larger than the memory that is left.
    """
    block_bytes = bytes_per_token * block_size
    weight_bytes += num_slots * slot_bytes
    window_blocks = num_slots * _blocks(window_tokens, block_size)
    need_blocks = max(window_blocks + -(-window_blocks // 4), _blocks(MIN_TOKENS, block_size))
    need = f"{num_slots} slots x {window_tokens} tokens, 25% for cached prefixes: {need_blocks} blocks"
    if budget == "none":
        num_blocks = max(_blocks(window_tokens, block_size), _blocks(MIN_TOKENS, block_size))
        why = f"no budget: one window of {window_tokens} tokens to begin with, doubled when it is short"
    elif budget == "auto":
        room_bytes = max(available_bytes - weight_bytes, 0) * 4 // 5
        num_blocks = min(need_blocks, room_bytes // block_bytes)
        memory = (
            f"80% of ({_mib(available_bytes)} available - {_mib(weight_bytes)} weights): {room_bytes // block_bytes}"
        )
        why = f"auto, the smaller of {need}; {memory} blocks"
    else:
        num_blocks, why = budget // block_bytes, f"budget {_mib(budget)}"
        if slot_bytes:
            num_blocks = min(num_blocks, need_blocks)  # more would be of no use, and a token may take next to nothing
    num_tokens = num_blocks * block_size
    besides = f"; {num_slots} slots x {_mib(slot_bytes)} besides" if slot_bytes else ""
    total = (
        f"{why}; {num_blocks} blocks x {block_size} tokens = {num_tokens} tokens"
        f" x {bytes_per_token} bytes = {_mib(num_blocks * block_bytes)}{besides}"
    )
    if num_blocks < 1 or num_tokens < MIN_TOKENS:
        least_bytes = _blocks(MIN_TOKENS, block_size) * block_bytes
        raise StartError(f"KV pool too small: {total}; at least {MIN_TOKENS} tokens are needed, {_mib(least_bytes)}")
    if weight_bytes + num_blocks * block_bytes > available_bytes:
        raise StartError(
            f"KV pool too large: {total}; with {_mib(weight_bytes)} of weights that is"
            f" {_mib(weight_bytes + num_blocks * block_bytes)}, and {_mib(available_bytes)} are available"
        )
    return PoolSize(num_blocks, f"KV pool: {total}")


def _blocks(num_tokens: int, block_size: int) -> int:
    return -(-num_tokens // block_size)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB"
