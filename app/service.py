"""A question in, a stream of text out: what HTTP and the command line both call."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from app.completion import Choice, Completion, ObserveRequest
from app.errors import InvalidRequest, Unavailable
from app.request import Request, SamplingParams
from app.scheduler.snapshot import Snapshot
from app.text.chat import ChatText
from app.text.detokenizer import Vocabulary
from app.text.dialect import PLAIN, Dialect
from app.text.grammar import Grammar, Grammars
from app.text.infill import Infill
from app.worker import Worker

# As many of a prompt's last tokens as a mark of reasoning may take, with white space after it.
PROMPT_END_TOKENS = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """What an answer must look like: a JSON schema, a grammar as llama-server or llguidance writes it, or calls.
    ``param`` is the field that asked for it."""

    kind: Literal["json_schema", "grammar", "calls"]
    source: str
    param: str


@dataclass(frozen=True, slots=True)
class Ask:
    """What is wanted, whoever asks. ``sampling.seed`` is the seed of choice 0; choice i uses seed + i.

    ``max_tokens`` None means the rest of the window. ``reserve`` is told the most tokens that this can come to, prompts
    included, before anything is submitted; it may raise to refuse. In a chat only ``tools`` may be called, and without
    ``many_calls`` only once. Where functions are ``forced``, by name and JSON schema of the arguments, one of them has
    to be called.
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    priority: int = 0
    use_prefix_cache: bool = True
    cache_salt: str = ""
    ignore_eos: bool = False
    shape: Shape | None = None
    tools: tuple[dict[str, Any], ...] = ()
    many_calls: bool = True
    forced: tuple[tuple[str, str], ...] = ()
    reserve: Callable[[int], None] | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class ModelCard:
    """What there is to know about the model that is served.

    ``ids`` are the accepted names: the first is shown, "*" accepts any. ``n_ctx`` is the window of a slot and
    ``most_tokens`` what the whole pool holds, in tokens.
    """

    ids: tuple[str, ...]
    path: str
    created: int
    n_ctx: int
    most_tokens: int
    vocab_size: int
    bytes_per_block: int
    end_tokens: frozenset[int]
    default_sampling: SamplingParams = field(default_factory=SamplingParams)
    chat_template: str = ""
    speculative: bool = False
    infill: Infill | None = None
    props: dict[str, Any] = field(default_factory=dict)


