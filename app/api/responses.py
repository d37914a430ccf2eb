"""The routes of responses: one is made, and what is kept of it can be asked for."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import orjson
from starlette.endpoints import HTTPEndpoint
from starlette.requests import Request
from starlette.responses import Response

from app.api.completions import begin, counted, read_body
from app.api.delivery import send_stream, send_whole
from app.api.fields import Limits
from app.api.middleware import KEY
from app.api.own_names import naming_own_fields
from app.api.response_answer import ResponseAnswer
from app.api.response_body import ORIGINS, ResponseBody
from app.api.response_items import messages_of, response_of, with_ids
from app.api.response_store import Kept, ResponseStore
from app.api.seam import Wiring
from app.errors import InvalidRequest, ResponseNotFound

MAX_LISTED = 100
DEFAULT_LISTED = 20


async def create(request: Request) -> Response:
    wiring: Wiring = request.app.state.wiring
    key = counted(request, wiring)
    body, headers = await read_body(request, wiring, ResponseBody)
    card = wiring.service.card
    ask = body.ask(card.default_sampling, Limits(card.vocab_size))
    past = _past(wiring.responses, key, body.previous_response_id)
    given = _resolved(wiring.responses, key, body.input, wiring.settings.max_body_bytes)
    first = [] if body.instructions is None else [{"role": "system", "content": body.instructions}]
    messages = [*first, *messages_of([*past, *given])]
    response_id = f"resp_{uuid.uuid4().hex}"
    store = body.store and wiring.responses.max_bytes > 0
    if "store" in body.model_fields_set and body.store != store:
        raise InvalidRequest("store: this server keeps no responses", "store")
    shown = {
        **body.shown,
        "model": card.ids[0],
        "store": store,
        "temperature": ask.sampling.temperature,
        "top_p": ask.sampling.top_p,
    }

    def finished(response: dict[str, Any]) -> None:
        if store:
            wiring.responses.put(key, Kept(response, with_ids(given, response_id), past))

    answer = ResponseAnswer(response_id, shown, body.wants_logprobs, finished)
    deliver = partial(send_whole, answer.whole, headers)
    if body.stream:
        deliver = partial(send_stream, answer.events, headers)
    with naming_own_fields(ORIGINS):
        return await begin(
            wiring, key, ask, lambda ask: wiring.service.chat(messages, ask, body.chat.template), deliver
        )


class StoredResponse(HTTPEndpoint):
    """A response that is kept: to be read, or to be forgotten."""

    async def get(self, request: Request) -> Response:
        query = request.query_params
        if query.get("stream", "false").lower() != "false":
            raise InvalidRequest("stream: what is kept is not streamed again", "stream")
        if "starting_after" in query:
            raise InvalidRequest("starting_after: what is kept is not streamed again", "starting_after")
        return _json(_kept(request).response)

    async def delete(self, request: Request) -> Response:
        wiring: Wiring = request.app.state.wiring
        response_id = request.path_params["response_id"]
        wiring.responses.drop(request.scope.get(KEY, b""), response_id)
        return _json({"id": response_id, "object": "response", "deleted": True})


async def input_items(request: Request) -> Response:
    """The items that the response's own request gave, a page of them, the last one first unless asked otherwise."""
    query = request.query_params
    order, limit, after = query.get("order", "desc"), query.get("limit", str(DEFAULT_LISTED)), query.get("after")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order: must be asc or desc", "order")
    if not (limit.isascii() and limit.isdigit() and len(limit) <= 3 and 1 <= int(limit) <= MAX_LISTED):
        raise InvalidRequest(f"limit: must be a number from 1 to {MAX_LISTED}", "limit")
    items = _kept(request).given[:: 1 if order == "asc" else -1]
    if after is not None:
        ids = [item["id"] for item in items]
        if after not in ids:
            raise InvalidRequest("after: names no item of this response", "after")
        items = items[ids.index(after) + 1 :]
    page = items[: int(limit)]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return _json({"object": "list", "data": page, **ends, "has_more": len(items) > len(page)})


def _kept(request: Request) -> Kept:
    """Raises ResponseNotFound."""
    wiring: Wiring = request.app.state.wiring
    return wiring.responses.get(request.scope.get(KEY, b""), request.path_params["response_id"])


def _past(store: ResponseStore, key: bytes, previous_id: str | None) -> list[dict[str, Any]]:
    """Everything that has been said up to a previous response, it included.

    Raises:
        InvalidRequest: it is not kept.
    """
    if previous_id is None:
        return []
    try:
        return store.get(key, previous_id).conversation
    except ResponseNotFound as exc:
        param = "previous_response_id"
        raise InvalidRequest(f"{param}: {exc}", param, "previous_response_not_found") from None


def _resolved(
    store: ResponseStore, key: bytes, items: Sequence[dict[str, Any]], max_bytes: int
) -> list[dict[str, Any]]:
    """The items, each reference replaced by what it stands for.

    Raises:
        InvalidRequest: that is not kept, or all that references stand for is more than a body may have.
    """
    referred: dict[str, dict[str, bytes]] = {}  # the items of a response by their ids, as JSON
    resolved, num_bytes = [], 0
    for index, item in enumerate(items):
        if item["type"] != "item_reference":
            resolved.append(item)
            continue
        where = f"input[{index}].id"
        try:
            response_id = response_of(item["id"])
            if response_id not in referred:
                kept = store.get(key, response_id)
                referred[response_id] = {
                    one["id"]: orjson.dumps(one) for one in [*kept.given, *kept.response["output"]]
                }
            data = referred[response_id][item["id"]]
        except (ResponseNotFound, KeyError):
            raise InvalidRequest(f"{where}: no such item is kept", where) from None
        num_bytes += len(data)
        if num_bytes > max_bytes:
            raise InvalidRequest(f"{where}: the items that are referred to have more than {max_bytes} bytes", where)
        resolved.append(orjson.loads(data))
    return resolved


def _json(body: Mapping[str, Any]) -> Response:
    return Response(orjson.dumps(body), media_type="application/json")
