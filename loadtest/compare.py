"""The same scenario against two servers, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from loadtest.bench import unpacked
from loadtest.contestants import peer
from loadtest.report import columns
from loadtest.run import Options, perform
from loadtest.scenario import Scenario
from loadtest.verdict import Outcome, Verdict
from loadtest.waves import END_TOKENS

SHOWN = (
    "requests",
    "answers",
    "refused",
    "failed",
    "lost",
    "tokens_in_per_s",
    "tokens_out_per_s",
    "ttft_p50_s",
    "ttft_p95_s",
    "itl_p50_s",
    "itl_p95_s",
    "e2e_p50_s",
    "e2e_p95_s",
)


def compare(scenario: Scenario, options: Options, peer_url: str | None) -> str:
    """Run against our server and then against the peer: the server at ``peer_url``, or mlx-lm's own, started here with
    the same model. Returns a table.

    Raises:
        RuntimeError: as ``run.perform``.
    """
    ours, theirs = options, replace(options, out=options.out / "peer")
    if peer_url is not None:
        theirs = replace(theirs, host=peer_url, fields="{}")
        name = peer_url
    else:
        model = unpacked(options.out) if options.model == "embedded" else Path(options.model)
        rows = int(scenario.server["N_PARALLEL"])
        contestant = peer(model, rows, with_blas=True)
        # It knows no ignore_eos: end tokens are biased away instead.
        fields = f'{{"logit_bias": {str(END_TOKENS).replace(chr(39), chr(34))}}}'
        ours = replace(ours, model=str(model))
        theirs = replace(theirs, contestant=contestant, fields=fields)
        name = contestant.name
    return side_by_side({"mlxcel": perform(scenario, ours)[1], name: perform(scenario, theirs)[1]})


def side_by_side(verdicts: Mapping[str, Verdict]) -> str:
    """The measures of two runs and how many times the second is of the first. Faults of either are told below."""
    (first, mine), (second, other) = verdicts.items()
    rows = [["measure", first, second, f"{second} / {first}"]]
    shown = [*SHOWN, *(name for name in mine.measures if name.startswith("tokens_out_per_s.") or "gain" in name)]
    for name in shown:
        left, right = mine.measures.get(name), other.measures.get(name)
        if left is None and right is None:
            continue
        ratio = f"{right / left:.2f}" if left and right is not None else ""
        rows.append([name, *("" if value is None else f"{value:.4g}" for value in (left, right)), ratio])
    faults = [
        f"{name}: invalid: {fault}"
        for name, verdict in verdicts.items()
        if verdict.outcome is Outcome.INVALID
        for fault in verdict.faults
    ]
    return "\n".join([columns(rows), *faults])
