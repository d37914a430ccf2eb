"""What HTTP may see of the scheduler: one immutable value, replaced whole after each tick."""

from __future__ import annotations

from dataclasses import dataclass, field

from app.request import SamplingParams


@dataclass(frozen=True, slots=True)
class SlotView:
    """One slot as ``/slots`` shows it. ``request_id`` is None while nobody sits in it."""

    id: int
    request_id: int | None = None
    num_prompt: int = 0
    num_prompt_computed: int = 0
    num_cached: int = 0
    num_output: int = 0
    max_tokens: int = 0
    sampling: SamplingParams | None = None


@dataclass(frozen=True, slots=True)
class Counters:
    """Totals since the start; they only grow."""

    started: int = 0
    completed: dict[str, int] = field(default_factory=dict)  # by finish reason
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    decode_steps: int = 0
    prefill_chunks: int = 0
    mixed_steps: int = 0
    prefill_grants: int = 0
    preemptions: dict[str, int] = field(default_factory=dict)  # by cause: reclaim, priority


@dataclass(frozen=True, slots=True)
class PoolView:
    """The block pool. ``live``: held by a request; ``cached``: free, yet adoptable through a prefix key."""

    block_size: int = 0
    num_blocks: int = 0
    live: int = 0
    free: int = 0
    cached: int = 0


@dataclass(frozen=True, slots=True)
class PrefixView:
    """The prefix cache: ``entries`` are keyed blocks; a lookup is one admission that was allowed to adopt."""

    enabled: bool = True
    entries: int = 0
    hits: int = 0
    lookups: int = 0
    inserts: int = 0
    evictions_lru: int = 0
    evictions_ttl: int = 0
    tokens_reused: int = 0
    misses: dict[str, int] = field(default_factory=dict)  # by reason


@dataclass(frozen=True, slots=True)
class Snapshot:
    slots: tuple[SlotView, ...] = ()
    num_active: int = 0
    num_queued: int = 0
    counters: Counters = Counters()
    pool: PoolView = PoolView()
    prefix: PrefixView = PrefixView()

    @property
    def total_completed(self) -> int:
        return sum(self.counters.completed.values())
