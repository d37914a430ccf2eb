"""An answer under way: what its tokens turn into on the way to whoever asked."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, field, replace

from app.errands import News, Refused
from app.errors import BackendError, MemoryShortage, MlxcelError, Unavailable, kind_and_place
from app.request import FinishReason, Request
from app.scheduler.plan import Admitted, Draw, Finished, Token
from app.text.detokenizer import Detokenizer, Vocabulary
from app.text.reader import Reader, Said
from app.text.stop import StopStrings
from app.text.tool_calls import ToolCall
from app.worker import Worker

log = logging.getLogger("mlxcel.completion")

# How many news of a completion may wait to be read, before its requests are cancelled.
MAX_UNREAD = 4096
# Queue time and TTFT, gaps between tokens, end-to-end latency; all in seconds, None: never got there.
ObserveRequest = Callable[[float | None, float | None, Sequence[float], float | None], None]


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """``data`` are the token's raw bytes, also where they are only part of a character; ``text`` then has U+FFFD."""

    text: str
    logprob: float
    data: bytes
    top: tuple[TokenLogprob, ...] = ()
    id: int = field(default=0, compare=False)


@dataclass(frozen=True, slots=True)
class Delta:
    """What is new in one choice. Its last delta has a ``finish_reason``: "stop", "length" or "tool_calls".

    ``logprobs`` are those of text, of reasoning and of calls alike. ``stop_string`` is the one that ended the answer,
    if one did; ``limit`` what one of "length" ran into if not its number of tokens: "grammar_limit".
    """

    index: int
    text: str = ""
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: str | None = None
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    stop_string: str | None = None
    limit: str | None = None


@dataclass(slots=True)
class Usage:
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Timings:
    """Seconds of the slowest choice. Queue: arrival to slot; prompt: slot to first token; predicted: first to last."""

    queue_s: float = 0.0
    prompt_s: float = 0.0
    predicted_s: float = 0.0


class Choice:
    """The text of one answer, as it grows out of its tokens.

    Stop strings are looked for in all text between two control tokens, before ``reader`` tells apart what it is.
    Without ``many_calls`` the first call of a function ends the answer.
    """

    def __init__(
        self,
        index: int,
        request: Request,
        vocabulary: Vocabulary,
        stop: Sequence[str],
        continues: bool,
        reader: Reader,
        many_calls: bool = True,
        is_first: bool = True,
    ) -> None:
        """``is_first``: of the answers to its prompt, which is counted once. ``tokens`` has the end token too."""
        self.index = index
        self.is_first = is_first
        self.request = request
        self.request_id = request.id
        self.arrived_s = request.arrival_s
        self.admitted_s: float | None = None
        self.token_times_s: list[float] = []
        self.num_cached = 0
        self.tokens: list[int] = []
        self.is_open = True
        self._end_tokens = request.end_tokens
        self._vocabulary = vocabulary
        self._detokenizer = Detokenizer(vocabulary, continues)
        self._stop = StopStrings(stop)
        self._reader = reader
        self._many_calls = many_calls
        self._has_called = False
        self._logprobs: deque[tuple[int, TokenLogprob]] = deque()

    def take(self, token: Token) -> Delta:
        """What a token makes certain. With a ``finish_reason`` where it ends the answer: a stop string is complete, or
        the only call."""
        drawn = token.draw.token
        self.tokens.append(drawn)
        self.token_times_s.append(token.at_s)
        if drawn in self._end_tokens:
            return Delta(self.index)  # ends the answer and is no part of it
        begins = self._stop.num_fed
        is_control = self._vocabulary.is_control(drawn)
        if token.draw.logprob is not None and not is_control:
            self._logprobs.append((begins, self._described(token.draw)))
        text, stopped = self._stop.feed(self._detokenizer.add(drawn))
        if stopped:
            return self._last(text, FinishReason.STOP, is_whole=False)
        if is_control:
            text += self._stop.flush()
        said = [self._reader.feed(text)]
        if is_control:
            said.append(self._reader.control(self._vocabulary.name(drawn)))
        delta = self._delta(said)
        return self._finished(delta, FinishReason.STOP) if delta.calls and not self._many_calls else delta

    @property
    def timings(self) -> Timings:
        if self.admitted_s is None:
            return Timings()
        times, queue_s = self.token_times_s, self.admitted_s - self.arrived_s
        return Timings(queue_s, times[0] - self.admitted_s, times[-1] - times[0]) if times else Timings(queue_s)

    def end(self, reason: FinishReason) -> Delta:
        """The last delta. Text held back comes out unless a stop string ended the answer."""
        text, stopped = self._stop.feed(self._detokenizer.flush())
        if stopped:
            return self._last(text, FinishReason.STOP, is_whole=False)
        return self._last(text + self._stop.flush(), reason, is_whole=reason is FinishReason.STOP)

    def _last(self, text: str, reason: FinishReason, is_whole: bool) -> Delta:
        return self._finished(self._delta([self._reader.feed(text), self._reader.end(is_whole)]), reason)

    def _delta(self, said: Sequence[Said]) -> Delta:
        calls = [call for part in said for call in part.calls]
        if not self._many_calls:
            del calls[1:]
        self._has_called = self._has_called or bool(calls)
        text, reasoning = "".join(part.text for part in said), "".join(part.reasoning for part in said)
        return Delta(self.index, text, self._shown(), None, reasoning, tuple(calls))

    def _finished(self, delta: Delta, reason: FinishReason) -> Delta:
        if reason is FinishReason.GRAMMAR_LIMIT:  # no client knows it, but all take "length" for an incomplete answer
            return replace(delta, finish_reason=FinishReason.LENGTH.value, limit=reason.value)
        finish_reason = "tool_calls" if self._has_called and reason is FinishReason.STOP else reason.value
        return replace(delta, finish_reason=finish_reason, stop_string=self._stop.matched)

    def _shown(self) -> tuple[TokenLogprob, ...]:
        """Entries of the tokens whose text has begun to be shown."""
        shown = []
        while self._logprobs and self._logprobs[0][0] < self._stop.num_emitted:
            shown.append(self._logprobs.popleft()[1])
        return tuple(shown)

    def _described(self, draw: Draw) -> TokenLogprob:
        return replace(self._entry(draw.token, draw.logprob or 0.0), top=tuple(self._entry(*each) for each in draw.top))

    def _entry(self, token: int, logprob: float) -> TokenLogprob:
        data = self._vocabulary.data(token)
        return TokenLogprob(data.decode("utf-8", "replace"), logprob, data, id=token)


