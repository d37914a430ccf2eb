"""Anthropic's Messages API: the two routes of it that there are."""

from __future__ import annotations

from functools import partial

import orjson
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from app.api.completions import begin, counted, read_body
from app.api.delivery import send_stream, send_whole
from app.api.errors import REQUEST_ID
from app.api.fields import Limits
from app.api.message_answer import PING, MessageAnswer, Thoughts
from app.api.message_body import CountBody, MessageBody
from app.api.seam import Wiring


async def messages(request: Request) -> Response:
    wiring: Wiring = request.app.state.wiring
    key = counted(request, wiring)
    body, headers = await read_body(request, wiring, MessageBody)
    chat, card = body.chat, wiring.service.card
    ask = body.ask(card.default_sampling, Limits(card.vocab_size))
    answer = MessageAnswer(card.ids[0], body.max_tokens, _thoughts(body), request.scope.get(REQUEST_ID, ""))
    deliver = partial(send_whole, answer.whole, headers)
    if body.stream:
        deliver = partial(send_stream, answer.events, headers, ping=PING)
    return await begin(wiring, key, ask, lambda ask: wiring.service.chat(chat.messages, ask, chat.template), deliver)


async def count_tokens(request: Request) -> Response:
    wiring: Wiring = request.app.state.wiring
    body, headers = await read_body(request, wiring, CountBody)
    number = await run_in_threadpool(wiring.service.count_chat, body.chat.messages, body.chat.template)
    return Response(orjson.dumps({"input_tokens": number}), headers=headers, media_type="application/json")


def _thoughts(body: MessageBody) -> Thoughts:
    if body.thinking is None or not body.thinks:
        return "unasked"
    return "omitted" if body.thinking.display == "omitted" else "shown"
