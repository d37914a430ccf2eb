"""From a question to its text: a real tokenizer, worker and scheduler around an engine that plays given tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from app.completion import Completion, Delta
from app.errors import BackendError, EngineFault, InvalidRequest, Overloaded, RateLimited, Unavailable
from app.request import SamplingParams
from app.scheduler.plan import Row
from app.service import Ask, ModelCard, Service
from app.text.chat import ChatText
from app.text.detokenizer import Vocabulary
from app.text.grammar import Grammars
from app.worker import Worker
from tests.played import PATIENCE_S, PlayedEngine, until, working
from tests.test_detokenizer import byte_fallback

WORDS = ("Hello", "Ġworld", "abc", "bcd", "cd!", "one", "two")
TEMPLATE = "{% for m in messages %}<s>{{ m.content }}<end>{% endfor %}"


def build_tokenizer() -> Any:
    """One token a byte and a few words; <s> and <end> are control tokens, <stop> is a word to the tokenizer."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: token for token, text in enumerate([*alphabet, *WORDS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in ("<s>", "<end>")])
    tokenizer.add_tokens([AddedToken("<stop>", special=False, normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE)


TOKENIZER = build_tokenizer()
VOCABULARY = Vocabulary(TOKENIZER)
TOKENS = {VOCABULARY.data(token): token for token in range(len(TOKENIZER))}
S, END, STOP = TOKENS[b"<s>"], TOKENS[b"<end>"], TOKENS[b"<stop>"]
CARD = ModelCard(
    ids=("small",),
    path="small",
    created=0,
    n_ctx=64,
    most_tokens=4 * 32,
    vocab_size=len(TOKENIZER),
    bytes_per_block=1,
    end_tokens=frozenset({END, STOP}),
)


def ids(*pieces: str | bytes) -> list[int]:
    """One token a piece."""
    return [TOKENS[piece.encode() if isinstance(piece, str) else piece] for piece in pieces]


def spelled(text: str) -> list[int]:
    """One token a byte."""
    return [TOKENS[bytes([byte])] for byte in text.encode()]


@dataclass
class Stage:
    service: Service
    worker: Worker
    engine: PlayedEngine
    observed: list[tuple[float | None, float | None, Sequence[float], float]] = field(default_factory=list)


@asynccontextmanager
async def playing(
    *scripts: Sequence[int], num_steps: int = 10**6, card: ModelCard = CARD, **options: Any
) -> AsyncIterator[Stage]:
    """A service whose request number i gets the tokens of script i (of the last one, past it), and <end> after them."""

    def play(row: Row, index: int) -> int:
        script = scripts[min(row.request_id, len(scripts)) - 1]
        return script[index] if index < len(script) else END

    engine = PlayedEngine(play, num_steps)
    async with working(engine, **options) as worker:
        observed: list[Any] = []
        service = Service(worker, lambda *times: observed.append(times))
        grammars = Grammars(TOKENIZER, card.end_tokens, card.vocab_size)
        service.open(card, ChatText(TOKENIZER, card.end_tokens), VOCABULARY, grammars)
        yield Stage(service, worker, engine, observed)


def go(coroutine: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(coroutine, 3 * PATIENCE_S))


async def read(completion: Completion) -> list[Delta]:
    return [delta async for delta in completion]


def joined(deltas: Sequence[Delta], index: int = 0) -> tuple[str, str | None]:
    """The text and the finish reason of a choice, which ends once and with its last delta."""
    own = [delta for delta in deltas if delta.index == index]
    assert all(delta.finish_reason is None for delta in own[:-1])
    return "".join(delta.text for delta in own), own[-1].finish_reason


async def answer(script: Sequence[int], ask: Ask, **options: Any) -> tuple[list[Delta], Completion]:
    async with playing(script, **options) as stage:
        completion = await stage.service.complete(["p"], ask)
        return await read(completion), completion


USER = [{"role": "user", "content": "Hi <end>"}]


def test_chat_and_complete_give_the_text_and_the_counts() -> None:
    async def body() -> None:
        async with playing(ids("Hello", " world", "!")) as stage:
            chat = await stage.service.chat(USER, Ask(), {})
            deltas = await read(chat)
            assert [delta.text for delta in deltas] == ["Hello", " world", "!", ""]
            assert joined(deltas) == ("Hello world!", "stop")
            assert chat.usage.prompt_tokens == 1 + len("Hi <end>") + 1
            assert chat.usage.completion_tokens == 4
            prompt = list(stage.engine.plans[0].rows[0].tokens)[: chat.usage.prompt_tokens]
            assert (prompt[0], prompt[-1]) == (S, END)
            assert END not in prompt[:-1]
            text = await stage.service.complete([ids("a", "b")], Ask(max_tokens=2))
            assert joined(await read(text)) == ("Hello world", "length")
            assert text.usage.prompt_tokens == text.usage.completion_tokens == 2

    go(body())


@pytest.mark.parametrize("end", [END, STOP])
def test_an_end_token_has_no_text_and_no_entry(end: int) -> None:
    async def body() -> None:
        for script, text in ((ids("one"), "one"), (ids("one", b"\xe6"), "one�")):
            ask = Ask(SamplingParams(num_logprobs=0), stop=("e!",))
            deltas, completion = await answer([*script, end], ask)
            assert joined(deltas) == (text, "stop")
            entries = [entry for delta in deltas for entry in delta.logprobs]
            assert b"".join(entry.data for entry in entries).decode(errors="replace") == text
            assert len(entries) == len(script)
            assert completion.usage.completion_tokens == len(script) + 1

    go(body())


@pytest.mark.parametrize(
    ("pieces", "stop", "text", "num_output"),
    [
        (["one", "abc", "bcd", "two"], ("cb",), "oneab", 3),
        (["one", "abc", "two"], ("abc",), "one", 2),
        (["one", "a", "b", "two"], ("nea", "zz"), "o", 2),
        (["one", "a", "b", "c", "two"], ("eabc",), "on", 4),
        (["Hello"], ("Hell",), "", 1),
        (["one", b"\xe6", b"\x97", b"\xa5", "two"], ("日",), "one", 4),
    ],
)
def test_a_stop_string_never_leaks(pieces: list[Any], stop: tuple[str, ...], text: str, num_output: int) -> None:
    async def body() -> None:
        async with playing([*ids(*pieces), *ids("two") * 40], num_steps=num_output) as stage:
            completion = await stage.service.complete(["p"], Ask(SamplingParams(num_logprobs=0), stop=stop))
            deltas = await read(completion)
            assert joined(deltas) == (text, "stop")
            assert deltas[-1].stop_string == stop[0]
            assert completion.usage.completion_tokens == num_output
            shown = b"".join(entry.data for delta in deltas for entry in delta.logprobs).decode()
            assert shown.startswith(text)
            assert len(shown) - len(text) < 5  # the token that holds the cut is whole, and the last
            stage.engine.allow(1)  # the tick that was under way meanwhile
            await until(lambda: stage.worker.snapshot.total_completed)
            counters = stage.worker.snapshot.counters
            assert counters.completed == {"stop": 1}
            assert counters.completion_tokens == num_output

    go(body())


def test_entries_behind_the_cut_are_dropped() -> None:
    async def body() -> None:
        pieces = ["one", "two", "a", "b"]
        deltas, _ = await answer(ids(*pieces), Ask(SamplingParams(num_logprobs=0), stop=("ab",)))
        assert [entry.text for delta in deltas for entry in delta.logprobs] == ["one", "two"]

    go(body())


def test_what_a_stop_string_held_back_comes_out_at_the_end() -> None:
    async def body() -> None:
        for max_tokens, reason in ((2, "length"), (None, "stop")):
            ask = Ask(SamplingParams(num_logprobs=0), max_tokens, stop=("cd",))
            deltas, _ = await answer(ids("one", "abc"), ask)
            assert deltas[-1].text == "c"
            assert joined(deltas) == ("oneabc", reason)
            assert [entry.text for delta in deltas for entry in delta.logprobs] == ["one", "abc"]

    go(body())


def test_an_unfinished_character_comes_out_at_the_end() -> None:
    async def body() -> None:
        deltas, completion = await answer(spelled("é日"), Ask(SamplingParams(num_logprobs=1), max_tokens=4))
        assert joined(deltas) == ("é�", "length")
        assert completion.usage.completion_tokens == 4
        entries = [entry for delta in deltas for entry in delta.logprobs]
        assert b"".join(entry.data for entry in entries) == "é日".encode()[:4]
        assert [entry.text for entry in entries] == ["�"] * 4
        assert entries[0].top[0].data == entries[0].data == "é".encode()[:1]
        assert entries[0].top[0].logprob == entries[0].logprob == -0.5
        assert [len(entry.top) for entry in entries] == [2] * 4

    go(body())


def test_a_stop_string_that_the_end_completes_is_a_stop() -> None:
    async def body() -> None:
        deltas, _ = await answer(ids("one", b"\xe6"), Ask(max_tokens=2, stop=("e�",)))
        assert joined(deltas) == ("on", "stop")

    go(body())


def test_entries_wait_for_their_text_and_join_to_it() -> None:
    async def body() -> None:
        text = "Grüße, 日本 🐱!"
        deltas, _ = await answer(spelled(text), Ask(SamplingParams(num_logprobs=0), stop=("never",)))
        assert joined(deltas) == (text, "stop")
        assert "�" not in "".join(delta.text for delta in deltas)
        for end in range(1, len(deltas)):
            data = b"".join(entry.data for delta in deltas[:end] for entry in delta.logprobs)
            assert data.decode() == "".join(delta.text for delta in deltas[:end])

    go(body())


def test_a_control_token_inside_the_text_is_silent() -> None:
    async def body() -> None:
        deltas, _ = await answer([*ids("one"), S, *ids("two")], Ask(SamplingParams(num_logprobs=0)))
        assert joined(deltas) == ("onetwo", "stop")
        assert [entry.text for delta in deltas for entry in delta.logprobs] == ["one", "two"]

    go(body())


def test_no_entries_unless_asked_for() -> None:
    async def body() -> None:
        deltas, _ = await answer(ids("one", "two"), Ask())
        assert all(delta.logprobs == () for delta in deltas)

    go(body())


def test_choices_are_numbered_prompt_by_prompt_and_seeded_one_by_one() -> None:
    async def body() -> None:
        scripts = [ids(*text) for text in ("a1x", "b2x", "c3x", "d4x")]
        async with playing(*scripts) as stage:
            ask = Ask(SamplingParams(seed=7), stop=("x",), n=2)
            completion = await stage.service.complete(["pp", ids("q", "q", "q")], ask)
            deltas = await read(completion)
            assert [joined(deltas, index) for index in range(4)] == [
                (text, "stop") for text in ("a1", "b2", "c3", "d4")
            ]
            assert completion.usage.prompt_tokens == 5
            assert completion.usage.completion_tokens == 12
            rows = {row.request_id: row for plan in stage.engine.plans for row in plan.rows}
            assert [(rows[i].sampling.seed, rows[i].num_prompt) for i in (1, 2, 3, 4)] == [
                (7, 2),
                (8, 2),
                (7, 3),
                (8, 3),
            ]
            assert len(stage.observed) == 4

    go(body())


def test_ignore_eos_bans_the_end_tokens() -> None:
    async def body() -> None:
        async with playing([*ids("one"), END, *ids("two")]) as stage:
            completion = await stage.service.complete(["p"], Ask(max_tokens=3, ignore_eos=True))
            assert joined(await read(completion)) == ("onetwo", "length")
            assert stage.engine.plans[0].rows[0].sampling.banned == tuple(sorted((END, STOP)))
            completion = await stage.service.complete(["p"], Ask(max_tokens=3))
            assert joined(await read(completion)) == ("one", "stop")
            assert stage.engine.plans[-1].rows[0].sampling.banned == ()

    go(body())


def test_max_tokens_ends_with_the_window() -> None:
    async def body() -> None:
        async with playing(ids("a") * 100) as stage:
            for max_tokens in (None, 5, 68):
                completion = await stage.service.complete([ids("p") * 60], Ask(max_tokens=max_tokens))
                assert joined(await read(completion)) == ("aaaa", "length")

    go(body())


def test_cached_tokens_are_counted_and_can_be_declined() -> None:
    async def body() -> None:
        async with playing(ids("one"), prefix_cache=True) as stage:
            cached = []
            for use in (True, True, False):
                completion = await stage.service.complete(["a long prompt"], Ask(use_prefix_cache=use))
                await read(completion)
                cached.append(completion.usage.cached_tokens)
            assert cached == [0, 12, 0]
            await stage.service.reset_cache()
            completion = await stage.service.complete(["a long prompt"], Ask())
            await read(completion)
            assert completion.usage.cached_tokens == 0

    go(body())


def test_timings_and_observations_are_sound() -> None:
    async def body() -> None:
        async with playing(ids("one", "two", "one")) as stage:
            completion = await stage.service.complete(["p", "q"], Ask())
            await read(completion)
            timings = completion.timings
            assert min(timings.queue_s, timings.prompt_s, timings.predicted_s) >= 0.0
            assert timings.predicted_s > 0.0
            assert len(stage.observed) == 2
            for queue_s, ttft_s, gaps_s, e2e_s in stage.observed:
                assert queue_s is not None
                assert ttft_s is not None
                assert 0.0 <= queue_s <= ttft_s <= e2e_s
                assert len(gaps_s) == 3
                assert min(gaps_s) >= 0.0

    go(body())


def test_the_finish_reason_is_there_once_every_choice_has_an_answer() -> None:
    async def body() -> None:
        async with playing(spelled("abcdef")) as stage:
            for ask, reason in (
                (Ask(), "stop"),
                (Ask(stop=("cd",)), "stop"),
                (Ask(max_tokens=2), "length"),
                (Ask(max_tokens=2, n=2), "length"),
            ):
                completion = await stage.service.complete(["p"], ask)
                assert completion.finish_reason is None
                await read(completion)
                assert completion.finish_reason == reason
            left = await stage.service.complete(["p"], Ask())
            left.close()
            assert left.finish_reason is None

    go(body())


def test_the_most_tokens_are_reserved_before_anything_is_submitted() -> None:
    told: list[int] = []

    def refuse(num_tokens: int) -> None:
        told.append(num_tokens)
        raise RateLimited("0 tokens a minute", 1.0)

    async def body() -> None:
        async with playing(ids("one")) as stage:
            await read(await stage.service.complete(["pq", "p"], Ask(max_tokens=5, n=2, reserve=told.append)))
            num_steps = len(stage.engine.plans)
            with pytest.raises(RateLimited):
                await stage.service.complete(["pq"], Ask(reserve=refuse))
            assert stage.worker.snapshot.num_queued == 0
            assert len(stage.engine.plans) == num_steps

    go(body())
    assert told == [3 + 4 * 5, 2 + 62]


def test_closing_cancels_whatever_is_open_and_only_once() -> None:
    async def body() -> None:
        async with playing(ids("a") * 50, num_steps=1) as stage:
            never_read = await stage.service.complete(["p"], Ask(n=2))
            never_read.close()
            never_read.close()
            assert await read(never_read) == []
            half_read = await stage.service.complete(["p"], Ask())
            stage.engine.allow(3)
            deltas = aiter(half_read)
            assert (await anext(deltas)).text == "a"
            half_read.close()
            assert [delta async for delta in deltas] == []
            stage.engine.allow()
            await until(lambda: stage.worker.snapshot.total_completed == 3)
            assert stage.worker.snapshot.counters.completed == {"cancelled": 3}
            half_read.close()
            assert len(stage.observed) == 3

    go(body())


def test_a_reader_that_is_cancelled_cancels_its_requests() -> None:
    async def body() -> None:
        async with playing(ids("a") * 50, num_steps=1) as stage:
            completion = await stage.service.complete(["p"], Ask(n=2))
            reader = asyncio.ensure_future(read(completion))
            await until(lambda: stage.worker.snapshot.num_active)
            reader.cancel()
            with pytest.raises(asyncio.CancelledError):
                await reader
            stage.engine.allow()
            await until(lambda: stage.worker.snapshot.counters.completed == {"cancelled": 2})

    go(body())


def test_admitted_returns_when_all_have_a_slot_and_loses_no_news() -> None:
    async def body() -> None:
        async with playing(ids("one", "two"), num_slots=1, max_batch_size=1) as stage:
            completion = await stage.service.complete(["p"], Ask(n=2))
            await completion.admitted(PATIENCE_S)
            deltas = await read(completion)
            assert [joined(deltas, index) for index in (0, 1)] == [("onetwo", "stop")] * 2

    go(body())


def test_admitted_returns_after_its_timeout_or_cancelled_and_loses_no_news() -> None:
    async def body() -> None:
        async with playing(ids("one", "two"), num_steps=0) as stage:
            completion = await stage.service.complete(["p"], Ask())
            await completion.admitted(0.01)
            waiting = asyncio.ensure_future(completion.admitted(PATIENCE_S))
            await asyncio.sleep(0)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            stage.engine.allow()
            assert joined(await read(completion)) == ("onetwo", "stop")

    go(body())


@pytest.mark.parametrize("continues", [False, True])
def test_a_chat_that_continues_its_last_message_keeps_the_space_between(continues: bool) -> None:
    tokenizer = byte_fallback()
    tokenizer.chat_template = TEMPLATE
    the, end = tokenizer.convert_tokens_to_ids(["▁the", "<end>"])
    card = replace(CARD, vocab_size=len(tokenizer), end_tokens=frozenset({end}))

    async def body() -> None:
        async with working(PlayedEngine(lambda row, index: end if index else the)) as worker:
            service = Service(worker, lambda *_: None)
            grammars = Grammars(TOKENIZER, card.end_tokens, card.vocab_size)
            service.open(card, ChatText(tokenizer, card.end_tokens), Vocabulary(tokenizer), grammars)
            template = {"add_generation_prompt": False, "continue_final_message": continues}
            completion = await service.chat(USER, Ask(), template)
            assert joined(await read(completion)) == (" the" if continues else "the", "stop")

    go(body())


def test_admitted_may_be_asked_again_and_tells_what_was_cached() -> None:
    async def body() -> None:
        async with playing(ids("one", "two"), prefix_cache=True) as stage:
            await read(await stage.service.complete(["p" * 40], Ask()))
            completion = await stage.service.complete(["p" * 40], Ask())
            await completion.admitted(None)
            await completion.admitted(None)
            assert completion.usage.cached_tokens > 0
            assert joined(await read(completion)) == ("onetwo", "stop")

    go(body())


def test_admitted_raises_a_refusal() -> None:
    async def body() -> None:
        async with playing(ids("one"), num_steps=1, num_slots=1, max_batch_size=1) as stage:
            completion = await stage.service.complete(["p"], Ask(n=2))
            drain = asyncio.ensure_future(stage.worker.drain(PATIENCE_S))
            await asyncio.sleep(0)
            stage.engine.allow()
            with pytest.raises(Unavailable, match="Draining"):
                await completion.admitted(PATIENCE_S)
            completion.close()
            await drain

    go(body())


def test_admitted_raises_a_failure_of_the_first_forward() -> None:
    async def body() -> None:
        async with playing(ids("one"), num_steps=0) as stage:
            completion = await stage.service.complete(["p"], Ask())
            stage.engine.failures += [EngineFault("out of memory"), EngineFault("out of memory")]
            stage.engine.allow()
            with pytest.raises(BackendError):
                await completion.admitted(PATIENCE_S)
            completion.close()
            assert joined(await read(await stage.service.complete(["p"], Ask()))) == ("one", "stop")

    go(body())


def test_the_error_of_one_choice_is_raised_and_cancels_the_others() -> None:
    async def body() -> None:
        async with playing(ids("a") * 50, num_steps=0, num_slots=1, max_batch_size=1) as stage:
            completion = await stage.service.complete(["p", "q", "r"], Ask())
            stage.engine.failures += [EngineFault("out of memory"), EngineFault("out of memory")]
            stage.engine.allow(2)
            with pytest.raises(BackendError):
                await read(completion)
            completion.close()
            assert len(stage.observed) == 3
            stage.engine.allow()
            await until(lambda: stage.worker.snapshot.counters.completed == {"error": 1, "cancelled": 2})

    go(body())


def test_a_dead_engine_is_raised_to_the_reader() -> None:
    async def body() -> None:
        async with playing(ids("a") * 50, num_steps=0) as stage:
            completion = await stage.service.complete(["p"], Ask())
            stage.engine.failures.append(RuntimeError("broken"))
            stage.engine.allow()
            with pytest.raises(BackendError):
                await read(completion)
            with pytest.raises(BackendError):
                await stage.service.complete(["p"], Ask())
            assert stage.service.status == "dead"

    go(body())


@pytest.mark.parametrize(
    ("prompt", "ask", "said"),
    [
        ([], Ask(), "empty"),
        ("", Ask(), "empty"),
        ([3, len(TOKENIZER)], Ask(), str(len(TOKENIZER))),
        ([-1], Ask(), "-1"),
        ([1] * 64, Ask(), r"\b64 tokens.* 64 tokens"),
        ([1] * 1000, Ask(max_tokens=1), r"\b1000 tokens.* 64 tokens"),
        ([1] * 28, Ask(max_tokens=101), r"\b28 tokens and 101 .*\b129 in all.* 128 tokens"),
        ("p", Ask(n=9), r"^n: 9 .* 8$"),
        ("p", Ask(stop=("",)), "stop"),
    ],
)
def test_what_can_never_be_served_is_refused_with_its_numbers(prompt: Any, ask: Ask, said: str) -> None:
    async def body() -> None:
        async with playing(ids("one")) as stage:
            with pytest.raises(InvalidRequest, match=said):
                await stage.service.complete(["fine", prompt] if ask.n == 1 else [prompt], ask)
            assert stage.engine.plans == []
            assert stage.observed == []

    go(body())


def test_a_chat_prompt_too_long_names_the_field() -> None:
    async def body() -> None:
        async with playing(ids("one")) as stage:
            with pytest.raises(InvalidRequest) as refusal:
                await stage.service.chat([{"role": "user", "content": "x" * 200}], Ask(), {})
            assert refusal.value.param == "messages"
            assert refusal.value.code == "context_length_exceeded"
            assert "202" in str(refusal.value)

    go(body())


def test_the_rest_of_the_window_is_what_is_generated_where_no_number_is_given() -> None:
    async def body() -> None:
        async with playing(ids("a") * 1000) as stage:
            completion = await stage.service.complete([ids("p") * 40], Ask())
            assert joined(await read(completion)) == ("a" * 24, "length")

    go(body())


def test_a_full_server_refuses_before_it_encodes() -> None:
    async def body() -> None:
        async with playing(ids("one"), num_steps=0, capacity=2) as stage:
            completion = await stage.service.complete(["p"], Ask(n=2))
            with pytest.raises(Overloaded):
                await stage.service.complete(["\ud800"], Ask())
            with pytest.raises(Overloaded):
                await stage.service.chat([{"role": "user", "content": "\ud800"}], Ask(), {})
            completion.close()

    go(body())


def test_before_it_is_open_everything_is_unavailable() -> None:
    async def body() -> None:
        async with working(PlayedEngine()) as worker:
            service = Service(worker, lambda *times: None)
            for call in (
                lambda: service.card,
                lambda: service.tokenize("a", True, True),
                lambda: service.detokenize([1]),
                lambda: service.token_bytes(1),
                lambda: service.render(USER, {}),
            ):
                with pytest.raises(Unavailable, match="Loading model"):
                    call()
            for question in (service.chat(USER, Ask(), {}), service.complete(["a"], Ask()), service.reset_cache()):
                with pytest.raises(Unavailable, match="Loading model"):
                    await question
            assert service.bytes_per_block == 0

    go(body())


def test_small_questions_need_no_engine() -> None:
    async def body() -> None:
        async with playing(ids("one"), num_steps=0) as stage:
            service = stage.service
            assert service.tokenize("é<s>", True, True) == [*spelled("é"), S]
            assert service.tokenize("<s>", True, False) == spelled("<s>")
            assert service.detokenize(spelled("é")) == "é"
            assert service.token_bytes(spelled("é")[0]) == "é".encode()[:1]
            assert service.render(USER, {}) == "<s>Hi <end><end>"
            assert service.bytes_per_block == 1
            assert service.tick_timeout_s == 600.0
            assert service.tick_age_s() == 0.0
            assert service.snapshot() is stage.worker.snapshot

    go(body())
