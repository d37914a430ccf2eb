"""Every route that does not generate: models, health, slots, cache, metrics, and the tokenizer."""

from __future__ import annotations

from typing import Any

import orjson
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from app.api.completions import check_model, read_body
from app.api.fields import Limits
from app.api.llama_answers import settings_json
from app.api.seam import Serving, Wiring
from app.api.tokenizer_body import DetokenizeBody, TemplateBody, TokenizeBody
from app.errors import FeatureOff
from app.scheduler.snapshot import SlotView
from app.service import ModelCard

EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"
NOT_READY = {"loading": "Loading model", "draining": "Draining"}


def _json(body: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(orjson.dumps(body), status, headers, media_type="application/json")


def _wiring(request: Request) -> Wiring:
    wiring: Wiring = request.app.state.wiring
    return wiring


def _unavailable(message: str) -> Response:
    return _json({"error": {"code": 503, "message": message, "type": "unavailable_error"}}, 503)


async def list_models(request: Request) -> Response:
    return _json({"object": "list", "data": [_model(_wiring(request).service.card)]})


async def get_model(request: Request) -> Response:
    card = _wiring(request).service.card
    check_model(card, request.path_params["model_id"])
    return _json(_model(card))


def _model(card: ModelCard) -> dict[str, Any]:
    return {
        "id": card.ids[0],
        "object": "model",
        "created": card.created,
        "owned_by": "mlxcel",
        "max_model_len": card.n_ctx,
    }


async def health(request: Request) -> Response:
    service = _wiring(request).service
    if trouble := _trouble(service):
        return _unavailable(trouble)
    snapshot = service.snapshot()
    batch = {
        "active_sequences": snapshot.num_active,
        "queued_requests": snapshot.num_queued,
        "total_completed": snapshot.total_completed,
    }
    return _json({"status": "ok", "batch": batch, "n_ctx_per_slot": service.card.n_ctx})


async def live(request: Request) -> Response:
    """Fails only where a restart is the remedy: a dead loop, or a tick that has run longer than the time-out."""
    stuck = _stuck(_wiring(request).service)
    return _unavailable(stuck) if stuck else _json({"status": "ok"})


async def ready(request: Request) -> Response:
    """Stays ready with a full queue: a balancer that reacted to load would make the fleet flap."""
    trouble = _trouble(_wiring(request).service)
    return _unavailable(trouble) if trouble else _json({"status": "ok"})


def _stuck(service: Serving) -> str | None:
    if service.status == "dead":
        return "Inference loop has ended"
    if service.tick_age_s() > service.tick_timeout_s:
        return "Inference loop is stuck"
    return None


def _trouble(service: Serving) -> str | None:
    return _stuck(service) or NOT_READY.get(service.status)


async def slots(request: Request) -> Response:
    wiring = _wiring(request)
    if not wiring.settings.slots:
        raise FeatureOff("The slots route is turned off on this server.")
    views = wiring.service.snapshot().slots
    if request.query_params.get("fail_on_no_slot") == "1" and all(view.is_busy for view in views):
        return _unavailable("no slot available")
    return _json([_slot(view, wiring.service.card) for view in views])


def _slot(view: SlotView, card: ModelCard) -> dict[str, Any]:
    """Numbers and parameters only: a slot never shows what is asked or answered in it."""
    slot: dict[str, Any] = {
        "id": view.id,
        "n_ctx": card.n_ctx,
        "speculative": card.speculative,
        "is_processing": view.is_busy,
    }
    sampling = view.sampling
    if sampling is None:
        return slot
    return slot | {
        "id_task": view.request_id,
        "n_prompt_tokens": view.num_prompt,
        "n_prompt_tokens_processed": view.num_prompt_computed,
        "n_prompt_tokens_cache": view.num_cached,
        "params": settings_json(sampling, view.max_tokens),
        "next_token": [
            {
                "has_next_token": view.is_busy,
                "n_remain": view.max_tokens - view.num_output,
                "n_decoded": view.num_output,
            }
        ],
    }


async def metrics(request: Request) -> Response:
    wiring = _wiring(request)
    if not wiring.settings.metrics:
        raise FeatureOff("The metrics route is turned off on this server.")
    return Response(wiring.metrics.render(), headers={"content-type": EXPOSITION})


async def cache_stats(request: Request) -> Response:
    service = _wiring(request).service
    snapshot = service.snapshot()
    prefix, pool = snapshot.prefix, snapshot.pool
    return _json(
        {
            "enabled": prefix.enabled,
            "entries": prefix.entries,
            "hits": prefix.hits,
            "lookups": prefix.lookups,
            "hit_rate": prefix.hits / prefix.lookups if prefix.lookups else 0.0,
            "inserts": prefix.inserts,
            "evictions_lru": prefix.evictions_lru,
            "evictions_ttl": prefix.evictions_ttl,
            "rejects": prefix.misses,
            "paged_block_size": pool.block_size,
            "paged_blocks_allocated": pool.num_blocks,
            "paged_blocks_live": pool.live,
            "paged_blocks_free": pool.free,
            "paged_bytes_reserved": pool.num_blocks * service.bytes_per_block,
            "paged_bytes_in_use": pool.live * service.bytes_per_block,
            "paged_block_budget": pool.num_blocks,
        }
    )


async def cache_reset(request: Request) -> Response:
    await _wiring(request).service.reset_cache()
    return _json({"status": "ok"})


async def recording(request: Request) -> Response:
    return _json(await _wiring(request).service.recording())


async def config(request: Request) -> Response:
    settings = _wiring(request).settings
    rows = [{"name": name, "value": value, "source": source} for name, value, source in settings.describe()]
    return _json({"settings": rows, "fingerprint": settings.fingerprint})


async def props(request: Request) -> Response:
    service = _wiring(request).service
    card = service.card
    # Each request without a seed draws one of its own, which llama-server writes as -1.
    params = settings_json(card.default_sampling, num_predict=-1) | {"seed": -1}
    return _json(
        {
            **card.props,
            "default_generation_settings": {
                "n_ctx": card.n_ctx,
                "speculative": card.speculative,
                "params": params,
            },
            "total_slots": len(service.snapshot().slots),
            "model_alias": card.ids[0],
            "model_path": card.path,
            "chat_template": card.chat_template,
            "modalities": {"vision": False, "audio": False},
            "is_sleeping": False,
        }
    )


async def tokenize(request: Request) -> Response:
    service = _wiring(request).service
    body, headers = await read_body(request, _wiring(request), TokenizeBody)
    ids = await run_in_threadpool(service.tokenize, body.text, body.add_special, body.parse_special)
    if not body.with_pieces:
        return _json({"tokens": ids}, headers=headers)
    pieces = [{"id": token, "piece": _piece(service.token_bytes(token))} for token in ids]
    return _json({"tokens": pieces}, headers=headers)


def _piece(data: bytes) -> str | list[int]:
    """Text, or the plain bytes of a token that is only part of a character."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return list(data)


async def detokenize(request: Request) -> Response:
    service = _wiring(request).service
    body, headers = await read_body(request, _wiring(request), DetokenizeBody)
    Limits(service.card.vocab_size).check_ids(body.tokens, "tokens")
    return _json({"content": await run_in_threadpool(service.detokenize, body.tokens)}, headers=headers)


async def apply_template(request: Request) -> Response:
    service = _wiring(request).service
    body, headers = await read_body(request, _wiring(request), TemplateBody)
    return _json({"prompt": await run_in_threadpool(service.render, body.messages, body.template)}, headers=headers)
