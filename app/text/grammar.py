"""Answers that keep to a JSON schema or a grammar: which tokens may come next."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLMatcher, LLTokenizer

from app.errors import Overloaded
from app.text.chat import Tokenizer, fast_tokenizer
from app.text.trial import LIMITS, STACK_BYTES, Kind, attempt, shortened

MAX_CACHED = 32
MAX_WAITING = 16
# Text that a grammar leaves no choice in is expanded at once, and what goes on for ever breaks off somewhere beyond.
ENDLESS = "it asks for a text without an end"
NO_BEGINNING = "NoExtensionBias"  # llguidance's word for rules of which none can ever begin
NOT_ALLOWED = "doesn't satisfy the grammar"  # and of a token that may not come next
MOST_FORCED_BYTES = 20_000
STEP_S = 0.2  # of computing; everybody's next token waits for it, and what is not pathological takes some milliseconds


class Matcher:
    """Where one answer stands in its grammar. It follows the tokens of a request, which only ever grow, as a count
    that catches up with their number: a requeued request goes on where it was."""

    def __init__(self, matcher: LLMatcher, num_prompt: int) -> None:
        self._matcher = matcher
        self._num_taken = num_prompt
        self.is_at_limit = False

    def mask(self, tokens: Sequence[int]) -> bytes:
        """Which token may follow ``tokens``, one bit each, the lowest of a byte first. An end token may where the
        grammar is complete, and nothing else may where it cannot go on. Takes the library up to some milliseconds,
        without the GIL.

        Raises:
            ValueError: the answer has left the grammar, or a step of it is too complex (``is_at_limit``).
        """
        began_s = time.thread_time()
        for token in tokens[self._num_taken :]:
            self._check(began_s)
            self._matcher.consume_token(token)
            self._num_taken += 1
        mask = self._matcher.compute_bitmask()
        self._check(began_s)
        return mask

    def _check(self, began_s: float) -> None:
        if self._matcher.is_error() and NOT_ALLOWED in self._matcher.get_error():
            raise ValueError("a token that the grammar forbids")
        # Once said it is always said: a step that failed is tried once more to find out whose fault it was.
        self.is_at_limit |= self._matcher.is_error() or time.thread_time() - began_s > STEP_S
        if self.is_at_limit:
            raise ValueError("a step beyond its limits")


class Grammar:
    """What the answers to one request keep to, compiled for them alone: the library counts what it has worked out for a
    grammar and all copies of it together, and where that is too much none of them goes on."""

    def __init__(self, compiled: LLMatcher) -> None:
        self._compiled = compiled

    def start(self, num_prompt: int) -> Matcher:
        """For one answer, after a prompt of so many tokens."""
        return Matcher(self._compiled.deep_copy(), num_prompt)


class Grammars:
    """Compiles for one model, on a thread of its own, and keeps what was found of the sources that were asked for last:
    to try a new one takes some hundred times as long as to compile it again. ``compile`` belongs to the event loop."""

    def __init__(self, tokenizer: Tokenizer, end_tokens: Iterable[int], vocab_size: int) -> None:
        """``vocab_size`` is the model's, which may be more than the tokenizer's. Raises StartError as ChatText does."""
        backend = fast_tokenizer(tokenizer)
        size = max(vocab_size, backend.get_vocab_size(with_added_tokens=True))
        ends = sorted(end_tokens) or None
        text = backend.to_str()
        self._threads = ThreadPoolExecutor(1, "grammar")
        self._tried: OrderedDict[tuple[Kind, str], Future[tuple[str, str]]] = OrderedDict()
        before = threading.stack_size(2 * STACK_BYTES)  # what passed its trial fits into it
        try:
            # Takes a second or so, and starts the thread.
            self._tokenizer = self._threads.submit(lambda: LLTokenizer(text, n_vocab=size, eos_token=ends))
        finally:
            threading.stack_size(before)

    def compile(self, kind: Kind, source: str) -> Future[Grammar | str]:
        """A grammar of the caller's own, or why there is none: a text for who sent it. One is compiled at a time.

        Raises:
            Overloaded: too many new ones wait to be tried.
        """
        key = kind, source
        trial = self._tried.pop(key, None)
        if trial is None or _has_failed(trial):
            if sum(not other.done() for other in self._tried.values()) >= MAX_WAITING:
                raise Overloaded
            trial = self._threads.submit(self._try, kind, source)
        self._tried[key] = trial
        if len(self._tried) > MAX_CACHED:
            self._tried.popitem(last=False)
        return self._threads.submit(self._compile, trial)

    def _try(self, kind: Kind, source: str) -> tuple[str, str]:
        """The grammar in the library's form, and why it cannot be used: one of the two is empty."""
        if self._tokenizer.exception() is not None:
            return "", "not possible with the tokenizer of this model"
        grammar, reason = attempt(kind, source)
        if reason:
            return "", reason
        compiled = self._matcher(grammar)
        if compiled.is_error():
            error = compiled.get_error()
            return "", ENDLESS if NO_BEGINNING in error else shortened(error)
        return ("", ENDLESS) if len(compiled.compute_ff_bytes()) > MOST_FORCED_BYTES else (grammar, "")

    def _compile(self, trial: Future[tuple[str, str]]) -> Grammar | str:
        grammar, reason = trial.result()  # tried on this thread, before
        return reason or Grammar(self._matcher(grammar))

    def _matcher(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer.result(), grammar, log_level=0, limits=LIMITS)
        matcher.compute_bitmask()  # the first step takes longest: nobody else's token should wait for it
        return matcher


def _has_failed(trial: Future[tuple[str, str]]) -> bool:
    return trial.done() and (trial.exception() is not None or trial.result()[1] != "")
