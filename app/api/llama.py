"""llama-server's own routes that generate text: /completion, and /infill where the model has learned it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import partial
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from app.api import sse
from app.api.completions import begin, counted, read_body
from app.api.delivery import send_stream, send_whole
from app.api.errors import refusal
from app.api.fields import Limits
from app.api.llama_answers import LlamaAnswer
from app.api.llama_protocol import InfillBody, LlamaBody
from app.api.seam import Serving, Wiring
from app.completion import Choice, Completion, Delta, Timings, Usage
from app.errors import FeatureOff


async def completion(request: Request) -> Response:
    wiring: Wiring = request.app.state.wiring
    key = counted(request, wiring)
    body, headers = await read_body(request, wiring, LlamaBody)
    return await _answer(wiring, key, body, body.prompt, headers)


async def infill(request: Request) -> Response:
    wiring: Wiring = request.app.state.wiring
    key = counted(request, wiring)
    service = wiring.service
    marks = service.card.infill
    if marks is None:
        raise FeatureOff("infill: this model has no tokens that mark code to be filled in.")
    body, headers = await read_body(request, wiring, InfillBody)
    extra = [(snippet.filename, snippet.text) for snippet in body.input_extra]
    files = [text if marks.file is None else name + text for name, text in extra]
    service.check_room(body.n_cmpl or body.n)  # both before the work of encoding
    service.check_length(sum(map(len, (body.input_prefix, body.input_suffix, body.prompt, *files))))
    ids = await run_in_threadpool(
        marks.prompt, partial(_encode, service), body.input_prefix, body.input_suffix, body.prompt, extra
    )
    first = service.tokenize("", True, False)  # what the tokenizer puts before every text
    return await _answer(wiring, key, body, [[*first, *ids]], headers)


async def _answer(
    wiring: Wiring, key: bytes, body: LlamaBody, prompts: Sequence[str | Sequence[int | str]], headers: dict[str, str]
) -> Response:
    service, card = wiring.service, wiring.service.card
    ask = body.ask(card.default_sampling, Limits(card.vocab_size), partial(_encode, service))
    answer = LlamaAnswer(body, card.ids[0], card.n_ctx)
    deliver = partial(_deliver, service, answer, headers)
    return await begin(wiring, key, ask, partial(service.complete, prompts), deliver)


def _encode(service: Serving, text: str) -> list[int]:
    """Names of control tokens are text here."""
    return service.tokenize(text, False, False)


async def _deliver(
    service: Serving, answer: LlamaAnswer, headers: dict[str, str], completion: Completion, send: Send
) -> None:
    """Texts of long prompts take a while: they are made in a thread, while the prompts are computed."""
    answer.prompts = await run_in_threadpool(_prompts, service, completion.choices)
    if answer.body.stream:
        await send_stream(partial(_events, answer), headers, completion, send)
    else:
        await send_whole(partial(_whole, answer, completion), headers, completion, send)


def _prompts(service: Serving, choices: Sequence[Choice]) -> list[str]:
    """The text of each choice's prompt, control tokens by their names. Choices of one prompt come one after another."""
    texts, text = [], ""
    for choice in choices:
        if choice.is_first:
            ids = choice.request.tokens[: choice.request.num_prompt]
            text = b"".join(map(service.token_bytes, ids)).decode(errors="replace")
        texts.append(text)
    return texts


def _whole(
    answer: LlamaAnswer, completion: Completion, deltas: Mapping[int, list[Delta]], _: Usage, __: Timings
) -> Any:
    return answer.whole(completion.choices, deltas)


async def _events(answer: LlamaAnswer, completion: Completion) -> AsyncGenerator[bytes, None]:
    """There is no ``[DONE]``: the last event of an answer says ``stop``."""
    try:
        async for delta in completion:
            for event in answer.events(completion.choices[delta.index], delta):
                yield sse.event(event)
    except Exception as exc:
        yield sse.event(refusal(exc).body)
