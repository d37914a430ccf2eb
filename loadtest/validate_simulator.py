"""Does the simulator say what the server does? Fits the cost of a tick to some waves, predicts others, prints both.

``python -m loadtest.validate_simulator``: starts the server on the embedded model and sends it waves of two sorts in
turn. The cost model of a round is fitted to the recorded ticks of the one sort; from it, and from prompt lengths and
sending times, TTFT and tokens/s of the round's other sort are predicted and compared with what was measured: a machine
whose speed changes from one minute to the next is compared with itself. Run nothing else meanwhile. It prints the table
for docs/simulator.md. Exit code 1 when a prediction is off by more than 15%.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from app.scheduler.cost import CostModel, Fit, Sample, fit
from app.scheduler.fake_host import HostSpec
from app.scheduler.fleet import simulate
from app.scheduler.recording import Recording, from_json, samples
from app.scheduler.workload import Arrival
from loadtest.contestants import Running, ours, running
from loadtest.waves import Ask, Wave, equal_wave, mixed_wave, percentile, run_wave

TOLERANCE = 0.15


@dataclass(frozen=True)
class Played:
    """A wave that was measured, and what the simulator is told of it."""

    level: int
    arrivals: list[Arrival]
    wave: Wave


@dataclass(frozen=True)
class Round:
    """Ticks to fit the cost to, and the waves that were sent between them."""

    ticks: list[Sample]
    played: list[Played]


@dataclass(frozen=True)
class Comparison:
    """Medians over the waves of one concurrency: (measured, predicted)."""

    level: int
    ttft_s: tuple[float, float]
    tokens_per_s: tuple[float, float]

    @property
    def errors(self) -> tuple[float, float]:
        """By how much the predictions of TTFT and tokens/s are too high, as shares of what was measured."""
        (ttft_s, ttft_predicted_s), (rate, rate_predicted) = self.ttft_s, self.tokens_per_s
        return ttft_predicted_s / ttft_s - 1, rate_predicted / rate - 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--levels", type=int, nargs="+", default=[1, 4, 8, 16], help="concurrent requests; 1 4 8 16")
    parser.add_argument("--rounds", type=int, default=3, help="waves of each concurrency that are predicted; 3")
    parser.add_argument("--minutes", type=float, default=7.0, help="begin no round that would end later; 7")
    parser.add_argument("--prompt", type=int, default=128, help="prompt tokens of the predicted waves, about; 128")
    parser.add_argument("--output", type=int, default=64, help="tokens of their answers; 64")
    parser.add_argument("--blas-threads", default="auto", help="1 where other processes keep a core busy; auto")
    parser.add_argument("--json", type=Path, help="write every figure")
    options = parser.parse_args()
    if (load := os.getloadavg()[0]) > 0.5:
        _say(f"load average {load:.1f}: something else is running, the figures will say little")
    contestant = ours(options.model, max(options.levels), RECORD_TICKS="20000", BLAS_THREADS=options.blas_threads)
    rounds: list[Round] = []
    began_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, running(contestant, Path(folder)) as server:
        spec = _spec(server)
        for number in range(options.rounds):
            elapsed_s = time.monotonic() - began_s
            if rounds and elapsed_s * (1 + 1 / len(rounds)) > 60 * options.minutes:
                _say(f"{number} rounds: another would take too long")
                break
            rounds.append(_round(server, options.levels, options.prompt, options.output, seed=1000 * number))
            for one in rounds[-1].played:
                figures = f"TTFT {one.wave.ttft_s(0.5):.2f} s, {one.wave.tokens_per_s:.1f} tokens/s"
                _say(f"round {number + 1}, C={one.level}: {figures}")
    fitted = fit([tick for each in rounds for tick in each.ticks])
    compared = compare(rounds, spec)
    print(markdown(fitted, compared, len(rounds)))
    if options.json:
        figures = {"fit": fitted.describe(), "compared": [asdict(row) for row in compared]}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    worst = max(abs(error) for row in compared for error in row.errors)
    _say(f"the largest error is {worst:.1%}, after {(time.monotonic() - began_s) / 60:.1f} minutes")
    return int(worst > TOLERANCE)


def compare(rounds: Sequence[Round], spec: HostSpec) -> list[Comparison]:
    """One line a concurrency, in the order of their first appearance. Each round is predicted from its own ticks."""
    lines: dict[int, list[tuple[tuple[float, float], tuple[float, float]]]] = {}
    for each in rounds:
        cost = fit(each.ticks).model
        for one in each.played:
            ttft_s, tokens_per_s = predict(one.arrivals, spec, cost)
            lines.setdefault(one.level, []).append(
                ((one.wave.ttft_s(0.5), ttft_s), (one.wave.tokens_per_s, tokens_per_s)),
            )
    return [
        Comparison(level, _medians([pair for pair, _ in pairs]), _medians([pair for _, pair in pairs]))
        for level, pairs in lines.items()
    ]


def predict(arrivals: Sequence[Arrival], spec: HostSpec, cost: CostModel) -> tuple[float, float]:
    """TTFT p50 in seconds, and tokens/s from the start to the last token."""
    outcomes = simulate(arrivals, spec, cost).outcomes
    ttft_s = percentile([outcome.first_s - outcome.arrived_s for outcome in outcomes], 0.5)
    return ttft_s, sum(outcome.num_output for outcome in outcomes) / max(outcome.ended_s for outcome in outcomes)


def markdown(fitted: Fit, compared: Sequence[Comparison], num_rounds: int) -> str:
    """A table with the fit below it."""
    lines = [
        "| C | TTFT p50 measured | predicted | error | tokens/s measured | predicted | error |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in compared:
        ttft_error, rate_error = row.errors
        lines.append(
            f"| {row.level} | {row.ttft_s[0]:.2f} s | {row.ttft_s[1]:.2f} s | {ttft_error:+.1%}"
            f" | {row.tokens_per_s[0]:.1f} | {row.tokens_per_s[1]:.1f} | {rate_error:+.1%} |"
        )
    costs = ", ".join(f"`{name}` {1000 * seconds:.3f} ms" for name, seconds in asdict(fitted.model).items())
    return "\n".join(
        [
            *lines,
            "",
            f"Medians over {num_rounds} rounds, each predicted from the ticks of other waves sent between its own."
            f" Cost fitted to {fitted.num_ticks} ticks, those of all rounds: {costs};"
            f" R² {fitted.r_squared:.3f}, error of a tick: median {fitted.median_error:.1%},"
            f" p95 {fitted.p95_error:.1%}.",
        ]
    )


def _round(server: Running, levels: Sequence[int], num_prompt: int, num_output: int, seed: int) -> Round:
    """For every concurrency a wave to predict, between two to fit to, whose prompts and answers have other lengths; for
    a lone request two such waves, which are short. To fit to there are also two long prompts, and one wave in which
    chunks are computed beside decode."""
    ticks: list[Sample] = []
    played: list[Played] = []

    def to_fit(asks: Sequence[Ask]) -> None:
        first_tick = _recording(server).next_tick
        run_wave(server, asks)
        ticks.extend(samples(_recording(server), first_tick))

    to_fit(equal_wave(2, 300, 8, seed=seed + 200))
    for level in [1] * (1 in levels) + list(levels):
        seed += 1
        to_fit(equal_wave(level, 100, max(num_output * 3 // 8, 1), seed=seed + 100))
        played.append(_play(server, level, equal_wave(level, num_prompt, num_output, seed=seed)))
        to_fit(equal_wave(level, 160, max(num_output // 4, 1), seed=seed + 400))
    to_fit(mixed_wave(max(levels) // 2 or 1, 20, 300, 2.0, 24, seed=seed + 300))
    return Round(ticks, played)


def _recording(server: Running) -> Recording:
    return from_json(httpx.get(f"{server.url}/v1/recording", timeout=60).raise_for_status().json())


def _play(server: Running, level: int, asks: Sequence[Ask]) -> Played:
    lengths = [_num_tokens(server, ask.prompt) for ask in asks]
    wave = run_wave(server, asks)
    arrivals = [
        Arrival(outcome.sent_s, length, ask.max_tokens)
        for outcome, length, ask in zip(wave.outcomes, lengths, asks, strict=True)
    ]
    return Played(level, arrivals, wave)


def _num_tokens(server: Running, text: str) -> int:
    body = {"content": text, "add_special": True}
    answer = httpx.post(f"{server.url}/tokenize", json=body, timeout=60).raise_for_status()
    return len(answer.json()["tokens"])


def _spec(server: Running) -> HostSpec:
    """The host that the server is, as its recording has it."""
    recording = _recording(server)
    books = recording.checkpoint.books
    return HostSpec(
        recording.config,
        books.num_blocks,
        books.block_size,
        books.prefix_cache,
        books.min_prefix,
        books.ttl_s,
        max_queue_depth=None,
    )


def _medians(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    return statistics.median(one for one, _ in pairs), statistics.median(two for _, two in pairs)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
