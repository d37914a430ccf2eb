"""What each route takes and gives. A new route has its line in ``app.api.app`` and its entry here; the OpenAPI document
is made of both."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from app.api.llama_protocol import InfillBody, LlamaBody
from app.api.message_body import CountBody, MessageBody
from app.api.protocol import Body, ChatBody, CompletionBody
from app.api.response_body import ResponseBody
from app.api.tokenizer_body import DetokenizeBody, TemplateBody, TokenizeBody

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Operation:
    """One route as a client sees it.

    ``answer`` is the JSON schema of a 200; None is plain text. ``chunk`` is that of an event, where the answer may also
    be a stream of them. ``refusals`` are statuses beside those that ``statuses`` finds from the rest.
    """

    summary: str
    answer: Schema | None
    body: type[Body] | None = None
    chunk: Schema | None = None
    refusals: tuple[int, ...] = ()
    query: Mapping[str, Schema] = field(default_factory=dict)

    @property
    def statuses(self) -> tuple[int, ...]:
        """Every status that refuses, but for 401, which is the same for all routes."""
        from_body = (400, 413, 415, 503) if self.body is not None else ()
        from_model = (404, 429, 500) if self.chunk is not None else ()
        return tuple(sorted({*self.refusals, *from_body, *from_model}))


def _object(**members: str | Schema) -> Schema:
    """An object with at least ``members``, each a schema or the name of a type."""
    return {
        "type": "object",
        "properties": {name: {"type": one} if isinstance(one, str) else one for name, one in members.items()},
        "required": list(members),
    }


def _list(item: str | Schema) -> Schema:
    return {"type": "array", "items": {"type": item} if isinstance(item, str) else item}


TEXT_OR_NULL: Schema = {"type": ["string", "null"]}
OBJECT_OR_NULL: Schema = {"type": ["object", "null"]}
OK = _object(status="string")
MODEL = _object(id="string", object="string", created="integer", owned_by="string", max_model_len="integer")
USAGE = _object(
    prompt_tokens="integer",
    completion_tokens="integer",
    total_tokens="integer",
    prompt_tokens_details=_object(cached_tokens="integer"),
)


def _answer(choice: Schema, **more: str | Schema) -> Schema:
    head = {"id": "string", "object": "string", "created": "integer", "model": "string", "system_fingerprint": "string"}
    return _object(**head, choices=_list(choice), **more)


def _choice(**members: str | Schema) -> Schema:
    return _object(index="integer", logprobs=OBJECT_OR_NULL, finish_reason=TEXT_OR_NULL, **members)


CHAT_CHOICE = _choice(message=_object(role="string", content=TEXT_OR_NULL, refusal=TEXT_OR_NULL))
TEXT_CHOICE = _choice(text="string")
LIST_MODELS = Operation("The model that is served", _object(object="string", data=_list(MODEL)), refusals=(503,))
HEALTH = Operation(
    "Whether requests are taken, and how many there are",
    _object(
        status="string",
        batch=_object(active_sequences="integer", queued_requests="integer", total_completed="integer"),
        n_ctx_per_slot="integer",
    ),
    refusals=(503,),
)

LLAMA_ANSWER = _object(index="integer", content="string", stop="boolean", tokens_evaluated="integer")
LLAMA = Operation(
    "Go on with a text, as llama-server does", {"type": ["object", "array"]}, body=LlamaBody, chunk=LLAMA_ANSWER
)
RESPONSE = _object(id="string", object="string", created_at="number", status="string", output=_list("object"))

OPERATIONS: dict[str, Operation] = {
    "/v1/chat/completions": Operation(
        "Answer a conversation",
        _answer(CHAT_CHOICE, usage=USAGE, timings="object"),
        body=ChatBody,
        chunk=_answer(_choice(delta="object")),
    ),
    "/v1/completions": Operation(
        "Go on with a text",
        _answer(TEXT_CHOICE, usage=USAGE, timings="object"),
        body=CompletionBody,
        chunk=_answer(TEXT_CHOICE),
    ),
    "/v1/responses": Operation(
        "Answer a conversation, and keep it",
        RESPONSE,
        body=ResponseBody,
        chunk=_object(type="string", sequence_number="integer"),
    ),
    "/v1/responses/{response_id}": Operation(
        "A response that is kept; DELETE forgets it", _object(id="string", object="string"), refusals=(400, 404)
    ),
    "/v1/responses/{response_id}/input_items": Operation(
        "What a kept response answers",
        _object(object="string", data=_list("object"), has_more="boolean"),
        refusals=(400, 404),
        query={
            "limit": {"type": "integer", "minimum": 1, "maximum": 100},
            "order": {"enum": ["asc", "desc"]},
            "after": {"type": "string"},
        },
    ),
    "/v1/messages": Operation(
        "Answer a conversation, as Anthropic does",
        _object(id="string", type="string", role="string", content=_list("object"), usage="object"),
        body=MessageBody,
        chunk=_object(type="string"),
    ),
    "/v1/messages/count_tokens": Operation(
        "How many tokens a conversation has", _object(input_tokens="integer"), body=CountBody, refusals=(404,)
    ),
    "/completion": LLAMA,
    "/completions": LLAMA,
    "/infill": Operation(
        "Code between two others, as llama-server does",
        {"type": ["object", "array"]},
        body=InfillBody,
        chunk=LLAMA_ANSWER,
        refusals=(501,),
    ),
    "/v1/models": LIST_MODELS,
    "/v1/models/": LIST_MODELS,
    "/v1/models/{model_id}": Operation("One model by its name", MODEL, refusals=(404, 503)),
    "/health": HEALTH,
    "/v1/health": HEALTH,
    "/health/live": Operation("Whether a restart would help: 503 if so", OK, refusals=(503,)),
    "/health/ready": Operation("Whether requests are taken", OK, refusals=(503,)),
    "/slots": Operation(
        "Who sits where, in numbers",
        _list(_object(id="integer", n_ctx="integer", speculative="boolean", is_processing="boolean")),
        refusals=(501, 503),
        query={"fail_on_no_slot": {"type": "string", "description": "1: 503 when all slots are taken"}},
    ),
    "/metrics": Operation("Prometheus text", None, refusals=(501,)),
    "/v1/config": Operation(
        "Every setting, its value and where that comes from",
        _object(settings=_list(_object(name="string", value="string", source="string")), fingerprint="string"),
    ),
    "/v1/recording": Operation("The last ticks, in numbers", {"type": "object"}, refusals=(501, 503)),
    "/v1/cache/stats": Operation(
        "The block pool and the prefix cache",
        _object(
            enabled="boolean",
            entries="integer",
            hit_rate="number",
            rejects="object",
            paged_blocks_allocated="integer",
            paged_blocks_live="integer",
            paged_blocks_free="integer",
        ),
    ),
    "/v1/cache/reset": Operation("Forget every prefix that nobody holds", OK, refusals=(503,)),
    "/props": Operation(
        "The model, its chat template, its default sampling",
        _object(total_slots="integer", model_alias="string", chat_template="string", modalities="object"),
        refusals=(503,),
    ),
    "/tokenize": Operation(
        "The tokens of a text",
        _object(tokens={"type": "array", "items": {"type": ["integer", "object"]}}),
        body=TokenizeBody,
        refusals=(404,),
    ),
    "/detokenize": Operation("The text of tokens", _object(content="string"), body=DetokenizeBody, refusals=(404,)),
    "/apply-template": Operation(
        "The prompt of a conversation", _object(prompt="string"), body=TemplateBody, refusals=(404,)
    ),
    "/openapi.json": Operation("This document", _object(openapi="string", info="object", paths="object")),
}
