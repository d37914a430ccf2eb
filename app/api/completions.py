"""OpenAI's two routes that generate text, and what every route that does so has in common."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response

from app.api.answers import Answer, ChatForm, Form, TextForm
from app.api.delivery import Deliver, Delivery, chunks, send_stream, send_whole
from app.api.fields import Limits
from app.api.middleware import KEY, LIMITS
from app.api.parse import parse, read_object, unknown_fields
from app.api.protocol import ChatBody, Choices, CompletionBody, ModelBody
from app.api.seam import Serving, Wiring
from app.completion import Completion
from app.errors import InvalidRequest, ModelNotFound
from app.service import Ask, ModelCard

M = TypeVar("M", bound=ModelBody)

IGNORED_HEADER = "x-mlxcel-ignored-fields"


async def chat_completions(request: Request) -> Response:
    wiring: Wiring = request.app.state.wiring
    key = counted(request, wiring)
    body, headers = await read_body(request, wiring, ChatBody)
    card = wiring.service.card
    ask = body.ask(card.default_sampling, Limits(card.vocab_size))
    deliver = _deliver(card, ChatForm(ask.sampling.num_logprobs is not None), body, body.n, headers)
    return await begin(wiring, key, ask, lambda ask: wiring.service.chat(body.messages, ask, body.template), deliver)


async def completions(request: Request) -> Response:
    wiring: Wiring = request.app.state.wiring
    key = counted(request, wiring)
    body, headers = await read_body(request, wiring, CompletionBody)
    card = wiring.service.card
    ask = body.ask(card.default_sampling, Limits(card.vocab_size))
    # Texts of long prompts take a while.
    echoes = await run_in_threadpool(_texts, wiring.service, body.prompt) if body.echo else []
    form = TextForm(ask.sampling.num_logprobs is not None, echoes, body.n)
    deliver = _deliver(card, form, body, body.n * len(body.prompt), headers)
    return await begin(wiring, key, ask, partial(wiring.service.complete, body.prompt), deliver)


def _texts(service: Serving, prompts: Sequence[str | list[int]]) -> list[str]:
    return [prompt if isinstance(prompt, str) else service.detokenize(prompt) for prompt in prompts]


def check_model(card: ModelCard, name: str | None) -> None:
    """Raises ModelNotFound for a name that is neither absent nor accepted."""
    if name is not None and name not in card.ids and "*" not in card.ids:
        raise ModelNotFound(name)


def counted(request: Request, wiring: Wiring) -> bytes:
    """The client's key, empty where none is asked for, with this request counted on it. Raises RateLimited. From here
    on the response tells the limits of the key."""
    key: bytes = request.scope.get(KEY, b"")
    request.scope[LIMITS] = partial(wiring.limits.headers, key)
    wiring.limits.take_request(key)
    return key


async def begin(
    wiring: Wiring, key: bytes, ask: Ask, submit: Callable[[Ask], Awaitable[Completion]], deliver: Deliver
) -> Delivery:
    """Let ``submit`` give the ask to the service, on the account of a key. Raises RateLimited, and as the service."""
    reservation = wiring.limits.reservation(key)
    try:
        completion = await submit(replace(ask, reserve=reservation.take))
    except BaseException:
        reservation.settle(0)  # what is refused before it is submitted has used nothing
        raise
    # From here on the completion has an owner: nothing may come between its birth and this.
    return Delivery(completion, reservation, deliver)


async def read_body(request: Request, wiring: Wiring, kind: type[M]) -> tuple[M, dict[str, str]]:
    """A body for the model that is served, and the header that names what is ignored of it.

    Raises:
        InvalidRequest: something about it is wrong, or unknown where that is refused.
        ModelNotFound: it names another model.
    """
    value = await read_object(request, wiring.settings.max_body_bytes)
    unknown = unknown_fields(kind, value)
    if unknown and wiring.settings.strict_fields:
        raise InvalidRequest(f"{unknown[0]}: unknown field", unknown[0])
    body, card = parse(kind, value), wiring.service.card
    check_model(card, body.model)
    if unread := body.unread(card.chat_template):
        if wiring.settings.strict_fields:
            raise InvalidRequest(f"{unread[0]}: this model's chat template does not read it", unread[0])
        unknown += unread
    return body, {IGNORED_HEADER: ",".join(unknown)} if unknown else {}


def _deliver(card: ModelCard, form: Form, body: Choices, num_choices: int, headers: dict[str, str]) -> Deliver:
    answer = Answer(form, card.ids[0], str(card.props.get("build_info", "mlxcel")))
    if body.stream:
        return partial(send_stream, partial(chunks, answer, num_choices, body.wants_usage), headers)
    return partial(send_whole, answer.whole, headers)