class Completion:
    """A call under way: ``async for delta in completion``, then ``usage`` and ``timings`` are complete."""

    def __init__(self, worker: Worker, choices: Sequence[Choice], num_prompt: int, observe: ObserveRequest) -> None:
        self.usage = Usage(prompt_tokens=num_prompt)
        self.timings = Timings()
        self.finish_reason: str | None = None  # of the last choice that has ended
        self.choices = tuple(choices)
        self._worker = worker
        self._choices = {choice.request_id: choice for choice in choices}
        self._observe = observe
        self._news: asyncio.Queue[News] = asyncio.Queue()
        self._unread: deque[News] = deque()

    def sink(self, news: News) -> None:
        """Where the worker puts news of any of the choices. Who does not read them loses the rest of the answer: a
        request must not go on, and its news pile up, for a client that takes nothing."""
        if self._news.qsize() < MAX_UNREAD or isinstance(news, Finished | Refused):
            self._news.put_nowait(news)
            return
        log.warning("request %d is cancelled: %d tokens of its answer were not read", news.request_id, MAX_UNREAD)
        self._worker.cancel(self._choices)
        self._news.put_nowait(Refused(news.request_id, Unavailable("The answer was not read fast enough.")))

    async def admitted(self, timeout_s: float | None) -> None:
        """Return when every choice has a slot, or after ``timeout_s`` if that is given; raise what refuses or fails one
        before."""
        waiting = set(self._choices) - {news.request_id for news in self._unread}
        try:
            async with asyncio.timeout(timeout_s):
                while waiting:
                    news = await self._receive()
                    self._unread.append(news)
                    if failure := _failure(news):
                        raise failure
                    waiting.discard(news.request_id)
        except TimeoutError:
            return

    def __aiter__(self) -> AsyncIterator[Delta]:
        return self._deltas()

    async def _deltas(self) -> AsyncIterator[Delta]:
        """Raises the error that ends a choice: no other choice is waited for then."""
        try:
            while any(choice.is_open for choice in self._choices.values()):
                news = self._unread.popleft() if self._unread else await self._receive()
                choice = self._choices[news.request_id]
                if not choice.is_open:
                    continue
                if failure := _failure(news):
                    raise failure
                if isinstance(news, Token):
                    with _making_text(choice):
                        delta = choice.take(news)
                    if delta.finish_reason is not None:
                        self._worker.finish(choice.request_id, len(choice.tokens))
                        self._close(choice)
                        self.finish_reason = delta.finish_reason
                        yield delta
                    elif delta != Delta(choice.index):
                        yield delta
                elif isinstance(news, Finished):
                    self._close(choice)
                    with _making_text(choice):
                        last = choice.end(news.reason)
                    self.finish_reason = last.limit or last.finish_reason
                    yield last
        finally:
            self.close()

    async def _receive(self) -> News:
        """The next of the news. What an admission tells is known from here on, also while it is unread."""
        news = await self._news.get()
        if isinstance(news, Admitted):
            choice = self._choices[news.request_id]
            choice.admitted_s, choice.num_cached = news.at_s, news.num_cached
            self.usage.cached_tokens += news.num_cached if choice.is_first else 0
        return news

    def close(self) -> None:
        """Cancel what still runs. May be called at any time, and again."""
        still_open = [choice for choice in self._choices.values() if choice.is_open]
        self._worker.cancel(choice.request_id for choice in still_open)
        for choice in still_open:
            self._close(choice)

    def _close(self, choice: Choice) -> None:
        choice.is_open = False
        self.usage.completion_tokens += len(choice.tokens)
        self.timings = Timings(*map(max, astuple(self.timings), astuple(choice.timings)))
        times = choice.token_times_s
        self._observe(
            None if choice.admitted_s is None else choice.admitted_s - choice.arrived_s,
            times[0] - choice.arrived_s if times else None,
            [late - early for early, late in itertools.pairwise(times)],
            times[-1] - choice.arrived_s if times else None,
        )


@contextmanager
def _making_text(choice: Choice) -> Iterator[None]:
    """A fault in making text of tokens is the end of that completion and of no other."""
    try:
        yield
    except Exception as error:
        log.error("request %d failed while its text was made: %s", choice.request_id, kind_and_place(error))
        raise BackendError from None


def _failure(news: News) -> MlxcelError | None:
    """The error that ends a choice, where it does not end with an answer."""
    if isinstance(news, Refused):
        return news.error
    if not isinstance(news, Finished) or news.reason.is_answer:
        return None
    return MemoryShortage() if news.reason is FinishReason.NO_MEMORY else BackendError()
