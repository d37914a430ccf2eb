"""Play a workload on simulated hosts, and say what waits, rates and capacity come to."""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from app import charts
from app.commands.numbers import real, span, whole
from app.errors import MlxcelError
from app.scheduler import workload
from app.scheduler.cost import PRESETS, CostModel, fit, read_cost
from app.scheduler.fake_host import HostSpec
from app.scheduler.fleet import BALANCES, simulate
from app.scheduler.policy import SchedulerConfig
from app.scheduler.recording import read, samples
from app.scheduler.report import Target, fewest_hosts, report
from app.scheduler.workload import Arrival, BadTrace, Lengths, Shape

PROGRESS_S = 2.0
LEAST = 1e-6  # of what must not be zero
COLUMNS: tuple[tuple[str, str, Callable[[dict[str, Any]], float]], ...] = (
    ("hosts", "5.0f", lambda report: report["hosts"]),
    ("TTFT p50", "8.2f", lambda report: report["ttft_s"]["p50"]),
    ("p95", "7.2f", lambda report: report["ttft_s"]["p95"]),
    ("p99", "7.2f", lambda report: report["ttft_s"]["p99"]),
    ("ITL p50", "7.3f", lambda report: report["itl_s"]["p50"]),
    ("p95", "6.3f", lambda report: report["itl_s"]["p95"]),
    ("queue p95", "9.2f", lambda report: report["queue_s"]["p95"]),
    ("tokens/s", "8.1f", lambda report: report["output_tokens_per_s"]),
    ("good/s", "7.2f", lambda report: report["goodput_per_s"]),
    ("good %", "6.1f", lambda report: 100 * report["good_share"]),
    ("refused", "7.0f", lambda report: report["refused"]),
    ("preempted", "9.0f", lambda report: sum(report["preemptions"].values())),
    ("pool peak %", "11.1f", lambda report: 100 * max(span["pool_share"] for span in report["occupancy"])),
)


