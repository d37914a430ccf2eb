"""Does the simulator say what the server does? Fits the cost of a tick to some waves, predicts others, prints both.

``python -m loadtest.validate_simulator``: starts the server on the embedded model, lets it record its ticks under one
set of waves, fits the cost model to them, and predicts TTFT and tokens/s of waves with other prompts and lengths, which
are then measured. Run nothing else meanwhile. Exit code 1 when a prediction is off by more than 15%.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from app.scheduler.cost import CostModel, Fit, fit
from app.scheduler.fake_host import HostSpec
from app.scheduler.fleet import simulate
from app.scheduler.policy import SchedulerConfig
from app.scheduler.recording import from_json, samples
from app.scheduler.workload import Arrival
from loadtest.contestants import Contestant, Running, ours, running
from loadtest.waves import Ask, Wave, equal_wave, mixed_wave, run_wave

TOLERANCE = 0.15


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--rounds", type=int, default=3, help="waves of each concurrency that are predicted; 3")
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 4, 8, 16], help="concurrent requests; 1 4 8 16")
    parser.add_argument("--blas-threads", default="auto", help="1 where other processes keep a core busy; auto")
    parser.add_argument("--json", type=Path, help="write every figure")
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        running(_contestant(options), Path(folder)) as server,
    ):
        fitted = _fit(server, options.levels)
        print(json.dumps(fitted.describe(), indent=1))
        spec = _spec(server, max(options.levels))
        rows = [_compare(server, level, spec, fitted.model, options.rounds) for level in options.levels]
    print(
        f"{'':4}  {'TTFT p50 (s)':^26}  {'tokens/s':^26}\n  C   measured  predicted  error   measured  predicted  error"
    )
    for row in rows:
        print(
            f"{row['C']:3}  {row['ttft_s'][0]:9.3f}  {row['ttft_s'][1]:9.3f}  {row['ttft_error']:+5.1%}"
            f"  {row['tokens_per_s'][0]:9.1f}  {row['tokens_per_s'][1]:9.1f}  {row['tokens_error']:+5.1%}"
        )
    if options.json:
        options.json.write_text(json.dumps({"fit": fitted.describe(), "rows": rows}, indent=1) + "\n")
    worst = max(abs(row[name]) for row in rows for name in ("ttft_error", "tokens_error"))
    print(f"the largest error is {worst:.1%}")
    return int(worst > TOLERANCE)


def _contestant(options: argparse.Namespace) -> Contestant:
    return ours(options.model, max(options.levels), RECORD_TICKS="20000", BLAS_THREADS=options.blas_threads)


def _fit(server: Running, levels: Sequence[int]) -> Fit:
    """Waves of every concurrency and one mixed, none of them equal to what is predicted later."""
    for level in levels:
        run_wave(server, equal_wave(level, 100, 32, seed=100 + level))
    run_wave(server, equal_wave(2, 300, 16, seed=200))
    run_wave(server, mixed_wave(8, 20, 300, 2.0, 24, seed=300))
    recording = httpx.get(f"{server.url}/v1/recording", timeout=60).raise_for_status().json()
    return fit(samples(from_json(recording)))


def _spec(server: Running, num_slots: int) -> HostSpec:
    stats = httpx.get(f"{server.url}/v1/cache/stats").raise_for_status().json()
    config = SchedulerConfig(num_slots=num_slots, max_batch_size=num_slots)
    return HostSpec(config, stats["paged_blocks_allocated"], stats["paged_block_size"])


def _compare(server: Running, level: int, spec: HostSpec, cost: CostModel, num_rounds: int) -> dict[str, Any]:
    """Medians over rounds. A simulated wave is sent at the moments at which the real one was."""
    measured: list[Wave] = []
    predicted: list[tuple[float, float]] = []
    for round_ in range(num_rounds):
        asks = equal_wave(level, 128, 64, seed=1000 * (round_ + 1) + level)
        wave = run_wave(server, asks)
        measured.append(wave)
        predicted.append(_predict(server, asks, wave, spec, cost))
        print(f"C={level}, round {round_ + 1}: {wave.tokens_per_s:.1f} tokens/s", file=sys.stderr)
    ttft_s = statistics.median(wave.ttft_s(0.5) for wave in measured), statistics.median(one for one, _ in predicted)
    rates = statistics.median(wave.tokens_per_s for wave in measured), statistics.median(two for _, two in predicted)
    return {
        "C": level,
        "ttft_s": ttft_s,
        "ttft_error": ttft_s[1] / ttft_s[0] - 1,
        "tokens_per_s": rates,
        "tokens_error": rates[1] / rates[0] - 1,
    }


def _predict(server: Running, asks: Sequence[Ask], wave: Wave, spec: HostSpec, cost: CostModel) -> tuple[float, float]:
    """TTFT p50 in seconds, and tokens/s."""
    lengths = [_num_tokens(server, ask.prompt) for ask in asks]
    sent = sorted(outcome.sent_s for outcome in wave.outcomes)
    arrivals = [Arrival(at_s, length, ask.max_tokens) for at_s, length, ask in zip(sent, lengths, asks, strict=True)]
    outcomes = simulate(arrivals, spec, cost).outcomes
    ttfts = sorted(outcome.first_s - outcome.arrived_s for outcome in outcomes)
    tokens = sum(outcome.num_output for outcome in outcomes)
    return ttfts[(len(ttfts) + 1) // 2 - 1], tokens / max(outcome.ended_s for outcome in outcomes)


def _num_tokens(server: Running, text: str) -> int:
    answer = httpx.post(f"{server.url}/tokenize", json={"content": text, "add_special": True}).raise_for_status()
    return len(answer.json()["tokens"])


if __name__ == "__main__":
    sys.exit(main())
