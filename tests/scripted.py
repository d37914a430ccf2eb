"""A service whose answers are written down beforehand: HTTP tests need no model."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson
from starlette.applications import Starlette

from app.api.app import create_app
from app.completion import Delta, Timings, TokenLogprob, Usage
from app.metrics import Metrics
from app.request import SamplingParams
from app.scheduler.snapshot import Snapshot
from app.service import Ask, ModelCard

HI = (Delta(0, "Hel"), Delta(0, "lo"), Delta(0, "", (), "stop"))
IDLE = Snapshot()
CARD = ModelCard(
    ids=("org/small", "small"),
    path="models/small",
    created=1700000000,
    n_ctx=2048,
    most_tokens=8192,
    vocab_size=100,
    bytes_per_block=1000,
    end_tokens=frozenset({0}),
    default_sampling=SamplingParams(temperature=0.7, top_k=40),
    chat_template="{{ messages }}",
    props={"build_info": "test-build"},
)


class ScriptedCompletion:
    """Plays its script: a Delta is handed out, an exception raised, a number slept; at None it hangs for ever."""

    def __init__(self, *script: Delta | Exception | float | None, refused: Exception | None = None) -> None:
        self.script = list(script)
        self.refused = refused
        self.choices = ()
        self.usage = Usage(prompt_tokens=10, cached_tokens=4, completion_tokens=3)
        self.timings = Timings(queue_s=0.1, prompt_s=0.5, predicted_s=1.5)
        self.finish_reason: str | None = None
        self.num_closed = 0
        self.waits: list[float | None] = []

    async def admitted(self, timeout_s: float | None) -> None:
        self.waits.append(timeout_s)
        if self.refused:
            raise self.refused

    def __aiter__(self) -> ScriptedCompletion:
        return self

    async def __anext__(self) -> Delta:
        while self.script:
            step = self.script.pop(0)
            if isinstance(step, Delta):
                self.finish_reason = step.finish_reason
                return step
            if isinstance(step, Exception):
                raise step
            await (asyncio.sleep(step) if step is not None else asyncio.Event().wait())
        if self.refused:
            raise self.refused
        raise StopAsyncIteration

    def close(self) -> None:
        self.num_closed += 1


@dataclass
class ScriptedService:
    completion: ScriptedCompletion = field(default_factory=lambda: ScriptedCompletion(*HI))
    refused: Exception | None = None
    status: str = "ready"
    age_s: float = 0.0
    snap: Snapshot = IDLE
    tick_timeout_s: float = 600.0
    bytes_per_block: int = 1000
    decode_path: str = "by script"
    card: ModelCard = CARD
    asked: list[tuple[Any, Ask, Any]] = field(default_factory=list)
    num_resets: int = 0

    def snapshot(self) -> Snapshot:
        return self.snap

    def tick_age_s(self) -> float:
        return self.age_s

    def check_room(self, num_answers: int) -> None:
        """There always is."""

    def check_length(self, num_chars: int) -> None:
        """It always does."""

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        ids = list(text.encode())
        return [1, *ids] if add_special else ids

    def detokenize(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def render(self, messages: Sequence[dict[str, Any]], template: dict[str, Any]) -> str:
        return "|".join(message["content"] for message in messages) + "".join(sorted(template))

    def count_chat(self, messages: Sequence[dict[str, Any]], template: dict[str, Any]) -> int:
        return len(self.render(messages, template))

    async def chat(self, messages: Sequence[dict[str, Any]], ask: Ask, template: dict[str, Any]) -> ScriptedCompletion:
        return self._answer(messages, ask, template)

    async def complete(self, prompts: Sequence[str | Sequence[int]], ask: Ask) -> ScriptedCompletion:
        return self._answer(prompts, ask, None)

    def _answer(self, what: Any, ask: Ask, template: Any) -> ScriptedCompletion:
        if self.refused:
            raise self.refused
        if ask.reserve:
            ask.reserve(self.completion.usage.prompt_tokens + (ask.max_tokens or 100))
        self.asked.append((what, ask, template))
        return self.completion

    async def recording(self) -> dict[str, Any]:
        if self.refused:
            raise self.refused
        return {"format": 1}

    async def reset_cache(self) -> None:
        self.num_resets += 1


@dataclass
class Options:
    api_keys: tuple[str, ...] = ()
    api_key_file: Path | None = None
    rate_limit_requests: int | None = None
    rate_limit_tokens: int | None = None
    rate_limit_concurrent: int | None = None
    allowed_origins: tuple[str, ...] = ()
    max_body_bytes: int = 10_000
    response_store: int = 1_000_000
    strict_fields: bool = False
    slots: bool = True
    metrics: bool = True
    ui: bool = True
    fingerprint: str = "0123456789ab"

    def describe(self) -> list[tuple[str, str, str]]:
        return [("MLXCEL_API_KEYS", "***", "environment"), ("MLXCEL_PORT", "8080", "default")]


def make_app(service: ScriptedService | None = None, **options: Any) -> Starlette:
    service = service or ScriptedService()
    return create_app(service, Options(**options), Metrics(service, "0"))


def call(app: Starlette, method: str, path: str, **request: Any) -> httpx.Response:
    """One request, whole."""

    async def go() -> httpx.Response:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as client:
            return await client.request(method, path, **request)

    return asyncio.run(go())


def chat(service: ScriptedService | None = None, options: dict[str, Any] | None = None, **body: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "hi"}], **body}
    return call(make_app(service, **(options or {})), "POST", "/v1/chat/completions", json=body)


def text(service: ScriptedService | None = None, **body: Any) -> httpx.Response:
    return call(make_app(service), "POST", "/v1/completions", json={"prompt": "hi", **body})


def events(response: httpx.Response) -> list[Any]:
    """The data of each event; "[DONE]" stays text."""
    lines = [line[6:] for line in response.text.splitlines() if line.startswith("data: ")]
    return [line if line == "[DONE]" else orjson.loads(line) for line in lines]


class Client:
    """An ASGI client that can see each message as it is sent, and leave, also before the second piece of its body."""

    def __init__(self, app: Starlette, path: str, body: dict[str, Any], num_pieces: int = 2) -> None:
        self.sent: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.left = asyncio.Event()
        raw = orjson.dumps(body)
        self._requests = [{"type": "http.request", "body": raw[:5], "more_body": True}]
        self._requests.append({"type": "http.request", "body": raw[5:], "more_body": False})
        del self._requests[num_pieces:]
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        self.run = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> dict[str, Any]:
        if self._requests:
            return self._requests.pop(0)
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: dict[str, Any]) -> None:
        self.sent.put_nowait(message)

    async def next(self) -> dict[str, Any]:
        return await asyncio.wait_for(self.sent.get(), 2)

    async def leave(self) -> None:
        self.left.set()
        await asyncio.wait_for(self.run, 2)


def entry(token: str, data: bytes | None = None, top: tuple[tuple[str, float], ...] = ()) -> TokenLogprob:
    others = tuple(TokenLogprob(other, logprob, other.encode()) for other, logprob in top)
    return TokenLogprob(token, -0.5, token.encode() if data is None else data, others)
