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


@dataclass(slots=True)
class Counters:
    """Totals since the start; they only grow. The scheduler keeps one, and shows copies of it."""

    started: int = 0
    completed: dict[str, int] = field(default_factory=dict)  # by finish reason
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    decode_steps: int = 0
    lookahead_steps: int = 0  # of them
    prefill_chunks: int = 0
    mixed_steps: int = 0
    prefill_grants: int = 0
    spec_proposed_tokens: int = 0
    spec_accepted_tokens: int = 0
    preemptions: dict[str, int] = field(default_factory=dict)  # by cause: reclaim, priority, fault
    reclaim_passes: int = 0

    def copy(self) -> Counters:
        return replace(self, completed=self.completed.copy(), preemptions=self.preemptions.copy())

    def count_start(self, num_prompt: int) -> None:
        """A request with that many prompt tokens was in its first tick."""
        self.started += 1
        self.prompt_tokens += num_prompt

    def count_end(self, reason: str, num_output: int) -> None:
        """A request with that many output tokens has ended."""
        self.completed[reason] = self.completed.get(reason, 0) + 1
        self.completion_tokens += num_output

    def count_requeue(self, cause: str) -> None:
        """A running request went back to the queue."""
        self.preemptions[cause] = self.preemptions.get(cause, 0) + 1

    def count_draft(self, num_proposed: int, num_right: int) -> None:
        """So many tokens of a draft were checked."""
        self.spec_proposed_tokens += num_proposed
        self.spec_accepted_tokens += num_right

    def count_reclaim(self, any_taken: bool) -> None:
        """The blocks for decode were found, ``any_taken``: at the cost of a prefix key or of another row."""
        self.reclaim_passes += any_taken

    def count_tick(self, num_decode: int, num_chunks: int, num_prefill: int, is_ahead: bool = False) -> None:
        """A tick brought ``num_decode`` tokens in decode rows, ``num_prefill`` in ``num_chunks`` prefill rows.
        ``is_ahead``: it was submitted before the tokens of the one before were read."""
        if num_decode:
            self.decode_tokens += num_decode
            self.decode_steps += 1
            self.lookahead_steps += is_ahead
        if num_chunks:
            self.prefill_tokens += num_prefill
            self.prefill_chunks += num_chunks
            if num_decode:
                self.mixed_steps += 1
                self.prefill_grants += num_chunks


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
    counters: Counters = field(default_factory=Counters)
    pool: PoolView = PoolView()
    prefix: PrefixView = PrefixView()

    @property
    def total_completed(self) -> int:
        return sum(self.counters.completed.values())


def seat(request: Request, slot: int, is_busy: bool = True) -> SlotView:
    """A request as it sits in ``slot``, or as it left it."""
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
        is_busy,
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
        counters.copy(),
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
