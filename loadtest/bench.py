"""``make bench``: this server and mlx-lm's own, side by side on one model directory, in interleaved rounds.

Figures are medians over the rounds; what counts are the ratios, since both servers saw the same machine. Run nothing
else meanwhile. Writes JSON and a plot.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from loadtest.contestants import ROOT, Contestant, Running, ours, peer, running
from loadtest.waves import Ask, Wave, equal_wave, mixed_wave, run_wave

Results = dict[str, dict[str, list[Wave]]]  # contestant -> workload -> one wave a round
MIXED = "mixed"
STOCK = "mlx-lm"
# Unpacks the embedded model to float32, which is what both servers compute on a CPU: the peer keeps weights as stored.
UNPACK = """
import sys, shutil
from pathlib import Path
from app.engine import blas
blas.preload("auto", "auto")
from app.engine import gguf, loader
import mlx.core as mx
from mlx_lm.utils import save_model, save_config
target, cache = Path(sys.argv[1]), Path(sys.argv[2])
source = loader.model_directory("embedded", cache, True)
loaded = loader.load(source, "float32")
target.mkdir(parents=True, exist_ok=True)
save_model(target, loaded.model)
config = {k: v for k, v in loaded.config.items() if not k.startswith("quantization")}
save_config(config, target / "config.json")
for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
    shutil.copy(source / name, target / name)
