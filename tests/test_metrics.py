"""The exposition text: names, values, and what may not be in it."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from app.metrics import Metrics
from app.request import SamplingParams
from app.scheduler.snapshot import Counters, PoolView, PrefixView, SlotView, Snapshot
from tests.scripted import ScriptedService

SNAPSHOT = Snapshot(
    slots=(SlotView(0, 7, sampling=SamplingParams(), is_busy=True), SlotView(1)),
    num_active=1,
    num_queued=2,
    counters=Counters(
        started=3,
        completed={"stop": 4, "length": 5},
        prompt_tokens=6,
        completion_tokens=7,
        prefill_tokens=8,
        decode_tokens=9,
        decode_steps=10,
        lookahead_steps=31,
        prefill_chunks=11,
        mixed_steps=12,
        prefill_grants=13,
        spec_proposed_tokens=23,
        spec_accepted_tokens=20,
        reclaim_passes=14,
        preemptions={"reclaim": 14},
    ),
    pool=PoolView(block_size=64, num_blocks=20, live=15, free=5, cached=2),
    prefix=PrefixView(
        entries=16, hits=17, lookups=30, evictions_lru=18, evictions_ttl=19, tokens_reused=21, misses={"cold": 22}
    ),
)


def samples(metrics: Metrics) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = text_string_to_metric_families(metrics.render().decode())
    return {(s.name, frozenset(s.labels.items())): s.value for family in families for s in family.samples}


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return samples(metrics)[name, frozenset(labels.items())]


@pytest.mark.parametrize(
    ("name", "labels", "number"),
    [
        ("slots", {}, 2),
        ("slots_available", {}, 1),
        ("queue_depth", {}, 2),
        ("batch_current_size", {}, 1),
        ("batch_sequences_started_total", {}, 3),
        ("batch_sequences_completed_total", {"reason": "stop"}, 4),
        ("batch_sequences_completed_total", {"reason": "length"}, 5),
        ("prompt_tokens_total", {}, 6),
        ("completion_tokens_total", {}, 7),
        ("batch_prefill_tokens_total", {}, 8),
        ("batch_decode_tokens_total", {}, 9),
        ("batch_decode_lookahead_steps_total", {}, 31),
        ("batch_decode_steps_total", {}, 10),
        ("batch_prefill_chunks_total", {}, 11),
        ("batch_mixed_steps_total", {}, 12),
        ("batch_prefill_grants_total", {}, 13),
        ("spec_proposed_tokens_total", {}, 23),
        ("spec_accepted_tokens_total", {}, 20),
        ("batch_reclaim_passes_total", {}, 14),
        ("paged_decode_launches_total", {"path": "block_table"}, 10),
        ("batch_preemptions_total", {"cause": "reclaim"}, 14),
        ("cache_pool_paged_block_size", {}, 64),
        ("cache_pool_paged_blocks_allocated", {}, 20),
        ("cache_pool_paged_blocks_live", {}, 15),
        ("cache_pool_paged_blocks_free", {}, 5),
        ("cache_pool_paged_bytes_reserved", {}, 20_000),
        ("cache_pool_paged_bytes_in_use", {}, 15_000),
        ("cache_pool_paged_block_budget", {}, 20),
        ("prompt_cache_entries", {}, 16),
        ("prompt_cache_bytes", {}, 2_000),
        ("prompt_cache_hits_total", {}, 17),
        ("prompt_cache_misses_total", {"reason": "cold"}, 22),
        ("prompt_cache_prefix_tokens_reused_total", {}, 21),
        ("prompt_cache_evictions_total", {"reason": "lru"}, 18),
        ("prompt_cache_evictions_total", {"reason": "ttl"}, 19),
        ("tick_age_seconds", {}, 2.5),
        ("build_info", {"version": "1.2.3", "fingerprint": "c0ffee", "decode_path": "by script"}, 1),
    ],
)
def test_the_snapshot_is_what_a_scrape_reads(name: str, labels: dict[str, str], number: float) -> None:
    metrics = Metrics(ScriptedService(snap=SNAPSHOT, age_s=2.5), "1.2.3", "c0ffee")
    assert value(metrics, f"mlxcel_{name}", **labels) == number


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("requests_processing", 1),
        ("requests_deferred", 2),
        ("prompt_tokens_total", 8),
        ("tokens_predicted_total", 7),
        ("spec_decode_num_draft_tokens_total", 23),
        ("spec_decode_num_accepted_tokens_total", 20),
    ],
)
def test_what_means_the_same_has_llama_servers_name_too(name: str, number: float) -> None:
    assert value(Metrics(ScriptedService(snap=SNAPSHOT), "0"), f"llamacpp:{name}") == number


def test_seconds_of_prompts_and_of_answers_are_summed_over_requests() -> None:
    metrics = Metrics(ScriptedService(), "0")
    metrics.observe_request(0.1, 0.4, [0.02, 0.03], 0.45)
    metrics.observe_request(0.0, 0.5, [1.0], 1.5)
    metrics.observe_request(2.0, None, [], None)
    assert value(metrics, "llamacpp:prompt_seconds_total") == pytest.approx(0.8)
    assert value(metrics, "llamacpp:tokens_predicted_seconds_total") == pytest.approx(1.05)


def test_responses_are_counted_by_class() -> None:
    metrics = Metrics(ScriptedService(), "0")
    assert value(metrics, "mlxcel_requests_total", status="5xx") == 0
    for status in (200, 204, 404, 499, 503):
        metrics.count_response(status)
    counts = [value(metrics, "mlxcel_requests_total", status=status) for status in ("2xx", "3xx", "4xx", "5xx")]
    assert counts == [2, 0, 2, 1]


def test_a_finished_request_feeds_four_histograms() -> None:
    metrics = Metrics(ScriptedService(), "0")
    metrics.observe_request(0.1, 0.4, [0.02, 0.03], 0.45)
    metrics.observe_request(None, None, [], 9.0)
    found = samples(metrics)
    counts = {name: found[f"mlxcel_request_{name}_seconds_count", frozenset()] for name in ("queue", "ttft", "itl")}
    assert counts == {"queue": 1, "ttft": 1, "itl": 2}
    assert found["mlxcel_request_e2e_seconds_sum", frozenset()] == pytest.approx(9.45)


def test_ticks_are_told_apart_by_kind() -> None:
    metrics = Metrics(ScriptedService(), "0")
    assert not any(name.startswith("mlxcel_tick_seconds") for name, _ in samples(metrics))
    metrics.observe_tick("mixed", 0.05)
    assert value(metrics, "mlxcel_tick_seconds_count", kind="mixed") == 1


def test_no_created_series_and_help_for_each_family() -> None:
    metrics = Metrics(ScriptedService(snap=SNAPSHOT), "0")
    metrics.observe_tick("decode", 0.01)
    text = metrics.render().decode()
    assert "_created" not in text
    helped = {line.split()[2] for line in text.splitlines() if line.startswith("# HELP")}
    typed = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    assert helped == typed
    assert all(name.startswith(("mlxcel_", "llamacpp:")) for name in typed)


def test_two_servers_count_apart() -> None:
    first, second = Metrics(ScriptedService(), "0"), Metrics(ScriptedService(), "0")
    first.count_response(200)
    assert value(second, "mlxcel_requests_total", status="2xx") == 0
