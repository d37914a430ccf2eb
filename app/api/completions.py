"""The two routes that generate text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from app.api.answers import Answer, ChatForm, Form, TextForm
from app.api.delivery import Delivery, chunks, send_stream, send_whole
from app.api.fields import Limits
from app.api.middleware import KEY
from app.api.parse import parse, read_object, unknown_fields
from app.api.protocol import ChatBody, CompletionBody, Generation, ModelBody
from app.api.rate_limit import Reservation
from app.api.seam import Wiring
from app.completion import Completion
from app.errors import InvalidRequest, ModelNotFound
from app.service import ModelCard

M = TypeVar("M", bound=ModelBody)

IGNORED_HEADER = "x-mlxcel-ignored-fields"


async def chat_completions(request: Request) -> Response:
    wiring: Wiring = request.app.state.wiring
    key = counted(request, wiring)
    body, headers = await read_body(request, wiring, ChatBody)
    card = wiring.service.card
    ask = body.ask(card.default_sampling, Limits(card.vocab_size))
    answer = _answer(card, ChatForm(ask.sampling.num_logprobs is not None))
    reservation = wiring.limits.reservation(key)
    with unless_refused(reservation):
        completion = await wiring.service.chat(body.messages, replace(ask, reserve=reservation.take), body.template)
    return _delivery(completion, reservation, answer, body, body.n, headers)


async def completions(request: Request) -> Response:
    wiring: Wiring = request.app.state.wiring
    key = counted(request, wiring)
    body, headers = await read_body(request, wiring, CompletionBody)
    card = wiring.service.card
    ask = body.ask(card.default_sampling, Limits(card.vocab_size))
    echoes = [wiring.service.detokenize(p) if isinstance(p, list) else p for p in body.prompt] if body.echo else []
    answer = _answer(card, TextForm(ask.sampling.num_logprobs is not None, echoes, body.n))
    reservation = wiring.limits.reservation(key)
    with unless_refused(reservation):
        completion = await wiring.service.complete(body.prompt, replace(ask, reserve=reservation.take))
    return _delivery(completion, reservation, answer, body, body.n * len(body.prompt), headers)


def check_model(card: ModelCard, name: str | None) -> None:
    """Raises ModelNotFound for a name that is neither absent nor accepted."""
    if name is not None and name not in card.ids and "*" not in card.ids:
        raise ModelNotFound(name)


def counted(request: Request, wiring: Wiring) -> bytes:
    """The client's key, empty where none is asked for, with this request counted on it. Raises RateLimited."""
    key: bytes = request.scope.get(KEY, b"")
    wiring.limits.take_request(key)
    return key


@contextmanager
def unless_refused(reservation: Reservation) -> Iterator[None]:
    """What is refused before it is submitted has used nothing."""
    try:
        yield
    except BaseException:
        reservation.settle(0)
        raise


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


def _answer(card: ModelCard, form: Form) -> Answer:
    return Answer(form, card.ids[0], str(card.props.get("build_info", "mlxcel")))


def _delivery(
    completion: Completion,
    reservation: Reservation,
    answer: Answer,
    body: Generation,
    num_choices: int,
    headers: dict[str, str],
) -> Delivery:
    """From here on the completion has an owner: nothing may come between its birth and this."""
    deliver = partial(send_whole, completion, answer.whole, headers)
    if body.stream:
        events = chunks(completion, answer, num_choices, body.wants_usage)
        deliver = partial(send_stream, completion, events, headers)
    return Delivery(completion, reservation, deliver)
