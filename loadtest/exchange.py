"""One request over HTTP, read event by event and timed; any OpenAI-compatible server will do."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import httpx
import orjson

from loadtest.record import DRAINING, Exchange

BUSY = {"error": {"message": "Server is busy. Retry later.", "type": "overloaded"}}
TIMEOUT_S = 1200.0


def client(url: str, api_key: str | None = None) -> httpx.Client:
    """A client for any number of requests at once. Share one: each reads the certificates of the system."""
    headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=5.0)
    return httpx.Client(base_url=url, headers=headers, limits=limits, timeout=TIMEOUT_S, trust_env=False)


def send(
    http: httpx.Client,
    path: str,
    body: bytes,
    exchange: Exchange,
    headers: Mapping[str, str] | None = None,
    pause_s: float = 0.0,
) -> str:
    """Send ``body``, read the answer to its end, write all into ``exchange``; ``pause_s`` between two events.

    Returns the text that came. Transport errors are written down and not raised; whatever else ends it is raised, with
    the exchange as far as it got.
    """
    text: list[str] = []
    exchange.at_s, began_s = time.time(), time.perf_counter()
    try:
        kind = {"content-type": "application/json"}
        with http.stream("POST", path, content=body, headers={**kind, **(headers or {})}) as response:
            exchange.status = response.status_code
            if response.status_code != 200:
                _read_refusal(response, exchange)
                return ""
            for line in response.iter_lines():
                if line == "data: [DONE]":
                    exchange.is_whole = not exchange.error
                elif line.startswith("data: {"):
                    _read_event(orjson.loads(line[6:]), exchange, text, time.perf_counter() - began_s)
                    if pause_s:
                        time.sleep(pause_s)
    except httpx.TransportError as error:
        exchange.error = exchange.error or type(error).__name__
    except BaseException:
        exchange.left = True
        raise
    finally:
        exchange.end_s = time.perf_counter() - began_s
    return "".join(text)


def _read_event(event: dict[str, Any], exchange: Exchange, text: list[str], at_s: float) -> None:
    if error := event.get("error"):
        exchange.error = str(error.get("message", error) if isinstance(error, dict) else error)
    for choice in event.get("choices") or ():
        piece = choice.get("text") or (choice.get("delta") or {}).get("content")
        if piece:
            exchange.moments_s.append(at_s)
            text.append(piece)
    if usage := event.get("usage"):
        exchange.num_prompt = usage.get("prompt_tokens", 0)
        exchange.num_new = usage.get("completion_tokens", 0)
        exchange.num_cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    if "prompt_ms" in (timings := event.get("timings") or {}):
        exchange.prompt_s = timings["prompt_ms"] / 1000


def _read_refusal(response: httpx.Response, exchange: Exchange) -> None:
    content = response.read()
    wait = response.headers.get("retry-after", "")
    exchange.retry_after_s = float(wait) if wait.isdigit() else None
    try:
        body = orjson.loads(content)
        exchange.error = str(body["error"]["message"])
    except (ValueError, KeyError, TypeError):
        body, exchange.error = None, content[:200].decode("utf-8", "replace")
    if response.status_code == 503:
        is_known = body == BUSY or exchange.error in DRAINING
        exchange.is_proper = is_known and (exchange.retry_after_s or 0) >= 1
