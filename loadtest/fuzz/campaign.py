"""Many clients at once that shoot at one server, and note down what it should not have done."""

from __future__ import annotations

import threading
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from random import Random
from typing import Any

from app.scheduler.policy import HEAD_START_S
from loadtest.fuzz import malformed
from loadtest.fuzz.bodies import broken, chosen, nested, written
from loadtest.fuzz.judge import Judge
from loadtest.fuzz.shot import Ask, Manner, Shot, request
from loadtest.fuzz.wire import Answer, Broken, Connection

CLIENTS = 16
# The lowest priority waits behind the highest for twice what either is worth.
ANSWER_S = 120.0 + 2 * HEAD_START_S
PROBE_S = 0.2
MAX_HELD = 40  # connections that are kept open and never used again
MAX_FINDINGS = 20


@dataclass(frozen=True, slots=True)
class Finding:
    """A shot that was not answered as it should be."""

    shot: Shot
    fault: str


@dataclass
class Tally:
    """What has come of it so far. ``statuses`` counts answers, ``kinds`` requests."""

    kinds: Counter[str] = field(default_factory=Counter)
    statuses: Counter[int] = field(default_factory=Counter)
    findings: list[Finding] = field(default_factory=list)

    @property
    def num_requests(self) -> int:
        return self.kinds.total()


class Campaign:
    """``run`` sends ``num_requests`` requests to ``address`` from threads of its own.

    ``documented`` gives a shot that is made of the document, None while none is ready; everything else comes from
    ``seed``. Which shot meets which other one is left to the threads: a seed gives the same shots and not the same
    encounters.
    """

    def __init__(
        self,
        address: tuple[str, int],
        judge: Judge,
        documented: Callable[[], Shot | None],
        seed: int,
        num_requests: int,
        max_body_bytes: int,
    ) -> None:
        self.tally = Tally()
        self._address = address
        self._judge = judge
        self._documented = documented
        self._seed = seed
        self._num_requests = num_requests
        self._max_body_bytes = max_body_bytes
        self._held: deque[Connection] = deque()
        self._lock = threading.Lock()
        self._ended = threading.Event()

    def run(self, look: Callable[[Tally], None], every_s: float = 5.0) -> Tally:
        """Return when all is sent or too much was found; ``look`` is called now and then, and at the end."""
        with ThreadPoolExecutor(CLIENTS) as pool:
            works = [pool.submit(self._shoot, number) for number in range(CLIENTS)]
            while True:
                done, running = wait(works, every_s, FIRST_EXCEPTION)
                if not running or any(work.exception() for work in done):
                    break
                look(self.tally)
            self._ended.set()
        for connection in self._held:
            connection.close()
        for work in works:
            work.result()
        look(self.tally)
        return self.tally

    def _shoot(self, number: int) -> None:
        rng = Random(f"{self._seed}/{number}")
        kept: Connection | None = None
        while not self._ended.is_set():
            shot = self._next(rng)
            fault: str | None = None
            try:
                kept = self._fire(shot, kept)
            except (Broken, _Faulty) as found:
                fault, kept = str(found), None
            except OSError as error:
                fault, kept = f"no connection: {error}", None
            self._note(shot, fault)
        if kept is not None:
            kept.close()

    def _note(self, shot: Shot, fault: str | None) -> None:
        with self._lock:
            self.tally.kinds[shot.kind] += max(1, len(shot.asks))
            if fault is not None:
                self.tally.findings.append(Finding(shot, fault))
            if self.tally.num_requests >= self._num_requests or len(self.tally.findings) >= MAX_FINDINGS:
                self._ended.set()

    def _next(self, rng: Random) -> Shot:
        """The weights are requests in a hundred, more or less."""
        kinds: list[tuple[int, Callable[[], Shot]]] = [
            (20, lambda: self._documented() or _broken(rng)),
            (15, lambda: _posted("valid", rng, lambda body: written(body).encode())),
            (33, lambda: _broken(rng)),
            (3, lambda: _posted("nested", rng, lambda body: nested(rng, body))),
            (5, lambda: malformed.line_noise(rng)),
            (8, lambda: malformed.odd_request(rng)),
            (3, lambda: malformed.odd_framing(rng)),
            (4, lambda: malformed.half_open(rng)),
            (3, lambda: malformed.leaving(rng)),
            (2, lambda: malformed.pipelined(rng)),
            (1, lambda: malformed.huge(rng, self._max_body_bytes)),
        ]
        return rng.choices([make for _, make in kinds], [weight for weight, _ in kinds])[0]()

    def _fire(self, shot: Shot, kept: Connection | None) -> Connection | None:
        """Send a shot and read what is due; gives the connection if it can be used again.

        Raises:
            Broken: what was due did not come.
            _Faulty: it is not as it should be.
        """
        if shot.manner is not Manner.READ:
            if kept is not None:
                kept.close()
            self._misbehave(shot)
            return None
        is_fresh = kept is None
        connection = kept or Connection(self._address, ANSWER_S)
        try:
            connection.send(shot.data)
            for ask in shot.asks:
                answer = connection.read(ask.method == "HEAD")
                self._judged(ask, answer)
                if answer.closes:
                    connection.close()
                    return None
                is_fresh = True
        except Broken as broken:
            connection.close()
            if broken.is_silent and not is_fresh:  # the server may close what is idle
                return self._fire(shot, None)
            raise
        except _Faulty:
            connection.close()
            raise
        return connection

    def _misbehave(self, shot: Shot) -> None:
        connection = Connection(self._address, PROBE_S)
        connection.send(shot.data)
        if shot.manner is Manner.HOLD:
            with self._lock:
                self._held.append(connection)
                if len(self._held) > MAX_HELD:
                    self._held.popleft().close()
            return
        try:
            if shot.manner in (Manner.LEAVE, Manner.RESET):
                connection.peek()
                return
            if shot.manner is Manner.SHUT:
                connection.shut()
            while True:
                self._judged(None, connection.read())
        except Broken:
            pass  # nothing more comes, or not in time
        finally:
            connection.close(with_reset=shot.manner is Manner.RESET)

    def _judged(self, ask: Ask | None, answer: Answer) -> None:
        with self._lock:
            self.tally.statuses[answer.status] += 1
        if fault := self._judge.fault(ask, answer):
            raise _Faulty(fault)


class _Faulty(Exception):
    """An answer that the judge finds fault with."""


def _broken(rng: Random) -> Shot:
    return _posted("broken", rng, lambda body: broken(rng, body))


def _posted(kind: str, rng: Random, make: Callable[[dict[str, Any]], bytes]) -> Shot:
    route, body = chosen(rng)
    return Shot(kind, request("POST", route, make(body)), (Ask("POST", route),))
