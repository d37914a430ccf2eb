"""Whether the server counted what its clients saw: requests, tokens and refusals exactly, mean TTFT within a share."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass

from loadtest.record import Run


@dataclass(frozen=True)
class Comparison:
    """One number as the clients saw it and as the server counted it. ``tolerance`` is how far apart they may be."""

    name: str
    clients: float
    server: float
    tolerance: float = 0.0

    @property
    def agrees(self) -> bool:
        return abs(self.clients - self.server) <= self.tolerance


def compare(run: Run, ttft_share: float, ttft_floor_s: float, is_alone: bool) -> list[Comparison]:
    """Clients and server over the whole run, nothing where the server has no metrics. ``is_alone``: nobody but the
    clients and the scrapes asked the server anything, so that all its responses can be accounted for."""
    if len(run.servers) < 2:
        return []
    first, last = run.servers[0].values, run.servers[-1].values
    grown = {name: value - first.get(name, 0.0) for name, value in last.items()}
    answered = [one for one in run.exchanges if one.is_good]

    def responses(kind: int) -> int:
        return sum(one.status is not None and one.status // 100 == kind for one in run.exchanges)

    compared = [
        Comparison("answers", len(answered), _total(grown, "mlxcel_batch_sequences_completed_total", "stop", "length")),
        Comparison("prompt tokens", sum(one.num_prompt for one in answered), grown["mlxcel_prompt_tokens_total"]),
        Comparison("output tokens", sum(one.num_new for one in answered), grown["mlxcel_completion_tokens_total"]),
        Comparison("5xx responses", responses(5), _total(grown, "mlxcel_requests_total", "5xx")),
        Comparison("4xx responses", responses(4), _total(grown, "mlxcel_requests_total", "4xx")),
    ]
    if is_alone:
        # A scrape is counted after it has been answered: the last one is not in what it tells.
        scrapes = len(run.servers) - 1
        compared.append(
            Comparison("2xx responses", responses(2) + scrapes, _total(grown, "mlxcel_requests_total", "2xx"))
        )
    waits_s = [one.ttft_s for one in answered if one.ttft_s is not None]
    num_observed = grown.get("mlxcel_request_ttft_seconds_count", 0.0)
    if waits_s and num_observed:
        server_s = grown["mlxcel_request_ttft_seconds_sum"] / num_observed
        tolerance_s = max(ttft_share * server_s, ttft_floor_s)
        compared.append(Comparison("mean TTFT (s)", statistics.mean(waits_s), server_s, tolerance_s))
    return compared


def _total(grown: Mapping[str, float], name: str, *labels: str) -> float:
    """The sum of a counter over the values of its only label."""
    mine = [sample for sample in grown if sample.startswith(f"{name}{{")]
    return sum(grown[sample] for sample in mine if sample[:-1].endswith(labels))
