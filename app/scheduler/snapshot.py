"""What HTTP may see of the scheduler: one immutable value, replaced whole after each tick."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

from app.kv.block_table import BlockTables
from app.request import Request, SamplingParams


class SlotView(NamedTuple):
    """One slot as ``/slots`` shows it. ``request_id`` is of who sits in it or sat there last; None: nobody ever did."""

    id: int
    request_id: int | None = None
    num_prompt: int = 0
    num_prompt_computed: int = 0
    num_cached: int = 0
    num_output: int = 0
    max_tokens: int = 0
    sampling: SamplingParams | None = None
    is_busy: bool = False


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
    preemptions: dict[str, int] = field(default_factory=dict)  # by cause: reclaim, priority, fault
    reclaim_passes: int = 0

    def with_start(self, num_prompt: int) -> Counters:
        """After the first tick of a request with that many prompt tokens."""
        return replace(self, started=self.started + 1, prompt_tokens=self.prompt_tokens + num_prompt)

    def with_end(self, reason: str, num_output: int) -> Counters:
        """After the end of a request with that many output tokens."""
        completed = self.completed | {reason: self.completed.get(reason, 0) + 1}
        return replace(self, completed=completed, completion_tokens=self.completion_tokens + num_output)

    def with_requeue(self, cause: str) -> Counters:
        """After a running request went back to the queue."""
        return replace(self, preemptions=self.preemptions | {cause: self.preemptions.get(cause, 0) + 1})

    def with_reclaim(self, any_taken: bool) -> Counters:
        """After the blocks for decode were found, ``any_taken``: at the cost of a prefix key or of another row."""
        return replace(self, reclaim_passes=self.reclaim_passes + 1) if any_taken else self

    def with_tick(self, num_decode: int, num_chunks: int, num_prefill: int) -> Counters:
        """After a tick with ``num_decode`` decode rows and ``num_prefill`` tokens in ``num_chunks`` prefill rows."""
        return replace(
            self,
            prefill_tokens=self.prefill_tokens + num_prefill,
            decode_tokens=self.decode_tokens + num_decode,
            decode_steps=self.decode_steps + bool(num_decode),
            prefill_chunks=self.prefill_chunks + num_chunks,
            mixed_steps=self.mixed_steps + bool(num_decode and num_chunks),
            prefill_grants=self.prefill_grants + (num_chunks if num_decode else 0),
        )


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


def seat(request: Request, slot: int) -> SlotView:
    """A request as it sits in ``slot``."""
    num_computed = min(request.num_computed, request.num_prompt)
    return SlotView(
        slot,
        request.id,
        request.num_prompt,
        num_computed,
        request.num_cached,
        request.num_output,
        request.max_tokens,
        request.sampling,
        is_busy=True,
    )


def observe(
    slots: tuple[SlotView, ...], num_active: int, num_queued: int, counters: Counters, tables: BlockTables
) -> Snapshot:
    """The state of a scheduler as a value of its own, which later ticks do not change."""
    pool, cache = tables.pool, tables.prefix_cache
    return Snapshot(
        slots,
        num_active,
        num_queued,
        counters,
        PoolView(tables.block_size, pool.num_blocks, pool.num_live, pool.num_free, pool.num_cached),
        PrefixView(
            enabled=cache.enabled,
            entries=cache.num_entries,
            hits=cache.hits,
            lookups=cache.lookups,
            inserts=cache.inserts,
            evictions_lru=cache.evictions_lru,
            evictions_ttl=cache.evictions_ttl,
            tokens_reused=cache.tokens_reused,
            misses=dict(cache.misses),
        ),
    )
