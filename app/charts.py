"""Plots of simulations and of recordings. matplotlib is asked for only when one is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from app.errors import MlxcelError
from app.scheduler.replay import TickView


class NoPlots(MlxcelError):
    """matplotlib is not installed, or cannot write such a file."""


def draw_simulation(reports: Sequence[dict[str, Any]], shown: dict[str, Any], path: Path) -> None:
    """TTFT by number of hosts, and occupancy over time of the run to be ``shown``.

    Raises:
        NoPlots: see there.
    """
    pyplot = _pyplot()
    figure, (curve, places, pool) = pyplot.subplots(1, 3, figsize=(15, 4), layout="constrained")
    hosts = [report["hosts"] for report in reports]
    for name in ("p50", "p95"):
        curve.plot(hosts, [report["ttft_s"][name] for report in reports], marker="o", label=f"TTFT {name}")
    curve.set(xlabel="hosts", ylabel="seconds", ylim=(0, None), title="TTFT")
    spans = shown["occupancy"]
    at_s = [span["at_s"] for span in spans]
    for name in ("running", "waiting"):
        places.plot(at_s, [span[name] for span in spans], label=name)
    places.set(xlabel="seconds", ylabel="requests", ylim=(0, None), title=f"{shown['hosts']} hosts")
    pool.plot(at_s, [100 * span["pool_share"] for span in spans], label="blocks held")
    pool.set(xlabel="seconds", ylabel="% of the pool", ylim=(0, 100), title="block pool")
    for axes in (curve, places, pool):
        axes.grid(alpha=0.3)
        axes.legend()
    _save(figure, path)


def draw_recording(ticks: Sequence[TickView], path: Path) -> None:
    """Each request on a line of its own: chunks as bars, decode as a thin line; below it what the pool held.

    Raises:
        NoPlots: see there.
    """
    pyplot = _pyplot()
    figure, (lines, pool) = pyplot.subplots(
        2, 1, figsize=(14, 8), sharex=True, height_ratios=(4, 1), layout="constrained"
    )
    start_s = ticks[0].began_s
    bars: dict[bool, list[list[float]]] = {True: [[], [], []], False: [[], [], []]}
    for tick in ticks:
        for request_id, _, num_new, _ in tick.rows:
            for values, value in zip(
                bars[num_new > 1], (request_id, tick.seconds, tick.began_s - start_s), strict=True
            ):
                values.append(value)
    for is_chunk, (ids, seconds, lefts) in bars.items():
        lines.barh(ids, seconds, left=lefts, height=0.8 if is_chunk else 0.3, label="chunk" if is_chunk else "decode")
    requeues = [tick.began_s - start_s for tick in ticks if tick.num_requeued]
    lines.vlines(requeues, *lines.get_ylim(), colors="red", linewidth=0.5, label="requeued")
    lines.set(ylabel="request")
    lines.legend()
    pool.step([tick.began_s - start_s for tick in ticks], [tick.live_blocks for tick in ticks])
    pool.set(xlabel="seconds", ylabel="blocks held", ylim=(0, None))
    _save(figure, path)


def _pyplot() -> Any:
    try:
        import matplotlib as mpl
    except ImportError:
        raise NoPlots("plots need matplotlib, which is in the extra `load`: pip install 'mlxcel[load]'") from None
    mpl.use("agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, path: Path) -> None:
    try:
        figure.savefig(path)
    except (OSError, ValueError) as error:
        raise NoPlots(f"{path} cannot be drawn: {error}") from None
