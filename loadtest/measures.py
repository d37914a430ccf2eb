"""The figures of a run, from its raw lines: ``name``, ``name.STAGE`` or ``name.KIND``. Percentiles are raw values."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from loadtest.record import Exchange, Run
from loadtest.scenario import Scenario
from loadtest.waves import percentile

SHARES = {"p50": 0.50, "p95": 0.95, "p99": 0.99}
SETTLE = 0.25  # this share of a stage passes before its throughput is taken: users come, prompts are read
RECOVERED = 2.0  # times the median TTFT before a burst

Measures = dict[str, float]


def measure(run: Run, scenario: Scenario) -> Measures:
    """Every figure that can be told of the run."""
    measures = counts(run) | waits(run.exchanges) | server_side(run)
    if run.stages:
        begin_s, end_s = run.stages[0].at_s, run.end_s
        measures |= rates(run.exchanges, begin_s, end_s)
    if len(scenario.shape) > 1:
        for stage in scenario.shape:
            measures |= _named(_of_stage(run, stage.name), stage.name)
    if len(scenario.kinds) > 1:
        for kind in scenario.kinds:
            measures |= _named(waits([one for one in run.exchanges if one.kind == kind.name]), kind.name)
    if scenario.intruder is not None:
        measures |= beside(run.exchanges, scenario.intruder)
    if all(kind.once for kind in scenario.kinds):
        measures["in_turn"] = in_turn(run.exchanges)
    if (recovery_s := recovery(run)) is not None:
        measures["recovery_s"] = recovery_s
    for name, (over, under) in scenario.ratios.items():
        if measures.get(under) and over in measures:
            measures[name] = measures[over] / measures[under]
    return measures


def counts(run: Run) -> Measures:
    """How the requests ended. ``lost`` were taken in, or sent while the server was there, and have no proper end."""
    ones = run.exchanges
    unanswered = [one for one in ones if one.status is None and not one.left]
    late = [one for one in unanswered if run.drained_s is not None and one.at_s > run.drained_s]
    broken_off = [one for one in ones if one.status == 200 and one.has_failed]
    exit_code = {} if run.exit_code is None else {"exit_code": abs(run.exit_code)}
    return {
        "requests": len(ones),
        "answers": sum(one.is_good for one in ones),
        "refused": sum(one.is_refused for one in ones),
        "improper": sum(one.is_refused and not one.is_proper for one in ones),
        "failed": sum(one.has_failed for one in ones),
        "left": sum(one.left for one in ones),
        "lost": len(broken_off) + len(unanswered) - len(late),
        "unreachable": len(late),
        **exit_code,
    }


def waits(exchanges: Iterable[Exchange]) -> Measures:
    """Percentiles of TTFT, ITL, end-to-end latency and queue time, how even TTFT is among users, and the share of
    prompt tokens from the cache. Only of whole answers: of others nothing is known to its end."""
    good = [one for one in exchanges if one.is_good and one.moments_s]
    raw = {
        "ttft": [one.ttft_s for one in good if one.ttft_s is not None],
        "itl": [gap_s for one in good for gap_s in one.gaps_s],
        "e2e": [one.end_s for one in good],
        "queue": [one.queue_s for one in good if one.queue_s is not None],
    }
    measures = {
        f"{name}_{word}_s": percentile(values, share)
        for name, values in raw.items()
        if values
        for word, share in SHARES.items()
    }
    if good:
        measures["ttft_mean_s"] = statistics.mean(raw["ttft"])
        measures["ttft_fairness"] = fairness(good)
        measures["cached_share"] = sum(one.num_cached for one in good) / max(sum(one.num_prompt for one in good), 1)
    return measures


def fairness(exchanges: Sequence[Exchange]) -> float:
    """Jain's index over the users' mean TTFT: 1 when all wait alike, 1/n when one of n does all the waiting."""
    by_user: dict[str, list[float]] = {}
    for one in exchanges:
        by_user.setdefault(one.user, []).append(one.ttft_s or 0.0)
    means = [statistics.mean(values) for values in by_user.values()]
    squares = sum(mean**2 for mean in means)
    return sum(means) ** 2 / (len(means) * squares) if squares else 1.0


def in_turn(exchanges: Iterable[Exchange]) -> float:
    """Rank correlation of sending and first tokens: 1 when first come is first served, 0 when there is no order."""
    sent = [one.ttft_s + one.at_s for one in exchanges if one.is_good and one.ttft_s is not None]
    order = sorted(range(len(sent)), key=sent.__getitem__)
    return statistics.correlation(range(len(order)), order) if len(order) > 1 else 1.0


def rates(exchanges: Iterable[Exchange], begin_s: float, end_s: float) -> Measures:
    """Tokens/s between two moments: out by when they came, in by when their prompt had been read."""
    num_out, num_in = 0.0, 0.0
    for one in exchanges:
        num_out += sum(share for at_s, share in one.tokens_at_s if begin_s <= at_s < end_s)
        if one.ttft_s is not None and begin_s <= one.at_s + one.ttft_s < end_s:
            num_in += one.num_prompt
    took_s = max(end_s - begin_s, 1e-9)
    return {"tokens_out_per_s": num_out / took_s, "tokens_in_per_s": num_in / took_s}


def beside(exchanges: Sequence[Exchange], intruder: str) -> Measures:
    """Token gaps of all others, ``beside`` a prompt of the intruder being read and ``apart`` from it."""
    spans = [(one.at_s, one.at_s + one.ttft_s) for one in exchanges if one.kind == intruder and one.ttft_s is not None]
    gaps: dict[str, list[float]] = {"beside": [], "apart": []}
    for one in exchanges:
        if one.kind == intruder:
            continue
        for end_s, gap_s in zip(one.moments_s[1:], one.gaps_s, strict=True):
            late_s, early_s = one.at_s + end_s, one.at_s + end_s - gap_s
            is_beside = any(early_s < until_s and late_s > from_s for from_s, until_s in spans)
            gaps["beside" if is_beside else "apart"].append(gap_s)
    return {
        f"itl_{word}_s.{where}": percentile(values, share)
        for where, values in gaps.items()
        if values
        for word, share in SHARES.items()
    }


def recovery(run: Run) -> float | None:
    """Seconds from the end of a stage ``burst`` until a request is sent whose TTFT is about what it was ``before``; the
    whole time there was if that never happened, None if there was no burst."""
    try:
        before, after = run.span_of("before"), run.span_of("after")
    except KeyError:
        return None
    known = [one.ttft_s for one in _sent_in(run, before) if one.is_good and one.ttft_s is not None]
    if not known:
        return None
    good_s = RECOVERED * percentile(known, 0.5)
    for one in _sent_in(run, after):
        if one.is_good and one.ttft_s is not None and one.ttft_s <= good_s:
            return one.at_s - after[0]
    return after[1] - after[0]


def server_side(run: Run) -> Measures:
    """What the server held at the end, what it pushed out on the way, the fullest its pool was, and how it grew."""
    if not run.servers or run.drained_s is not None:
        return {}
    first, last = run.servers[0].values, run.servers[-1].values
    blocks = "mlxcel_cache_pool_paged_blocks"
    measures = {
        "slots_held": last["mlxcel_slots"] - last["mlxcel_slots_available"],
        "blocks_held": last[f"{blocks}_live"],
        "queued": last["mlxcel_queue_depth"],
        "pool_peak_share": max(
            look.values[f"{blocks}_live"] / max(look.values[f"{blocks}_allocated"], 1) for look in run.servers
        ),
        "preemptions": sum(
            value - first.get(name, 0.0) for name, value in last.items() if name.startswith("mlxcel_batch_preemptions")
        ),
    }
    sizes = [look.rss_bytes for look in run.servers if look.rss_bytes is not None]
    tenth = len(sizes) // 10
    if tenth:
        # The first tenth is warm-up: buffers reach their sizes in it.
        early, late = sizes[tenth : 2 * tenth], sizes[-tenth:]
        measures["rss_growth"] = statistics.mean(late) / statistics.mean(early) - 1
    return measures


def _of_stage(run: Run, name: str) -> Measures:
    try:
        span = run.span_of(name)
    except KeyError:
        return {}
    settled_s = span[0] + SETTLE * (span[1] - span[0])
    sent = _sent_in(run, span)
    return waits(sent) | rates(run.exchanges, settled_s, span[1]) | {"refused": sum(one.is_refused for one in sent)}


def _sent_in(run: Run, span: tuple[float, float]) -> list[Exchange]:
    return [one for one in run.exchanges if span[0] <= one.at_s < span[1]]


def _named(measures: Measures, suffix: str) -> Measures:
    return {f"{name}.{suffix}": value for name, value in measures.items()}
