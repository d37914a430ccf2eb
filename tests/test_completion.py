"""Completion: what its reader is owed when text cannot be made, or when nobody reads it."""

from __future__ import annotations

import asyncio

import pytest

from app import completion as completion_module
from app.errors import BackendError, Unavailable
from app.service import Ask
from app.text.stop import StopStrings
from tests.played import PATIENCE_S, until
from tests.test_service import END, go, joined, playing, read, spelled


@pytest.mark.parametrize("when", ["feed", "flush"])
def test_a_fault_in_the_text_ends_that_completion_only(
    when: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    sound = getattr(StopStrings, when)

    def broken(self: StopStrings, *args: str) -> object:
        if self._stops == ("BOOM",):
            raise ValueError("secret text")
        return sound(self, *args)

    monkeypatch.setattr(StopStrings, when, broken)

    async def body() -> None:
        async with playing(spelled("abcdef")) as stage:
            bad = await stage.service.complete(["p"], Ask(stop=("BOOM",), n=2))
            good = await stage.service.complete(["p"], Ask())
            with pytest.raises(BackendError):
                await read(bad)
            assert joined(await read(good)) == ("abcdef", "stop")
            await until(lambda: stage.worker.snapshot.num_active == 0)

    go(body())
    assert "request 1 failed" in caplog.text or "request 2 failed" in caplog.text
    assert "secret" not in caplog.text


def test_each_choice_tells_its_own_tokens_end_and_times() -> None:
    async def body() -> None:
        async with playing(spelled("abc"), spelled("xyz"), prefix_cache=True) as stage:
            completion = await stage.service.complete(["pp", [spelled("q")[0], "r", "s"]], Ask(stop=("yz", "z")))
            ends = {delta.index: delta for delta in await read(completion)}
            assert [ends[index].stop_string for index in (0, 1)] == [None, "yz"]
            first, second = completion.choices
            assert (first.tokens, second.tokens) == ([*spelled("abc"), END], spelled("xyz"))
            assert second.request.tokens[:3] == spelled("qrs")
            assert completion.usage.completion_tokens == 7
            for one in (first, second):
                assert one.timings.predicted_s > 0
                assert completion.timings.prompt_s >= one.timings.prompt_s > 0

    go(body())


def test_an_answer_that_nobody_reads_is_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion_module, "MAX_UNREAD", 6)

    async def body() -> None:
        async with playing(spelled("abcdefghijkl" * 4), num_steps=1) as stage:
            unread = await stage.service.complete(["p"], Ask(n=2))
            stage.engine.allow(12)
            await until(lambda: not stage.worker._sinks)  # cancelled, before the answer can come to its end
            stage.engine.allow()
            await until(lambda: stage.worker.snapshot.counters.completed == {"cancelled": 2})
            assert stage.worker.snapshot.pool.live == 0
            with pytest.raises(Unavailable, match="not read fast enough"):
                await asyncio.wait_for(read(unread), PATIENCE_S)
            assert joined(await read(await stage.service.complete(["p"], Ask(max_tokens=3)))) == ("abc", "length")

    go(body())


def test_a_bound_of_unread_news_does_not_touch_who_has_just_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completion_module, "MAX_UNREAD", 4)

    async def body() -> None:
        async with playing(spelled("abcdef")) as stage:
            completion = await stage.service.complete(["p"], Ask(max_tokens=3))
            await until(lambda: stage.worker.snapshot.counters.completed == {"length": 1})
            assert joined(await read(completion)) == ("abc", "length")

    go(body())
