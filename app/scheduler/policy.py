"""The rules of scheduling, one function a question. All are pure: what they decide depends on their arguments alone."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from app.request import FinishReason, Request, State

PreemptionPolicy = Literal["longest-first", "lowest-priority"]

CHUNK_ALONE = 2048
CHUNK_BESIDE_DECODE = 512
# How long a tick of prefill alone should take, in seconds: whoever comes meanwhile waits for its end.
PREFILL_TICK_S = 0.5
# What is computed in the first of them, before it is known how long a token takes.
FIRST_ALONE = 256
# A chunk below this costs a tick and brings next to nothing.
LEAST_CHUNK = 16
# So does less than this in a tick of prefill alone, and it tells little of what a token costs: a tick reads all weights
# and the whole context before its tokens. Where that takes most of the time, less and less would be computed in one.
LEAST_ALONE = 64
# How often a request may be in a step that fails as a whole, and still be tried again.
MAX_FAULTS = 1
# What the highest priority is worth in waiting. So nobody is overtaken by a request that came twice as long after it.
HEAD_START_S = 600.0


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """``prefill_chunk`` None: by whether anybody decodes; 0: whole prompts. ``max_batch_prefill_tokens`` None: derived;
    0: no cap. ``watermark`` is the share of the pool that admission keeps free while anybody decodes. ``itl_budget_s``
    is how long a tick with decode may take, None: any time; ``grant_interval`` is how many ticks in a row it may put
    prefill off, 0: any number. ``grows`` says that the pool has no bound of its own: it is doubled when it is short.
    ``prompt_lookup_max_batch`` is how many rows may decode at most in a tick with drafts. ``lookahead`` says that a
    decode step may be submitted before the tokens of the one before are read."""

    num_slots: int = 4
    max_batch_size: int = 4
    prefill_chunk: int | None = None
    max_batch_prefill: int = 4
    max_batch_prefill_tokens: int | None = None
    watermark: float = 0.01
    itl_budget_s: float | None = None
    grant_interval: int = 16
    grows: bool = False
    lookahead: bool = False
    enable_preemption: bool = False
    preemption_policy: PreemptionPolicy = "longest-first"
    prompt_lookup_max_batch: int = 2


def chunk_tokens(config: SchedulerConfig, num_decoding: int, num_prompts: int = 1) -> int:
    """How many tokens of one prompt may be computed in a tick; 0 means all of it. A setting pins it in every state.

    Large only for a prompt that is alone: others would wait for their next token, or their first, as long as it takes.
    Never more than all prompts together may have, where that is set.
    """
    if config.prefill_chunk is not None:
        return config.prefill_chunk
    chunk = CHUNK_ALONE if not num_decoding and num_prompts <= 1 else CHUNK_BESIDE_DECODE
    return min(chunk, config.max_batch_prefill_tokens or chunk)


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


def brief(num_tokens: int, token_s: float | None) -> int:
    """How much of a prefill of ``num_tokens`` (0: any number) one tick takes where nobody decodes: not more than
    computes in ``PREFILL_TICK_S`` at ``token_s`` each, so that a short prompt is not held up by what began before it
    came, but ``LEAST_ALONE``. None: nothing is known yet."""
    most = FIRST_ALONE if token_s is None else max(int(PREFILL_TICK_S / max(token_s, 1e-9)), LEAST_ALONE)
    return min(num_tokens or most, most)


def affordable_chunk(chunk: int, budget_s: float, decode_s: float, token_s: float) -> int:
    """The largest chunk, up to ``chunk`` tokens, with which a tick stays in its budget; 0 means none is due.

    ``decode_s`` is what a tick costs without prefill, ``token_s`` what each prefill token adds.
    """
    affordable = int((budget_s - decode_s) / token_s) if token_s > 0 else chunk
    return 0 if affordable < min(chunk, LEAST_CHUNK) else min(chunk, affordable)


def is_granted(num_held_back: int, grant_interval: int) -> bool:
    """Whether prefill that was put off for ``num_held_back`` ticks goes now, whatever the budget says."""
    return 0 < grant_interval <= num_held_back


def deal(lefts: Sequence[int], priorities: Sequence[int], chunk: int, room: int | None) -> list[int]:
    """How many tokens of each prompt a tick computes; ``lefts`` are the tokens they have to go, in order of the line.

    The first in line gets three quarters of the room at least, so that nothing starves it. A quarter goes to the
    shortest of those of its priority, so that a short prompt is not held up by long ones before it. The rest goes down
    the line. Without chunking a prompt goes whole or not at all, and the first one always goes.
    """
    places = range(len(lefts))
    shares = [0] * len(lefts)
    if chunk and room is not None:
        quarter = room // 4
        peers = [i for i in places if i and priorities[i] >= priorities[0]]
        for i in sorted(peers, key=lefts.__getitem__):
            shares[i] = min(lefts[i], chunk, quarter)
            quarter -= shares[i]
        room -= sum(shares)
    for i in places:
        more = min(lefts[i], chunk or lefts[i]) - shares[i]
        if room is not None:
            more = min(more, room) if chunk else more if i == 0 or more <= room else 0
            room = max(room - more, 0)
        shares[i] += more
    return shares


def may_admit(num_needed: int, num_free: int, num_blocks: int, watermark: float, num_decoding: int) -> bool:
    """Whether the free blocks cover an admission, and beside live decode the share that is kept for growth as well."""
    reserve = watermark * num_blocks if num_decoding else 0.0
    return num_needed + reserve <= num_free


def end_reason(request: Request) -> FinishReason | None:
    """Why a request ends with the token that it has just drawn, if it does."""
    if request.tokens[-1] in request.end_tokens:
        return FinishReason.STOP
    return FinishReason.LENGTH if request.num_output >= request.max_tokens else None


def failure_reason(request: Request) -> FinishReason:
    """Why a request ends that did not get its token: its own grammar may be to blame."""
    stuck = request.constraint is not None and request.constraint.is_at_limit
    return FinishReason.GRAMMAR_LIMIT if stuck else FinishReason.ERROR


def head_start_s(priority: int) -> float:
    """How much sooner than it did a request counts as having arrived. Grows with the priority, and stays bounded."""
    return HEAD_START_S * priority / (10 + abs(priority))


def place(request: Request) -> tuple[float, int, int]:
    """Where a request stands in line, smallest first: by priority, then by arrival, and older than its arrival for each
    step of priority rather than before all others for ever. Never changes while it waits."""
    return request.arrival_s - head_start_s(request.priority), -request.priority, request.arrival


def doubled_pool(num_blocks: int, num_needed: int) -> int:
    """The size to which a pool without bound grows when it should have ``num_needed`` blocks."""
    while num_blocks < num_needed:
        num_blocks *= 2
    return num_blocks


def reclaim_victim(running: Iterable[Request]) -> Request:
    """Who gives its blocks up when a running row needs one: a parked prompt with what it adopted before any that
    decodes, then the least output, then the latest arrival."""
    return min(running, key=lambda each: (each.state is State.DECODING, each.num_output, -each.arrival))


def preemptible(running: Iterable[Request], request: Request) -> list[Request]:
    """The running requests that this one may push out: only those strictly below its priority, and of them only those
    that would stand behind it in line. What has waited long enough is not made to wait again."""
    return [each for each in running if each.priority < request.priority and place(each) > place(request)]


def preemption_victim(candidates: Iterable[Request], policy: PreemptionPolicy) -> Request:
    """Which of them goes first: the most output, or the lowest priority and then the most output."""
    if policy == "longest-first":
        return max(candidates, key=lambda request: (request.num_output, request.arrival))
    return max(candidates, key=lambda request: (-request.priority, request.num_output, request.arrival))