class NoFolder(MlxcelError):
    """Where figures are to be written there is no folder."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    cost = parser.add_argument_group("what a tick costs")
    cost.add_argument("--cost", default="m1-ultra-8b", help=f"a file, or {', '.join(PRESETS)} (default)")
    cost.add_argument("--fit", type=Path, metavar="RECORDING", help="fit it to the measured ticks of a recording")
    cost.add_argument("--save-cost", type=Path, metavar="FILE", help="write it down, to be given as --cost")
    load = parser.add_argument_group("who asks")
    load.add_argument("--trace", type=Path, metavar="FILE", help=f"CSV: {','.join(workload.COLUMNS)}")
    load.add_argument("--generate", choices=("poisson", "bursty", "multi-turn"), help="make a workload up")
    load.add_argument("--requests", type=whole(1), default=1000, metavar="N", help="how many; 1000")
    load.add_argument("--rate", type=real(LEAST), default=1.0, help="requests a second, on average; 1")
    load.add_argument("--prompt", type=_lengths, default=Lengths(64, 512), metavar="A-B", help="tokens; 64-512")
    load.add_argument("--output", type=_lengths, default=Lengths(32, 128), metavar="A-B", help="tokens; 32-128")
    load.add_argument(
        "--prefixes", type=whole(0), default=0, metavar="N", help="how many shared texts prompts begin with"
    )
    load.add_argument("--shared", type=whole(1), default=512, metavar="N", help="tokens of such a text; 512")
    load.add_argument("--burst", type=whole(1), default=8, metavar="N", help="bursty: how many at a time; 8")
    load.add_argument("--turns", type=whole(1), default=4, metavar="N", help="multi-turn: requests a conversation; 4")
    load.add_argument("--think", type=real(0), default=5.0, metavar="S", help="multi-turn: seconds between them; 5")
    load.add_argument("--seed", type=int, default=1)
    host = parser.add_argument_group("who answers")
    host.add_argument("--hosts", type=span, default=(1, 1), metavar="N|A-B", help="a number, or a range to try; 1")
    host.add_argument("--balance", choices=BALANCES, default="least-connections")
    host.add_argument("--slots", type=whole(1), default=4, help="rows of a host; 4")
    host.add_argument("--queue-depth", type=_depth, default=32, metavar="N", help="who may wait there, or none; 32")
    host.add_argument("--blocks", type=whole(1), default=1024, help="blocks of its pool; 1024")
    host.add_argument("--block-size", type=whole(1), default=32, help="tokens a block; 32")
    host.add_argument("--chunk", type=whole(0), metavar="N", help="prefill chunk; 2048 alone, 512 beside others")
    host.add_argument("--watermark", type=real(0, 1), default=0.01, help="share kept free at admission; 0.01")
    host.add_argument("--itl-budget", type=real(LEAST), metavar="MS", help="keep gaps within, by smaller chunks")
    host.add_argument("--enable-preemption", action="store_true")
    host.add_argument("--no-prompt-cache", action="store_true")
    out = parser.add_argument_group("what to say")
    out.add_argument("--ttft", type=real(0), default=2.0, metavar="S", help="a good answer begins within; 2 s")
    out.add_argument("--itl", type=real(0), metavar="S", help="... and has this mean gap between tokens at most")
    out.add_argument("--json", type=Path, metavar="FILE", help="write all figures, and occupancy over time")
    out.add_argument("--plot", type=Path, metavar="FILE", help="draw them (.svg, .png, .pdf)")


def run(arguments: argparse.Namespace) -> int:
    """Raises MlxcelError: a file that cannot be used, or no matplotlib."""
    for path in (arguments.save_cost, arguments.json, arguments.plot):
        if path is not None and not path.parent.is_dir():
            raise NoFolder(f"{path} cannot be written: there is no folder {path.parent}")
    cost = _cost(arguments)
    if arguments.fit and not (arguments.trace or arguments.generate):
        return 0
    arrivals = _arrivals(arguments)
    if not arrivals:
        raise BadTrace(f"{arguments.trace} has no requests in it")
    # Nothing that a simulation makes is a cycle, and looking for some among millions of objects would take minutes.
    gc.disable()
    reports: dict[int, dict[str, Any]] = {}
    target = Target(arguments.ttft, arguments.itl)

    def is_enough(num_hosts: int) -> bool:
        began_s = time.monotonic()
        played = simulate(arrivals, _spec(arguments), cost, num_hosts, arguments.balance, progress=_Progress(arrivals))
        reports[num_hosts] = report(played, arrivals, target)
        reports[num_hosts]["took_s"] = time.monotonic() - began_s
        return reports[num_hosts]["ttft_s"]["p95"] <= arguments.ttft and not played.refused

    least, most = arguments.hosts
    enough = fewest_hosts(is_enough, least, most)
    runs = [reports[number] for number in sorted(reports)]
    if all(run["refused"] == run["requests"] for run in runs):
        raise BadTrace(f"every request is refused: a host holds {arguments.blocks * arguments.block_size} tokens")
    print(table(runs))
    if least < most:
        answer = f"{enough} hosts" if enough else f"more than {most} hosts"
        print(f"TTFT p95 within {arguments.ttft:g} s and nobody refused: {answer}")
    if arguments.json:
        figures = {"cost": asdict(cost), "runs": runs}
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
    if arguments.plot:
        charts.draw_simulation(runs, reports[enough or most], arguments.plot)
    return 0


def table(reports: Sequence[dict[str, Any]]) -> str:
    """One line a run; times in seconds."""
    widths = [int(style.split(".")[0]) for _, style, _ in COLUMNS]
    lines = ["  ".join(f"{name:>{width}}" for (name, _, _), width in zip(COLUMNS, widths, strict=True))]
    lines += ["  ".join(f"{value(report):{style}}" for _, style, value in COLUMNS) for report in reports]
    return "\n".join(lines)


def _cost(arguments: argparse.Namespace) -> CostModel:
    if arguments.fit:
        fitted = fit(samples(read(arguments.fit)))
        cost = fitted.model
        tick_ms, row_ms, token_ms, block_ms = (1000 * seconds for seconds in asdict(cost).values())
        print(
            f"{fitted.num_ticks} ticks: {tick_ms:.3f} ms + {row_ms:.3f} a row of one token"
            f" + {token_ms:.3f} a prefill token + {block_ms:.4f} a block of context\n"
            f"R² {fitted.r_squared:.3f}, error of a tick: median {fitted.median_error:.1%}, p95 {fitted.p95_error:.1%}"
        )
    elif arguments.cost in PRESETS:
        cost = PRESETS[arguments.cost]
    else:
        cost = read_cost(Path(arguments.cost))
    if arguments.save_cost:
        arguments.save_cost.write_text(json.dumps(asdict(cost), indent=1) + "\n")
    return cost


def _arrivals(arguments: argparse.Namespace) -> list[Arrival]:
    if arguments.trace:
        return workload.read_trace(arguments.trace)
    shared = arguments.shared if arguments.prefixes else 0
    shape = Shape(arguments.prompt, arguments.output, arguments.prefixes, shared)
    common = (arguments.requests, arguments.rate, shape, arguments.seed)
    if arguments.generate == "bursty":
        return list(workload.bursty(*common, arguments.burst))
    if arguments.generate == "multi-turn":
        return list(workload.multi_turn(*common, arguments.turns, arguments.think))
    return list(workload.poisson(*common))


def _spec(arguments: argparse.Namespace) -> HostSpec:
    config = SchedulerConfig(
        num_slots=arguments.slots,
        max_batch_size=arguments.slots,
        prefill_chunk=arguments.chunk,
        watermark=arguments.watermark,
        itl_budget_s=arguments.itl_budget / 1000 if arguments.itl_budget else None,
        enable_preemption=arguments.enable_preemption,
    )
    return HostSpec(
        config,
        arguments.blocks,
        arguments.block_size,
        not arguments.no_prompt_cache,
        max_queue_depth=arguments.queue_depth,
    )


class _Progress:
    """Tells a terminal or a log, every few seconds, how far a simulation is."""

    def __init__(self, arrivals: Sequence[Arrival]) -> None:
        self._num_arrivals = len(arrivals)
        self._began_s = self._told_s = time.monotonic()

    def __call__(self, num_done: int, virtual_s: float) -> None:
        now = time.monotonic()
        if now - self._told_s >= PROGRESS_S:
            self._told_s = now
            took_s = now - self._began_s
            left_s = took_s * (self._num_arrivals / num_done - 1)
            print(
                f"{num_done} of {self._num_arrivals} requests, {virtual_s:.0f} s simulated in {took_s:.0f} s,"
                f" about {left_s:.0f} s to go",
                file=sys.stderr,
            )


def _lengths(text: str) -> Lengths:
    return Lengths(*span(text))


def _depth(text: str) -> int | None:
    return None if text == "none" else whole(0)(text)
