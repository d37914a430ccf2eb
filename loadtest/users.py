"""The users of a scenario, as locust users. What they do is in ``DEEDS``, who they are in the scenario's kinds."""

from __future__ import annotations

import random
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import gevent
import httpx
import orjson
from gevent.pool import Group
from locust import User

from loadtest.exchange import client, send
from loadtest.journal import Journal, fire
from loadtest.record import Exchange
from loadtest.scenario import Kind, Scenario
from loadtest.waves import random_words

TEXT, CHAT = "/v1/completions", "/v1/chat/completions"
SLOW_READ_S = 0.2
UNREACHABLE_PAUSE_S = 0.5
HUGE_BYTES = 128 * 1024
FOREVER_S = 1e9


@dataclass
class Target:
    """The server that all users of this process ask, and what goes into each body beside the question."""

    api_key: str | None
    fields: dict[str, Any]
    model: str | None = None
    _http: dict[str, httpx.Client] = field(default_factory=dict)

    def http(self, url: str) -> httpx.Client:
        if url not in self._http:
            self._http[url] = client(url, self.api_key)
            if self.model is None:
                answer = self._http[url].get("/v1/models").raise_for_status().json()
                self.model = answer["data"][0]["id"]
        return self._http[url]


class ScenarioUser(User):
    """A user of one kind. Subclasses are made from kinds, by ``user_classes``."""

    abstract = True
    kind: ClassVar[Kind]
    scenario: ClassVar[Scenario]
    target: ClassVar[Target]
    journal: ClassVar[Journal]

    def on_start(self) -> None:
        self.id = uuid.uuid4().hex[:12]
        self.http = self.target.http(self.host or "")
        self._random = random.Random(self.id)
        self._open = Group()
        self._pause_s = 0.0
        if self.kind.within_s:
            gevent.sleep(self._random.uniform(0.0, self.kind.within_s))
        self._next_s = time.perf_counter() + self._until_next()

    def on_stop(self) -> None:
        self._open.join(self.environment.stop_timeout)
        self._open.kill()

    def wait_time(self) -> float:
        """Seconds until the next request: think time, what a refusal asked for, or up to the next arrival."""
        if self.kind.rate_per_s is None:
            return self._pause_s
        return max(0.0, self._next_s - time.perf_counter())

    def act(self) -> None:
        """The user's only task. Each request has a greenlet of its own: arrivals do not wait for those before, and a
        user who is stopped in this moment does not tear a request apart that locust's stop timeout lets end."""
        if self.kind.rate_per_s is None:
            self._open.spawn(DEEDS[self.kind.does], self).join()
            return
        late_s = time.perf_counter() - self._next_s
        if late_s >= 0:
            self._next_s += self._until_next()
            self._open.spawn(DEEDS[self.kind.does], self, time.time() - late_s)

    def _until_next(self) -> float:
        return self._random.expovariate(self.kind.rate_per_s) if self.kind.rate_per_s else 0.0

    # ---- questions ----

    def words(self) -> str:
        """A prompt of this kind: the shared beginning, then words nobody else has."""
        bounds = self.kind.num_prompt
        num_prompt = self._random.randint(*bounds) if isinstance(bounds, tuple) else bounds
        shared = random_words(random.Random(self.kind.name), self.kind.num_shared) if self.kind.num_shared else ""
        return f"{shared} {random_words(self._random, num_prompt - self.kind.num_shared)}".strip()

    def body(self, **question: Any) -> bytes:
        priority = {"priority": self.kind.priority} if self.kind.priority else {}
        fixed = {
            "model": self.target.model,
            "max_tokens": self.kind.num_new,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return orjson.dumps(fixed | self.target.fields | priority | question)

    def exchange(
        self, body: bytes, path: str = TEXT, planned_s: float | None = None, **how: Any
    ) -> tuple[Exchange, str]:
        """Send one request; write it down and show it to locust however it ends."""
        one = Exchange(self.kind.name, self.id, planned_s=planned_s, expects=self.kind.expects)
        try:
            text = send(self.http, path, body, one, **how)
        finally:
            self.journal.write(one)
            fire(self.environment, one, self.scenario.refuses)
        self._pause_s = self.kind.think_s
        if self.kind.once:
            self._pause_s = FOREVER_S
        elif one.is_refused:
            self._pause_s = (one.retry_after_s or 1.0) * self._random.uniform(1.0, 1.5)
        elif one.status is None:
            self._pause_s = UNREACHABLE_PAUSE_S
        return one, text


def ask(user: ScenarioUser, planned_s: float | None = None) -> None:
    user.exchange(user.body(prompt=user.words()), planned_s=planned_s)


def chat(user: ScenarioUser, planned_s: float | None = None) -> None:
    messages: list[dict[str, str]] = []
    for turn in range(user.kind.num_turns):
        if turn:
            gevent.sleep(user.kind.think_s)
        messages.append({"role": "user", "content": user.words()})
        one, text = user.exchange(user.body(messages=messages), CHAT, planned_s)
        if not one.is_good:
            return
        messages.append({"role": "assistant", "content": text})


def leave(user: ScenarioUser, planned_s: float | None = None) -> None:
    with gevent.Timeout(user._random.uniform(*user.kind.stays_s), False):
        ask(user, planned_s)


def read_slowly(user: ScenarioUser, planned_s: float | None = None) -> None:
    user.exchange(user.body(prompt=user.words()), planned_s=planned_s, pause_s=SLOW_READ_S)


def send_broken(user: ScenarioUser, planned_s: float | None = None) -> None:
    user.exchange(user.body(prompt=user.words())[:-2], planned_s=planned_s)


def send_huge(user: ScenarioUser, planned_s: float | None = None) -> None:
    user.exchange(user.body(prompt="a " * (HUGE_BYTES // 2)), planned_s=planned_s)


def send_wrong_key(user: ScenarioUser, planned_s: float | None = None) -> None:
    user.exchange(user.body(prompt=user.words()), planned_s=planned_s, headers={"authorization": "Bearer wrong"})


DEEDS: dict[str, Callable[..., None]] = {
    deed.__name__: deed for deed in (ask, chat, leave, read_slowly, send_broken, send_huge, send_wrong_key)
}


def user_classes(scenario: Scenario, target: Target, journal: Journal) -> dict[str, type[ScenarioUser]]:
    """One locust class for each kind, by its name."""
    shared = {"scenario": scenario, "target": target, "journal": journal, "tasks": [ScenarioUser.act]}
    return {
        name: type(name, (ScenarioUser,), {"kind": kind, "weight": kind.weight, **shared})
        for kind in scenario.kinds
        for name in (kind.name.title(),)
    }