class Service:
    """One model, served: text in, text out. Lives on the event loop; only encoding leaves it for a thread."""

    def __init__(
        self, worker: Worker, observe: ObserveRequest, record: Callable[[], dict[str, Any]] = dict[str, Any]
    ) -> None:
        self._worker = worker
        self._observe = observe
        self._record = record
        self._model: tuple[ModelCard, ChatText, Vocabulary, Grammars] | None = None
        self._dialect = PLAIN
        self._ids = itertools.count(1)

    def open(
        self, card: ModelCard, text: ChatText, vocabulary: Vocabulary, grammars: Grammars, dialect: Dialect = PLAIN
    ) -> None:
        """The model has been loaded: from now on there is something to ask. ``dialect`` is how it answers in a chat."""
        self._dialect = dialect
        self._model = card, text, vocabulary, grammars

    @property
    def card(self) -> ModelCard:
        """Raises Unavailable until the model has been loaded, as everything does that needs the model."""
        return self._loaded()[0]

    def _loaded(self) -> tuple[ModelCard, ChatText, Vocabulary, Grammars]:
        if self._model is None:
            raise Unavailable("Loading model")
        return self._model

    def check_room(self, num_answers: int) -> None:
        """Whether so many answers more may come, before any work is done for them. Raises Overloaded, Unavailable."""
        self._worker.check_room(num_answers)

    def check_length(self, num_chars: int) -> None:
        """Whether a prompt of so many characters may fit into a slot. Raises InvalidRequest."""
        card, text, _, _ = self._loaded()
        text.check_length(num_chars, card.n_ctx, "prompt")

    async def chat(self, messages: Sequence[dict[str, Any]], ask: Ask, template: dict[str, Any]) -> Completion:
        """Raises InvalidRequest (bad messages, template error, prompt too long, shape refused), Overloaded,
        Unavailable."""
        arrived_s = time.monotonic()  # what encoding takes is part of the wait
        card, text, vocabulary, _ = self._loaded()
        self.check_room(ask.n)  # before the work of encoding
        prompt = await asyncio.to_thread(text.encode_chat, messages, template, card.n_ctx)
        dialect, shape = self._dialect, ask.shape
        if ask.forced:
            dialect, form = dialect.forced
            shape = Shape("calls", form.grammar(ask.forced, ask.many_calls, vocabulary.added), "tools")
        continues = bool(template.get("continue_final_message"))
        return self._begin([prompt], ask, await self._grammar(shape), "messages", dialect, continues, arrived_s)

    async def complete(self, prompts: Sequence[str | Sequence[int | str]], ask: Ask) -> Completion:
        """A prompt is text, token ids, or a mixture. Choice ``index`` is prompt * n + i, as OpenAI numbers them. Raises
        as ``chat``."""
        arrived_s = time.monotonic()
        self._worker.check_room(len(prompts) * ask.n, "n" if ask.n > 1 else "prompt")
        encoded = [await self._encoded([prompt] if isinstance(prompt, str) else prompt) for prompt in prompts]
        return self._begin(encoded, ask, await self._grammar(ask.shape), "prompt", PLAIN, True, arrived_s)

    async def _encoded(self, parts: Sequence[int | str]) -> list[int]:
        card, text, _, _ = self._loaded()
        ids = [part for part in parts if isinstance(part, int)]
        return ids if len(ids) == len(parts) else await asyncio.to_thread(text.encode_parts, parts, card.n_ctx)

    async def _grammar(self, shape: Shape | None) -> Grammar | None:
        """Raises InvalidRequest for a shape that cannot be kept to."""
        if shape is None:
            return None
        grammar = await asyncio.wrap_future(self._loaded()[3].compile(shape.kind, shape.source))
        if isinstance(grammar, str):
            raise InvalidRequest(f"{shape.param}: {grammar}", shape.param)
        return grammar

    def _begin(
        self,
        prompts: Sequence[list[int]],
        ask: Ask,
        grammar: Grammar | None,
        param: str,
        dialect: Dialect,
        continues: bool,
        arrived_s: float,
    ) -> Completion:
        """``continues``: the answer goes on in the middle of the prompt's text."""
        card, _, vocabulary, _ = self._loaded()
        requests: list[Request] = []
        choices: list[Choice] = []
        for prompt in prompts:
            room = self._room(prompt, ask.max_tokens, param)
            prompt_end = b"".join(map(vocabulary.data, prompt[-PROMPT_END_TOKENS:])).decode(errors="replace")
            for i in range(ask.n):
                request = Request(
                    id=next(self._ids),
                    tokens=list(prompt),
                    num_prompt=len(prompt),
                    max_tokens=room,
                    sampling=replace(
                        ask.sampling,
                        seed=ask.sampling.seed + i,
                        banned=tuple(sorted(card.end_tokens)) if ask.ignore_eos else (),
                    ),
                    end_tokens=frozenset() if ask.ignore_eos else card.end_tokens,
                    priority=ask.priority,
                    arrival_s=arrived_s,
                    use_prefix_cache=ask.use_prefix_cache,
                    cache_salt=ask.cache_salt,
                    constraint=None if grammar is None else grammar.start(len(prompt)),
                )
                requests.append(request)
                # What is held to a shape has no reasoning in it, whatever the prompt began, and no calls unless forced.
                reads = dialect if grammar is None or ask.forced else PLAIN
                reader = reads.reader(ask.tools, prompt_end if grammar is None else "")
                index, is_first = len(choices), i == 0
                choices.append(
                    Choice(index, request, vocabulary, ask.stop, continues, reader, ask.many_calls, is_first)
                )
        num_prompt = sum(map(len, prompts))
        if ask.reserve is not None:
            ask.reserve(num_prompt + sum(request.max_tokens for request in requests))
        completion = Completion(self._worker, choices, num_prompt, self._observe)
        self._worker.submit(requests, completion.sink)
        return completion

    def _room(self, prompt: Sequence[int], max_tokens: int | None, param: str) -> int:
        """How many tokens a request may generate: what it asks for, up to the end of its window.

        Raises:
            InvalidRequest: the prompt is empty, not of this vocabulary, or leaves no room; or it and what it asks for
                are more than the whole pool holds.
        """
        card = self.card
        if not prompt:
            raise InvalidRequest("The prompt is empty.", param)
        if len(prompt) >= card.n_ctx:
            raise InvalidRequest(
                f"The prompt has {len(prompt)} tokens, and the context window of a slot is {card.n_ctx} tokens,"
                " at least one of them for the answer.",
                param,
                "context_length_exceeded",
            )
        for token in prompt:
            if not 0 <= token < card.vocab_size:
                raise InvalidRequest(f"Token {token} is not in the vocabulary of {card.vocab_size}.", param)
        wanted = max_tokens or 1
        if len(prompt) + wanted > card.most_tokens:
            raise InvalidRequest(
                f"The prompt has {len(prompt)} tokens and {wanted} more are asked for: {len(prompt) + wanted} in all,"
                f" and the whole KV budget is {card.most_tokens} tokens.",
                param,
            )
        room = card.n_ctx - len(prompt)
        return room if max_tokens is None else min(max_tokens, room)

    # ---- what there is to see ----

    @property
    def status(self) -> str:
        return self._worker.status

    @property
    def tick_timeout_s(self) -> float:
        return self._worker.tick_timeout_s

    def tick_age_s(self) -> float:
        return self._worker.tick_age_s()

    def snapshot(self) -> Snapshot:
        return self._worker.snapshot

    @property
    def bytes_per_block(self) -> int:
        return 0 if self._model is None else self._model[0].bytes_per_block

    @property
    def decode_path(self) -> str:
        """How the model is decoded, for people to read; empty until it is loaded."""
        return "" if self._model is None else str(self._model[0].props.get("decode_path", ""))

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        return self._loaded()[1].encode(text, add_special, parse_special)

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._loaded()[1].decode(ids)

    def token_bytes(self, token_id: int) -> bytes:
        return self._loaded()[2].data(token_id)

    def render(self, messages: Sequence[dict[str, Any]], template: dict[str, Any]) -> str:
        return self._loaded()[1].render(messages, template)

    def count_chat(self, messages: Sequence[dict[str, Any]], template: dict[str, Any]) -> int:
        """How many tokens the prompt of a chat has. Raises InvalidRequest, as ``render``."""
        return len(self._loaded()[1].encode_chat(messages, template))

    async def recording(self) -> dict[str, Any]:
        """The last ticks. Raises FeatureOff."""
        return await asyncio.to_thread(self._record)

    async def reset_cache(self) -> None:
        """Forget every cached prefix that no request holds."""
        self._loaded()
        await self._worker.reset_prefix_cache()
