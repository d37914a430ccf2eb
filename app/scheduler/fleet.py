"""Many simulated hosts behind a balancer, in one virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice
from operator import attrgetter
from typing import Protocol

from app.scheduler.cost import CostModel
from app.scheduler.fake_host import HostSpec
from app.scheduler.simulator import Host, Outcome
from app.scheduler.tally import Tally
from app.scheduler.workload import Arrival

PROGRESS_EVERY = 1000


class Balance(Protocol):
    """Chooses the host of an arrival. An instance serves one simulation: it may remember."""

    def __call__(self, hosts: Sequence[Host], arrival: Arrival) -> Host: ...


def least_connections(hosts: Sequence[Host], arrival: Arrival) -> Host:
    """The host with the fewest requests queued or running, the first of equals."""
    return min(hosts, key=attrgetter("num_in_flight"))


class PrefixAffinity:
    """A shared prefix goes where it went last, so that it is found in the cache there, unless a request would have to
    wait on that host and not on another; then that one is its new home. The rest goes by least connections."""

    def __init__(self) -> None:
        self._homes: dict[int, Host] = {}

    def __call__(self, hosts: Sequence[Host], arrival: Arrival) -> Host:
        home = self._homes.get(arrival.prefix)
        if home is not None and home.num_in_flight < home.num_slots:
            return home
        freest = least_connections(hosts, arrival)
        if home is not None and freest.num_in_flight >= freest.num_slots:
            return home
        if arrival.prefix:
            self._homes[arrival.prefix] = freest
        return freest


BALANCES: dict[str, Callable[[], Balance]] = {
    "least-connections": lambda: least_connections,
    "prefix-affinity": PrefixAffinity,
}


@dataclass(frozen=True, slots=True)
class Run:
    """What a simulation came to. ``refused`` are numbers of arrivals that met a full queue."""

    hosts: Sequence[Host]
    tally: Tally
    outcomes: Sequence[Outcome]
    refused: Sequence[int]


def simulate(
    workload: Sequence[Arrival],
    spec: HostSpec,
    cost: CostModel,
    num_hosts: int = 1,
    balance: str = "least-connections",
    leaps: bool = True,
    progress: Callable[[int, float], None] = lambda num_done, now: None,
) -> Run:
    """Play a workload to its end. ``progress`` is told from time to time how many arrivals are done with, and the
    virtual time in seconds. A request that waits for the answer to a refused one is refused with it."""
    tally = Tally(num_hosts)
    hosts = [Host(number, spec, cost, tally, leaps) for number in range(num_hosts)]
    choose = BALANCES[balance]()
    outcomes: list[Outcome] = []
    refused: list[int] = []
    followers: dict[int, list[int]] = {}
    for index, arrival in enumerate(workload):
        if arrival.after is not None:
            followers.setdefault(arrival.after, []).append(index)
    # Two heaps of (moment, number): arrivals that are certain to come, and ends of ticks. Of the arrivals that wait for
    # nobody the next one is enough: a heap of all of them would be slow.
    independent = (index for index, arrival in enumerate(workload) if arrival.after is None)
    line = ((workload[index].at_s, index) for index in sorted(independent, key=lambda index: workload[index].at_s))
    coming = [*islice(line, 1)]
    ends: list[tuple[float, int]] = []

    while coming or ends:
        if ends and (not coming or ends[0][0] <= coming[0][0]):
            now, number = heappop(ends)
            host = hosts[number]
            if host.next_s != now:
                continue  # its stretch was cut short, and has an entry of its own
            for outcome in host.tick():
                outcomes.append(outcome)
                for follower in followers.get(outcome.number, ()):
                    heappush(coming, (now + workload[follower].at_s, follower))
                if len(outcomes) % PROGRESS_EVERY == 0:
                    progress(len(outcomes) + len(refused), now)
        else:
            now, index = heappop(coming)
            arrival = workload[index]
            if arrival.after is None:
                for entry in islice(line, 1):
                    heappush(coming, entry)
            host = choose(hosts, arrival)
            before_s = host.next_s
            if not host.offer(index, arrival, now):
                _refuse(index, followers, refused)
            if host.next_s == before_s:
                continue
        if host.next_s != math.inf:
            heappush(ends, (host.next_s, host.number))
    return Run(hosts, tally, outcomes, refused)


def _refuse(index: int, followers: Mapping[int, Sequence[int]], refused: list[int]) -> None:
    """An arrival is refused, and all that wait for its answer with it."""
    lost = [index]
    while lost:
        refused.append(lost.pop())
        lost.extend(followers.get(refused[-1], ()))
