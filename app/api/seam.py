"""What HTTP asks of the rest of the program: the service, the settings and the counters, as narrow as it uses them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from app.api.rate_limit import RateLimits
from app.api.response_store import ResponseStore
from app.completion import Completion
from app.scheduler.snapshot import Snapshot
from app.service import Ask, ModelCard


class Serving(Protocol):
    """The service as the routes see it. While the model is being loaded, what needs it raises Unavailable."""

    @property
    def status(self) -> str:
        """One of "ready", "loading", "draining", "dead"."""
        ...

    @property
    def tick_timeout_s(self) -> float: ...
    @property
    def bytes_per_block(self) -> int: ...
    @property
    def card(self) -> ModelCard:
        """The model that is served."""
        ...

    def snapshot(self) -> Snapshot: ...
    def tick_age_s(self) -> float:
        """Seconds that the running tick has taken so far; 0 while idle."""
        ...

    def check_room(self, num_answers: int) -> None:
        """Whether so many answers more may come. Raises Overloaded, Unavailable."""
        ...

    def check_length(self, num_chars: int) -> None:
        """Whether a prompt of so many characters may fit into a slot. Raises InvalidRequest."""
        ...

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]: ...
    def detokenize(self, ids: Sequence[int]) -> str: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def render(self, messages: Sequence[dict[str, Any]], template: dict[str, Any]) -> str:
        """Raises InvalidRequest where the chat template refuses the messages."""
        ...

    def count_chat(self, messages: Sequence[dict[str, Any]], template: dict[str, Any]) -> int:
        """The tokens of a chat's prompt. Raises InvalidRequest, as ``render``."""
        ...

    async def chat(self, messages: Sequence[dict[str, Any]], ask: Ask, template: dict[str, Any]) -> Completion: ...
    async def complete(self, prompts: Sequence[str | Sequence[int | str]], ask: Ask) -> Completion: ...
    async def recording(self) -> dict[str, Any]:
        """The last ticks. Raises FeatureOff where they are not recorded."""
        ...

    async def reset_cache(self) -> None:
        """Forget every cached prefix that no request holds."""
        ...


class HttpSettings(Protocol):
    """The settings that only HTTP reads. ``slots``, ``metrics`` and ``ui`` (the page) turn those routes on."""

    @property
    def api_keys(self) -> tuple[str, ...]: ...
    @property
    def api_key_file(self) -> Path | None: ...
    @property
    def rate_limit_requests(self) -> int | None: ...
    @property
    def rate_limit_tokens(self) -> int | None: ...
    @property
    def rate_limit_concurrent(self) -> int | None: ...
    @property
    def allowed_origins(self) -> tuple[str, ...]: ...
    @property
    def max_body_bytes(self) -> int: ...
    @property
    def response_store(self) -> int: ...
    @property
    def strict_fields(self) -> bool: ...
    @property
    def slots(self) -> bool: ...
    @property
    def metrics(self) -> bool: ...
    @property
    def ui(self) -> bool: ...
    @property
    def fingerprint(self) -> str: ...
    def describe(self) -> list[tuple[str, str, str]]:
        """(variable, value, source) of every setting, secrets masked."""
        ...


class Counting(Protocol):
    """The counters that HTTP feeds and shows."""

    def count_response(self, status: int) -> None: ...
    def render(self) -> bytes:
        """The exposition text that a scrape reads."""
        ...


@dataclass(frozen=True, slots=True)
class Wiring:
    """What every endpoint finds as ``request.app.state.wiring``."""

    service: Serving
    settings: HttpSettings
    metrics: Counting
    limits: RateLimits
    responses: ResponseStore
