"""A question in, a stream of text out: what HTTP and the command line both call."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from app.errors import BackendError, InvalidRequest, Unavailable
from app.request import FinishReason, Request, SamplingParams
from app.scheduler.plan import Admitted, Draw, Finished, Token
from app.scheduler.snapshot import Snapshot
from app.text.chat import ChatText
from app.text.detokenizer import Detokenizer, Vocabulary
from app.text.stop import StopStrings
from app.worker import News, Refused, Worker


@dataclass(frozen=True, slots=True)
class Ask:
    """What is wanted, whoever asks. ``sampling.seed`` is the seed of choice 0; choice i uses seed + i.

    ``max_tokens`` None means the rest of the window.
    """

    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    n: int = 1
    priority: int = 0
    use_prefix_cache: bool = True
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """``data`` are the token's raw bytes, also where they are only part of a character; ``text`` then has U+FFFD."""

    text: str
    logprob: float
    data: bytes
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of one choice. The last delta of a choice has a ``finish_reason``: "stop" or "length"."""

    index: int
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None


@dataclass(slots=True)
class Usage:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(slots=True)
class Timings:
    """Seconds of the slowest choice. Queue: arrival to slot; prompt: slot to first token; predicted: first to last."""

    queue_s: float = 0.0
    prompt_s: float = 0.0
    predicted_s: float = 0.0


# Queue time and TTFT (None: never got there), gaps between tokens, end-to-end latency; all in seconds.
ObserveRequest = Callable[[float | None, float | None, Sequence[float], float], None]


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
    props: dict[str, Any] = field(default_factory=dict)


class Choice:
    """The text of one answer, as it grows out of its tokens."""

    def __init__(
        self, index: int, request: Request, vocabulary: Vocabulary, stop: Sequence[str], continues: bool
    ) -> None:
        self.index = index
        self.request_id = request.id
        self.arrived_s = request.arrival_s
        self.admitted_s: float | None = None
        self.token_times_s: list[float] = []
        self.num_output = 0
        self.is_open = True
        self._vocabulary = vocabulary
        self._detokenizer = Detokenizer(vocabulary, continues)
        self._stop = StopStrings(stop)
        self._logprobs: deque[tuple[int, TokenLogprob]] = deque()

    def take(self, token: Token) -> tuple[Delta, bool]:
        """The text that a token makes certain, and whether a stop string is complete in it."""
        self.num_output += 1
        self.token_times_s.append(token.at_s)
        begins = self._stop.num_fed
        if token.draw.logprob is not None:
            self._logprobs.append((begins, self._described(token.draw)))
        text, stopped = self._stop.feed(self._detokenizer.add(token.draw.token))
        return Delta(self.index, text, self._shown()), stopped

    def end(self, reason: FinishReason) -> Delta:
        """The last delta. Text held back comes out unless a stop string ended the answer."""
        text, stopped = self._stop.feed(self._detokenizer.flush())
        if stopped:
            reason = FinishReason.STOP
        else:
            text += self._stop.flush()
        return Delta(self.index, text, self._shown(), reason.value)

    def _shown(self) -> tuple[TokenLogprob, ...]:
        """Entries of the tokens whose text has begun to be shown."""
        shown = []
        while self._logprobs and self._logprobs[0][0] < self._stop.num_emitted:
            shown.append(self._logprobs.popleft()[1])
        return tuple(shown)

    def _described(self, draw: Draw) -> TokenLogprob:
        top = tuple(self._entry(token, logprob) for token, logprob in draw.top)
        return replace(self._entry(draw.token, draw.logprob or 0.0), top=top)

    def _entry(self, token: int, logprob: float) -> TokenLogprob:
        data = self._vocabulary.data(token)
        return TokenLogprob(data.decode("utf-8", "replace"), logprob, data)


class Completion:
    """A call under way: ``async for delta in completion``, then ``usage`` and ``timings`` are complete."""

    def __init__(self, worker: Worker, choices: Sequence[Choice], num_prompt: int, observe: ObserveRequest) -> None:
        self.usage = Usage(prompt_tokens=num_prompt)
        self.timings = Timings()
        self._worker = worker
        self._choices = {choice.request_id: choice for choice in choices}
        self._observe = observe
        self._news: asyncio.Queue[News] = asyncio.Queue()
        self._unread: deque[News] = deque()

    def sink(self, news: News) -> None:
        """Where the worker puts news of any of the choices."""
        self._news.put_nowait(news)

    async def admitted(self, timeout_s: float) -> None:
        """Return when every choice has a slot, or after ``timeout_s``; raise the refusal, if that comes first."""
        waiting = set(self._choices)
        try:
            async with asyncio.timeout(timeout_s):
                while waiting:
                    news = await self._news.get()
                    self._unread.append(news)
                    if isinstance(news, Refused):
                        raise news.error
                    waiting.discard(news.request_id)
        except TimeoutError:
            return

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self._deltas()

    async def _deltas(self) -> AsyncIterator[Delta]:
        """Raises the error that ends a choice: no other choice is waited for then."""
        try:
            while any(choice.is_open for choice in self._choices.values()):
                news = self._unread.popleft() if self._unread else await self._news.get()
                choice = self._choices[news.request_id]
                if not choice.is_open:
                    continue
                if isinstance(news, Admitted):
                    choice.admitted_s = news.at_s
                    self.usage.cached_tokens += news.num_cached
                elif isinstance(news, Token):
                    delta, stopped = choice.take(news)
                    if stopped:
                        self._worker.finish(choice.request_id, choice.num_output)
                        self._close(choice)
                        yield replace(delta, finish_reason=FinishReason.STOP.value)
                    elif delta.text or delta.logprobs:
                        yield delta
                elif isinstance(news, Finished) and news.reason in (FinishReason.STOP, FinishReason.LENGTH):
                    self._close(choice)
                    yield choice.end(news.reason)
                else:
                    raise news.error if isinstance(news, Refused) else BackendError()
        finally:
            self.close()

    def close(self) -> None:
        """Cancel what still runs. May be called at any time, and again."""
        still_open = [choice for choice in self._choices.values() if choice.is_open]
        self._worker.cancel(choice.request_id for choice in still_open)
        for choice in still_open:
            self._close(choice)

    def _close(self, choice: Choice) -> None:
        choice.is_open = False
        self.usage.completion_tokens += choice.num_output
        times, timings = choice.token_times_s, self.timings
        if choice.admitted_s is not None:
            timings.queue_s = max(timings.queue_s, choice.admitted_s - choice.arrived_s)
        if times and choice.admitted_s is not None:
            timings.prompt_s = max(timings.prompt_s, times[0] - choice.admitted_s)
            timings.predicted_s = max(timings.predicted_s, times[-1] - times[0])
        self._observe(
            None if choice.admitted_s is None else choice.admitted_s - choice.arrived_s,
            times[0] - choice.arrived_s if times else None,
            [late - early for early, late in itertools.pairwise(times)],
            time.monotonic() - choice.arrived_s,
        )


class Service:
    """One model, served: text in, text out. Lives on the event loop; only encoding leaves it for a thread."""

    def __init__(self, worker: Worker, observe: ObserveRequest) -> None:
        self._worker = worker
        self._observe = observe
        self._model: tuple[ModelCard, ChatText, Vocabulary] | None = None
        self._ids = itertools.count(1)

    def open(self, card: ModelCard, text: ChatText, vocabulary: Vocabulary) -> None:
        """The model has been loaded: from now on there is something to ask."""
        self._model = card, text, vocabulary

    @property
    def card(self) -> ModelCard:
        """Raises Unavailable until the model has been loaded, as everything does that needs the model."""
        return self._loaded()[0]

    def _loaded(self) -> tuple[ModelCard, ChatText, Vocabulary]:
        if self._model is None:
            raise Unavailable("Loading model")
        return self._model

    async def chat(self, messages: Sequence[dict[str, Any]], ask: Ask, template: dict[str, Any]) -> Completion:
        """Raises InvalidRequest (bad messages, template error, prompt too long), Overloaded, Unavailable."""
        _, text, _ = self._loaded()
        prompt = await asyncio.to_thread(text.encode_chat, messages, template)
        return self._begin([prompt], ask, "messages", continues=False)

    async def complete(self, prompts: Sequence[str | Sequence[int]], ask: Ask) -> Completion:
        """Choice ``index`` is prompt * n + i, as OpenAI numbers them. Raises as ``chat``."""
        _, text, _ = self._loaded()
        encoded = [
            await asyncio.to_thread(text.encode, prompt) if isinstance(prompt, str) else list(prompt)
            for prompt in prompts
        ]
        return self._begin(encoded, ask, "prompt", continues=True)

    def _begin(self, prompts: Sequence[list[int]], ask: Ask, param: str, continues: bool) -> Completion:
        arrived_s = time.monotonic()
        card, _, vocabulary = self._loaded()
        requests: list[Request] = []
        choices: list[Choice] = []
        for prompt in prompts:
            room = self._room(prompt, ask.max_tokens, param)
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
                )
                requests.append(request)
                choices.append(Choice(len(choices), request, vocabulary, ask.stop, continues))
        num_prompt = sum(map(len, prompts))
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
        for token in prompt:
            if not 0 <= token < card.vocab_size:
                raise InvalidRequest(f"Token {token} is not in the vocabulary of {card.vocab_size}.", param)
        if len(prompt) >= card.n_ctx:
            raise InvalidRequest(
                f"The prompt has {len(prompt)} tokens, and the context window of a slot is {card.n_ctx} tokens.",
                param,
                "context_length_exceeded",
            )
        wanted = max_tokens or 1
        if len(prompt) + wanted > card.most_tokens:
            raise InvalidRequest(
                f"The prompt has {len(prompt)} tokens and {wanted} more are asked for: {len(prompt) + wanted} in all,"
                f" and the whole KV budget is {card.most_tokens} tokens.",
                param,
            )
        room = min(card.n_ctx, card.most_tokens) - len(prompt)
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

    def tokenize(self, text: str, add_special: bool, parse_special: bool) -> list[int]:
        return self._loaded()[1].encode(text, add_special, parse_special)

    def detokenize(self, ids: Sequence[int]) -> str:
        return self._loaded()[1].decode(ids)

    def token_bytes(self, token_id: int) -> bytes:
        return self._loaded()[2].data(token_id)

    def render(self, messages: Sequence[dict[str, Any]], template: dict[str, Any]) -> str:
        return self._loaded()[1].render(messages, template)

    async def reset_cache(self) -> None:
        """Forget every cached prefix that no request holds."""
        self._loaded()
        await self._worker.reset_prefix_cache()
