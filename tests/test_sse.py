"""Framing and pings."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest

from app.api.sse import PING, event, with_pings


def test_an_event_is_one_line_whatever_the_text() -> None:
    raw = event({"text": "a\n\nb\r\u2028é"})
    assert raw.startswith(b"data: {")
    assert raw.endswith(b"}\n\n")
    assert raw.count(b"\n") == 2
    assert b"\r" not in raw


def test_an_event_may_have_a_name() -> None:
    assert event({"a": 1}, "some") == b'event: some\ndata: {"a":1}\n\n'


def test_pings_fill_silence_and_lose_nothing() -> None:
    async def slow() -> AsyncGenerator[bytes, None]:
        yield b"a"
        await asyncio.sleep(0.08)
        yield b"b"
        yield b"c"

    async def go() -> list[bytes]:
        return [item async for item in with_pings(slow(), 0.02)]

    items = asyncio.run(go())
    assert [item for item in items if item != PING] == [b"a", b"b", b"c"]
    pings = items.index(b"b") - items.index(b"a") - 1
    assert 1 <= pings <= 4
    assert items[-2:] == [b"b", b"c"]


def test_a_stream_that_never_pauses_has_no_pings() -> None:
    async def quick() -> AsyncGenerator[bytes, None]:
        for _ in range(50):
            yield b"x"

    async def go() -> list[bytes]:
        return [item async for item in with_pings(quick(), 5)]

    assert asyncio.run(go()) == [b"x"] * 50


@pytest.mark.parametrize("num_read", [1, 2], ids=["between events", "while an event is awaited"])
def test_closing_ends_the_source(num_read: int) -> None:
    ended = []

    async def endless() -> AsyncGenerator[bytes, None]:
        try:
            yield b"a"
            await asyncio.Event().wait()
        finally:
            ended.append(True)

    async def go() -> list[bytes]:
        stream = with_pings(endless(), 0.01)
        read = [await anext(stream) for _ in range(num_read)]
        await stream.aclose()
        assert ended == [True]  # here, not when the loop ends: that closes whatever was forgotten
        return read

    assert asyncio.run(go()) == [b"a", PING][:num_read]


def test_a_failure_passes_through() -> None:
    async def failing() -> AsyncGenerator[bytes, None]:
        yield b"a"
        raise ValueError("broken")

    async def go() -> None:
        async for _ in with_pings(failing(), 1):
            pass

    with pytest.raises(ValueError, match="broken"):
        asyncio.run(go())
