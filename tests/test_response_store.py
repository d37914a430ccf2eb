"""The store of responses: what is found again and by whom, and what has to go."""

from __future__ import annotations

from typing import Any

import pytest

from app.api import response_store
from app.api.response_store import MAX_AGE_S, Kept, ResponseStore
from app.errors import ResponseNotFound


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def kept(name: str, text: str = "") -> Kept:
    item: dict[str, Any] = {"type": "message", "id": f"msg_{name}_0", "text": text}
    return Kept({"id": name, "output": [item]}, [{"type": "message", "id": f"msg_{name}_in0"}], [])


def names(store: ResponseStore, *candidates: str, key: bytes = b"") -> list[str]:
    """Which of ``candidates`` are kept. Asking makes them used, in that order."""
    found = []
    for name in candidates:
        try:
            found.append(store.get(key, name).response["id"])
        except ResponseNotFound:
            continue
    return found


def test_what_was_kept_is_found_again_with_its_conversation() -> None:
    store = ResponseStore(10_000)
    one = Kept({"id": "resp_1", "output": [{"id": "c"}]}, [{"id": "b"}], [{"id": "a"}])
    store.put(b"", one)
    assert store.get(b"", "resp_1") == one
    assert [item["id"] for item in store.get(b"", "resp_1").conversation] == ["a", "b", "c"]


def test_a_key_finds_only_its_own() -> None:
    store = ResponseStore(10_000)
    store.put(b"mine", kept("resp_1"))
    assert names(store, "resp_1", key=b"mine") == ["resp_1"]
    assert names(store, "resp_1", key=b"other") == names(store, "resp_1") == []
    with pytest.raises(ResponseNotFound, match="'resp_1' not found"):
        store.drop(b"other", "resp_1")
    store.drop(b"mine", "resp_1")
    assert names(store, "resp_1", key=b"mine") == []
    assert (len(store), store.num_bytes) == (0, 0)


def test_a_number_of_responses_is_kept_and_the_one_used_longest_ago_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(response_store, "MAX_RESPONSES", 3)
    store = ResponseStore(10_000)
    for name in ("a", "b", "c"):
        store.put(b"", kept(name))
    assert names(store, "a") == ["a"]
    store.put(b"", kept("d"))
    assert names(store, "a", "b", "c", "d") == ["a", "c", "d"]


def test_bytes_are_bounded_and_counted_in_full() -> None:
    size = ResponseStore(10_000)
    size.put(b"", kept("a", "x" * 100))
    store = ResponseStore(size.num_bytes * 2)
    for name in ("a", "b", "c"):
        store.put(b"", kept(name, "x" * 100))
        assert store.num_bytes <= store.max_bytes
    assert names(store, "a", "b", "c") == ["b", "c"]
    store.put(b"", kept("d", "x" * 150))
    assert names(store, "b", "c", "d") == ["d"]
    store.put(b"", kept("e", "x" * 1000))  # larger than all of it: not kept, and nothing goes for it
    assert names(store, "d", "e") == ["d"]
    store.drop(b"", "d")
    assert (len(store), store.num_bytes) == (0, 0)


def test_a_day_after_its_last_use_a_response_is_gone() -> None:
    clock = Clock()
    store = ResponseStore(10_000, clock)
    store.put(b"", kept("a"))
    store.put(b"", kept("b"))
    clock.now_s = MAX_AGE_S - 1
    assert names(store, "b") == ["b"]
    clock.now_s = MAX_AGE_S + 1
    with pytest.raises(ResponseNotFound):
        store.drop(b"", "a")
    assert len(store) == 1
    clock.now_s = 3 * MAX_AGE_S
    assert names(store, "a", "b") == []
    assert store.num_bytes == 0


def test_without_room_nothing_is_kept() -> None:
    store = ResponseStore(0)
    store.put(b"", kept("a"))
    assert len(store) == 0
