"""The rules of scheduling, one function a question. All are pure: what they decide depends on their arguments alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from app.request import Request

PreemptionPolicy = Literal["longest-first", "lowest-priority"]

CHUNK_ALONE = 2048
CHUNK_BESIDE_DECODE = 512


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """``prefill_chunk`` None: by whether anybody decodes; 0: whole prompts. ``max_batch_prefill_tokens`` None: derived;
    0: no cap. ``watermark`` is the share of the pool that admission keeps free while anybody decodes."""

    num_slots: int = 4
    max_batch_size: int = 4
    prefill_chunk: int | None = None
    max_batch_prefill: int = 4
    max_batch_prefill_tokens: int | None = None
    watermark: float = 0.01
    enable_preemption: bool = False
    preemption_policy: PreemptionPolicy = "longest-first"


def chunk_tokens(setting: int | None, num_decoding: int) -> int:
    """How many tokens of one prompt may be computed in a tick; 0 means all of it. A setting pins it in both states."""
    if setting is not None:
        return setting
    return CHUNK_BESIDE_DECODE if num_decoding else CHUNK_ALONE


def max_prefill_tokens(setting: int | None, max_batch_prefill: int, chunk_setting: int | None) -> int:
    """The cap on prefill tokens of a tick without decode; 0 means none. Unset, it follows from the other two."""
    if setting is not None:
        return setting
    return 2 * max_batch_prefill * min(chunk_setting or CHUNK_BESIDE_DECODE, CHUNK_BESIDE_DECODE)


def prefill_room(chunk: int, max_tokens: int, num_decoding: int) -> int | None:
    """How many prefill tokens a tick takes over all prompts; None means any number.

    Beside live decode one chunk in all, otherwise ``max_tokens``, but never less than a chunk.
    """
    if chunk and num_decoding:
        return chunk
    return max(max_tokens, chunk) if max_tokens else None


def prefill_share(num_left: int, chunk: int, room: int | None, is_first: bool) -> int:
    """How many of a prompt's ``num_left`` tokens are computed in this tick, with ``room`` left; 0: not its turn.

    Without chunking a prompt goes whole or not at all, and the first one of a tick always goes.
    """
    if chunk:
        return min(num_left, chunk) if room is None else min(num_left, chunk, room)
    return num_left if is_first or room is None or num_left <= room else 0


def may_admit(num_needed: int, num_free: int, num_blocks: int, watermark: float, num_decoding: int) -> bool:
    """Whether the free blocks cover an admission, and beside live decode the share that is kept for growth as well."""
    reserve = watermark * num_blocks if num_decoding else 0.0
    return num_needed + reserve <= num_free


def place(request: Request) -> tuple[int, int]:
    """Where a request stands in line, smallest first: by priority, then by arrival."""
    return -request.priority, request.arrival


def reclaim_victim(running: Iterable[Request]) -> Request:
    """Who gives its blocks up when a running row needs one: the least output, the latest arrival among equals."""
    return min(running, key=lambda request: (request.num_output, -request.arrival))


def preemptible(running: Iterable[Request], priority: int) -> list[Request]:
    """The running requests that one of this priority may push out: only those strictly below it."""
    return [request for request in running if request.priority < priority]


def preemption_victim(candidates: Iterable[Request], policy: PreemptionPolicy) -> Request:
    """Which of them goes first: the most output, or the lowest priority and then the most output."""
    if policy == "longest-first":
        return max(candidates, key=lambda request: (request.num_output, request.arrival))
    return max(candidates, key=lambda request: (-request.priority, request.num_output, request.arrival))