"""


def main() -> None:
    options = _options()
    options.out.mkdir(parents=True, exist_ok=True)
    model = options.model or unpacked(options.out)
    levels = options.concurrency
    contestants = [ours(model, max(levels))]
    if options.peer:
        contestants.append(peer(model, max(levels), with_blas=True))
    if options.peer and options.stock:
        contestants.append(peer(model, max(levels), with_blas=False))
    results, servers = _measure(contestants, options)
    report = {
        "model": str(model.name),
        "num_prompt_tokens": options.prompt,
        "num_new_tokens": options.tokens,
        "rounds": options.rounds,
        "in_process_tokens_per_s": _in_process(model, options),
        "servers": {
            server.name: {
                "peak_rss_mib": round(server.peak_rss_bytes / 2**20),
                "start_s": round(server.start_s, 2),
                "workloads": {name: _figures(waves) for name, waves in results[server.name].items()},
            }
            for server in servers
        },
        "raw": {name: {w: [asdict(x) for x in waves] for w, waves in loads.items()} for name, loads in results.items()},
    }
    (options.out / "bench.json").write_text(json.dumps(report, indent=1))
    _print(report)
    _plot(report, levels, options.out / "bench.svg")
    print(f"\nwritten: {options.out / 'bench.json'}, {options.out / 'bench.svg'}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench", description=__doc__)
    parser.add_argument("--model", type=Path, help="model directory (unset: the embedded model in float32)")
    parser.add_argument("--concurrency", type=lambda text: [int(n) for n in text.split(",")], default=[1, 4, 8, 16])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompt", type=int, default=80, help="prompt tokens")
    parser.add_argument("--tokens", type=int, default=64, help="new tokens")
    parser.add_argument("--no-peer", dest="peer", action="store_false", help="measure this server alone")
    parser.add_argument("--no-stock", dest="stock", action="store_false", help="leave out the peer without a BLAS")
    parser.add_argument("--no-mixed", dest="mixed", action="store_false", help="leave out the mixed lengths")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench")
    return parser.parse_args()


def unpacked(out: Path) -> Path:
    """The embedded model in float32 as a model directory under ``out``, made once."""
    target = out / "smollm2-float32"
    if not (target / "generation_config.json").exists():
        print("unpacking the embedded model to float32", file=sys.stderr)
        subprocess.run([sys.executable, "-c", UNPACK, str(target), str(out)], check=True, cwd=ROOT)
    return target


def _measure(contestants: list[Contestant], options: argparse.Namespace) -> tuple[Results, list[Running]]:
    """All servers run at once and take turns, so that a noisy minute hurts them alike."""
    results: Results = {contestant.name: {} for contestant in contestants}
    with ExitStack() as stack:
        servers = [stack.enter_context(running(contestant, options.out)) for contestant in contestants]
        for round_ in range(options.rounds):
            for name, asks in _workloads(options, round_).items():
                for server in servers:
                    if server.name == STOCK and (round_ > 0 or name == MIXED):
                        continue  # one round tells it: its rate does not depend on the concurrency
                    began_s = time.monotonic()
                    wave = run_wave(server, asks)
                    results[server.name].setdefault(name, []).append(wave)
                    took_s = time.monotonic() - began_s
                    print(
                        f"round {round_ + 1}  {name:6} {server.name:18} {wave.tokens_per_s:7.1f} tok/s {took_s:6.1f} s",
                        file=sys.stderr,
                    )
    return results, servers


def _workloads(options: argparse.Namespace, round_: int) -> dict[str, list[Ask]]:
    loads = {
        f"C={level}": equal_wave(level, options.prompt, options.tokens, seed=1000 * round_ + level)
        for level in options.concurrency
    }
    if options.mixed:
        loads[MIXED] = mixed_wave(16, 20, 800, 2.0, options.tokens, seed=1000 * round_)
    return loads


def _in_process(model: Path, options: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, "-m", "loadtest.in_process", str(model), str(options.prompt), str(options.tokens)]
    command += [str(level) for level in options.concurrency]
    runs = [
        json.loads(subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.PIPE).stdout)
        for _ in range(options.rounds)
    ]
    return {f"C={level}": round(statistics.median(run[level] for run in runs), 1) for level in runs[0]}


def _figures(waves: list[Wave]) -> dict[str, float]:
    def median(values: list[float]) -> float:
        return round(statistics.median(values), 3)

    return {
        "tokens_per_s": median([wave.tokens_per_s for wave in waves]),
        "ttft_p50_s": median([wave.ttft_s(0.5) for wave in waves]),
        "ttft_p95_s": median([wave.ttft_s(0.95) for wave in waves]),
        "itl_mean_s": median([wave.itl_s for wave in waves]),
    }


def _print(report: dict[str, Any]) -> None:
    servers = report["servers"]
    (first, *others) = servers
    print(f"\n{'server':18} {'load':6} {'tok/s':>7} {'gain':>6} {'TTFT p50':>9} {'p95':>7} {'ITL':>7}  ratio to peer")
    for name, server in servers.items():
        base = server["workloads"].get("C=1", {}).get("tokens_per_s")
        for load, figures in server["workloads"].items():
            gain = f"{figures['tokens_per_s'] / base:.2f}x" if base else ""
            ratios = [
                f"{figures['tokens_per_s'] / theirs['tokens_per_s']:.2f}x tok/s, "
                f"{figures['ttft_p50_s'] / theirs['ttft_p50_s']:.2f}x TTFT ({other})"
                for other in others
                if name == first and (theirs := servers[other]["workloads"].get(load))
            ]
            print(
                f"{name:18} {load:6} {figures['tokens_per_s']:7.1f} {gain:>6} {figures['ttft_p50_s']:8.2f}s "
                f"{figures['ttft_p95_s']:6.2f}s {figures['itl_mean_s'] * 1000:5.0f}ms  {'; '.join(ratios)}"
            )
        print(f"{'':18} peak RSS {server['peak_rss_mib']} MiB, ready after {server['start_s']} s")
    print(f"in process: {report['in_process_tokens_per_s']} tok/s")


def _plot(report: dict[str, Any], levels: list[int], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    figure, (rates, waits) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for name, server in report["servers"].items():
        loads = [server["workloads"][f"C={level}"] for level in levels]
        rates.plot(levels, [load["tokens_per_s"] for load in loads], marker="o", label=name)
        waits.plot(levels, [load["ttft_p50_s"] for load in loads], marker="o", label=name)
    for axes, label in ((rates, "tokens/s"), (waits, "TTFT p50 (s)")):
        axes.set(xlabel="concurrent requests", ylabel=label, xticks=levels, ylim=(0, None))
        axes.grid(alpha=0.3)
    rates.legend()
    figure.savefig(path)


if __name__ == "__main__":
    main()
