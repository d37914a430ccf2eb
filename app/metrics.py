"""Prometheus families. What the scheduler counts is read from its snapshot at each scrape; the rest is observed here.

No label value ever comes from a request.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from app.scheduler.snapshot import Snapshot

# The library can leave the `_created` series out for all families at once only: nobody asked for twice the series.
disable_created_metrics()  # type: ignore[no-untyped-call]

STATUS_CLASSES = ("2xx", "3xx", "4xx", "5xx")
WAIT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
STEP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)

Values = Mapping[str, float]


class Observed(Protocol):
    """The part of the service that a scrape reads."""

    @property
    def bytes_per_block(self) -> int: ...
    @property
    def decode_path(self) -> str: ...
    def snapshot(self) -> Snapshot: ...
    def tick_age_s(self) -> float: ...


GAUGES: tuple[tuple[str, str, Callable[[Snapshot, int], float]], ...] = (
    ("slots", "Seats for running requests.", lambda s, _: len(s.slots)),
    ("slots_available", "Seats nobody sits in.", lambda s, _: sum(not view.is_busy for view in s.slots)),
    ("queue_depth", "Requests waiting for a slot.", lambda s, _: s.num_queued),
    ("batch_current_size", "Requests that hold a slot.", lambda s, _: s.num_active),
    ("cache_pool_paged_block_size", "Tokens in a block.", lambda s, _: s.pool.block_size),
    ("cache_pool_paged_blocks_allocated", "Blocks in the pool.", lambda s, _: s.pool.num_blocks),
    ("cache_pool_paged_blocks_live", "Blocks held by a request.", lambda s, _: s.pool.live),
    ("cache_pool_paged_blocks_free", "Blocks held by no request.", lambda s, _: s.pool.free),
    ("cache_pool_paged_bytes_reserved", "Bytes of the pool.", lambda s, size: s.pool.num_blocks * size),
    ("cache_pool_paged_bytes_in_use", "Bytes of blocks held by a request.", lambda s, size: s.pool.live * size),
    (
        "cache_pool_paged_block_budget",
        "Most blocks the pool may have; without a budget, those it has.",
        lambda s, _: s.pool.num_blocks,
    ),
    ("prompt_cache_entries", "Blocks that a prefix key leads to.", lambda s, _: s.prefix.entries),
    ("prompt_cache_bytes", "Bytes of free blocks that can be adopted.", lambda s, size: s.pool.cached * size),
)

COUNTERS: tuple[tuple[str, str, Callable[[Snapshot], float]], ...] = (
    ("prompt_tokens", "Prompt tokens of admitted requests.", lambda s: s.counters.prompt_tokens),
    ("completion_tokens", "Tokens drawn.", lambda s: s.counters.completion_tokens),
    ("batch_sequences_started", "Requests that got a slot.", lambda s: s.counters.started),
    ("batch_prefill_tokens", "Tokens computed in prefill.", lambda s: s.counters.prefill_tokens),
    ("batch_decode_tokens", "Tokens drawn in decode steps.", lambda s: s.counters.decode_tokens),
    ("batch_decode_steps", "Ticks with a decoding row.", lambda s: s.counters.decode_steps),
    (
        "batch_decode_lookahead_steps",
        "Decode steps submitted before the last was read.",
        lambda s: s.counters.lookahead_steps,
    ),
    ("batch_prefill_chunks", "Prefill chunks run.", lambda s: s.counters.prefill_chunks),
    ("batch_mixed_steps", "Ticks with decoding rows and a chunk.", lambda s: s.counters.mixed_steps),
    ("batch_prefill_grants", "Chunks let in beside live decode.", lambda s: s.counters.prefill_grants),
    ("spec_proposed_tokens", "Tokens of drafts.", lambda s: s.counters.spec_proposed_tokens),
    ("spec_accepted_tokens", "Tokens of drafts that were right.", lambda s: s.counters.spec_accepted_tokens),
    ("batch_reclaim_passes", "Ticks in which decode took a block.", lambda s: s.counters.reclaim_passes),
    ("prompt_cache_hits", "Admissions that adopted a prefix.", lambda s: s.prefix.hits),
    (
        "prompt_cache_prefix_tokens_reused",
        "Tokens adopted in place of being computed.",
        lambda s: s.prefix.tokens_reused,
    ),
)

LABELLED: tuple[tuple[str, str, str, Callable[[Snapshot], Values]], ...] = (
    ("batch_sequences_completed", "Requests finished.", "reason", lambda s: dict(s.counters.completed)),
    (
        "batch_preemptions",
        "Running requests sent back to the queue.",
        "cause",
        # Every cause from the beginning: a rate does not see a series begin, and the first storm would be missed.
        lambda s: {"fault": 0, "priority": 0, "reclaim": 0} | s.counters.preemptions,
    ),
    # One path so far: every step reads K and V where they lie.
    ("paged_decode_launches", "Decode steps on the pool.", "path", lambda s: {"block_table": s.counters.decode_steps}),
    ("prompt_cache_misses", "Admissions that adopted nothing.", "reason", lambda s: dict(s.prefix.misses)),
    (
        "prompt_cache_evictions",
        "Prefix keys dropped.",
        "reason",
        lambda s: {"lru": s.prefix.evictions_lru, "ttl": s.prefix.evictions_ttl},
    ),
)


# What llama-server counts under names of its own, where it means the same here; its averages, and what it counts by
# calls of its library, are left out.
LLAMA_GAUGES: tuple[tuple[str, str, Callable[[Snapshot], float]], ...] = (
    ("requests_processing", "Requests that hold a slot.", lambda s: s.num_active),
    ("requests_deferred", "Requests waiting for a slot.", lambda s: s.num_queued),
)
LLAMA_COUNTERS: tuple[tuple[str, str, Callable[[Snapshot], float]], ...] = (
    ("prompt_tokens", "Prompt tokens computed.", lambda s: s.counters.prefill_tokens),
    ("tokens_predicted", "Tokens drawn.", lambda s: s.counters.completion_tokens),
    ("spec_decode_num_draft_tokens", "Tokens of drafts.", lambda s: s.counters.spec_proposed_tokens),
    ("spec_decode_num_accepted_tokens", "Tokens of drafts that were right.", lambda s: s.counters.spec_accepted_tokens),
)


class SnapshotCollector(Collector):
    """Turns one snapshot into families, so that a scrape is consistent and counting costs the tick nothing."""

    def __init__(self, service: Observed, version: str, fingerprint: str) -> None:
        self.service = service
        self.build = [version, fingerprint]

    def collect(self) -> Iterator[Metric]:
        snapshot, block_bytes = self.service.snapshot(), self.service.bytes_per_block
        for name, text, read in GAUGES:
            yield GaugeMetricFamily(f"mlxcel_{name}", text, value=read(snapshot, block_bytes))
        for name, text, count in COUNTERS:
            yield CounterMetricFamily(f"mlxcel_{name}", text, value=count(snapshot))
        for name, text, label, split in LABELLED:
            family = CounterMetricFamily(f"mlxcel_{name}", text, labels=[label])
            for value, number in sorted(split(snapshot).items()):
                family.add_metric([value], number)
            yield family
        for name, text, count in LLAMA_GAUGES:
            yield GaugeMetricFamily(f"llamacpp:{name}", text, value=count(snapshot))
        for name, text, count in LLAMA_COUNTERS:
            yield CounterMetricFamily(f"llamacpp:{name}", text, value=count(snapshot))
        yield GaugeMetricFamily("mlxcel_tick_age_seconds", "Age of the running tick.", value=self.service.tick_age_s())
        text = "Always 1; the labels tell the version, the fingerprint of the settings, and how the model is decoded."
        build = GaugeMetricFamily("mlxcel_build_info", text, labels=["version", "fingerprint", "decode_path"])
        build.add_metric([*self.build, self.service.decode_path], 1)
        yield build


class Metrics:
    """All families of one server, in a registry of their own. Safe to feed from any thread."""

    def __init__(self, service: Observed, version: str, fingerprint: str = "") -> None:
        self.registry = CollectorRegistry()
        self.registry.register(SnapshotCollector(service, version, fingerprint))
        self._responses = Counter("mlxcel_requests", "HTTP responses.", ["status"], registry=self.registry)
        for status in STATUS_CLASSES:
            self._responses.labels(status)
        self._queue = self._histogram("request_queue", "Arrival to slot.", WAIT_BUCKETS_S)
        self._ttft = self._histogram("request_ttft", "Arrival to first token.", WAIT_BUCKETS_S)
        self._itl = self._histogram("request_itl", "Token to next token.", STEP_BUCKETS_S)
        self._e2e = self._histogram("request_e2e", "Arrival to last token.", WAIT_BUCKETS_S)
        self._prompt = self._seconds("prompt", "Slot to first token.")
        self._predicted = self._seconds("tokens_predicted", "First token to last.")
        self._tick = self._histogram("tick", "One tick, by the rows in it.", STEP_BUCKETS_S, ["kind"])

    def _histogram(self, name: str, text: str, buckets: Sequence[float], labels: Sequence[str] = ()) -> Histogram:
        return Histogram(f"mlxcel_{name}_seconds", text, labels, buckets=buckets, registry=self.registry)

    def _seconds(self, name: str, text: str) -> Counter:
        return Counter(f"llamacpp:{name}_seconds", f"Seconds of all requests: {text}", registry=self.registry)

    def count_response(self, status: int) -> None:
        """Count one HTTP response by the class of its status."""
        self._responses.labels(f"{status // 100}xx").inc()

    def observe_request(
        self, queue_s: float | None, ttft_s: float | None, itl_s: Sequence[float], e2e_s: float | None
    ) -> None:
        """Record one finished request. None: it never got that far."""
        if queue_s is not None:
            self._queue.observe(queue_s)
        if ttft_s is not None:
            self._ttft.observe(ttft_s)
        for gap_s in itl_s:
            self._itl.observe(gap_s)
        if e2e_s is not None:
            self._e2e.observe(e2e_s)
        if queue_s is not None and ttft_s is not None and e2e_s is not None:
            self._prompt.inc(max(0.0, ttft_s - queue_s))
            self._predicted.inc(max(0.0, e2e_s - ttft_s))

    def observe_tick(self, kind: Literal["decode", "prefill", "mixed"], seconds: float) -> None:
        self._tick.labels(kind).observe(seconds)

    def render(self) -> bytes:
        """The exposition text that a scrape reads."""
        return generate_latest(self.registry)
