"""Plots of one run as SVG text: what its lines show, over time and over users."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from loadtest.measures import Measures
from loadtest.record import Run
from loadtest.scenario import Scenario


def plots(run: Run, scenario: Scenario, measures: Measures) -> dict[str, str]:
    """SVG elements by title, only of those plots for which there is something to show."""
    drawn = {
        "TTFT, share of requests": _ttft_cdf(run),
        "ITL over time": _itl_over_time(run),
        "Throughput against users": _throughput(scenario, measures),
        "Block pool and requests": _occupancy(run),
        "503s": _refusals(run),
    }
    return {title: _svg(draw) for title, draw in drawn.items() if draw is not None}


Draw = Callable[[Any], None]


def _svg(draw: Draw) -> str:
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.2), layout="constrained")
    draw(axes)
    axes.grid(alpha=0.3)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg")
    pyplot.close(figure)
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _ttft_cdf(run: Run) -> Draw | None:
    kinds: dict[str, list[float]] = {}
    for one in run.exchanges:
        if one.is_good and one.ttft_s is not None:
            kinds.setdefault(one.kind, []).append(one.ttft_s)

    def draw(axes: Any) -> None:
        for kind, values in kinds.items():
            axes.ecdf(values, label=kind)
        axes.set(xlabel="TTFT (s)", ylabel="share of requests", xlim=(0, None), ylim=(0, 1))
        axes.legend()

    return draw if kinds else None


def _itl_over_time(run: Run) -> Draw | None:
    start_s = _start_s(run)
    gaps = [
        (one.at_s + at_s - start_s, gap_s * 1000)
        for one in run.exchanges
        for at_s, gap_s in zip(one.moments_s[1:], one.gaps_s, strict=True)
    ]
    # A client sees an admission as the first token's coming, less the time the prompt took.
    admitted = [one.at_s + one.queue_s - start_s for one in run.exchanges if one.is_good and one.queue_s is not None]

    def draw(axes: Any) -> None:
        axes.scatter(*zip(*gaps, strict=True), s=3, linewidths=0, alpha=0.5, rasterized=len(gaps) > 5000)
        top = axes.get_ylim()[1]
        axes.vlines(admitted, 0, top * 0.04, colors="red", linewidth=0.6, label="admissions")
        axes.set(xlabel="seconds", ylabel="ITL (ms)", ylim=(0, top))
        axes.legend()

    return draw if gaps else None


def _throughput(scenario: Scenario, measures: Measures) -> Draw | None:
    points = [
        (stage.num_users, measures[name])
        for stage in scenario.shape
        if (name := f"tokens_out_per_s.{stage.name}") in measures
    ]

    def draw(axes: Any) -> None:
        axes.plot(*zip(*points, strict=True), marker="o")
        axes.set(xlabel="users", ylabel="tokens/s out", xlim=(0, None), ylim=(0, None))

    users = [num_users for num_users, _ in points]
    return draw if len(users) > 1 and users == sorted(set(users)) else None


def _occupancy(run: Run) -> Draw | None:
    start_s = _start_s(run)

    def draw(axes: Any) -> None:
        at_s = [look.at_s - start_s for look in run.servers]
        axes.plot(at_s, [look.values["mlxcel_batch_current_size"] for look in run.servers], label="running")
        axes.plot(at_s, [look.values["mlxcel_queue_depth"] for look in run.servers], label="waiting")
        axes.set(xlabel="seconds", ylabel="requests", ylim=(0, None))
        axes.legend(loc="upper left")
        pool = axes.twinx()
        live = [look.values["mlxcel_cache_pool_paged_blocks_live"] for look in run.servers]
        pool.plot(at_s, live, color="grey", linestyle="--", label="blocks held")
        pool.set(ylabel="blocks", ylim=(0, None))
        pool.legend(loc="upper right")

    return draw if len(run.servers) > 1 else None


def _refusals(run: Run) -> Draw | None:
    start_s = _start_s(run)
    at_s = [one.at_s - start_s for one in run.exchanges if one.is_refused]

    def draw(axes: Any) -> None:
        last_s = max(one.at_s for one in run.exchanges) - start_s
        num_bins = int(last_s) + 1  # a second each
        axes.hist(at_s, bins=num_bins, range=(0, num_bins))
        axes.set(xlabel="seconds", ylabel="503s a second", xlim=(0, None))

    return draw if at_s else None


def _start_s(run: Run) -> float:
    return min([one.at_s for one in run.exchanges[:1]] + [one.at_s for one in run.stages[:1]], default=0.0)
