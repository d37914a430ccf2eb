"""Stop strings: the cut is the same however the text is split, and no part of a stop string leaks."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.errors import InvalidRequest
from app.text.stop import StopStrings

texts = st.text("ab", max_size=20)
stop_lists = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)


def cut(text: str, stops: list[str]) -> int | None:
    """Where the text ends, found the slow way: letter by letter, as if it were just being written."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return min(starts)
    return None


def pieces(text: str, borders: list[int]) -> list[str]:
    edges = [0, *sorted(border % (len(text) + 1) for border in borders), len(text)]
    return [text[start:end] for start, end in pairwise(edges)]


@given(texts, stop_lists, st.lists(st.integers(0, 30), max_size=8))
def test_same_cut_for_any_split(text: str, stops: list[str], borders: list[int]) -> None:
    stop_strings = StopStrings(stops)
    shown, matched = "", False
    for piece in pieces(text, borders):
        emitted, matched = stop_strings.feed(piece)
        shown += emitted
        expected = cut(text, stops)
        assert text[:expected].startswith(shown), "shown too much"
        if matched:
            break
    shown += stop_strings.flush()
    assert matched is (cut(text, stops) is not None)
    assert shown == text[: cut(text, stops)]
    assert stop_strings.num_emitted == len(shown)


@given(texts, st.text("ab", min_size=1, max_size=5), st.lists(st.integers(0, 30), max_size=8))
def test_one_stop_string_is_a_partition(text: str, stop: str, borders: list[int]) -> None:
    stop_strings = StopStrings([stop])
    shown = ""
    for piece in pieces(text, borders):
        emitted, matched = stop_strings.feed(piece)
        shown += emitted
        if matched:
            break
    assert shown + stop_strings.flush() == text.partition(stop)[0]


@given(texts, stop_lists)
def test_holds_back_no_more_than_needed(text: str, stops: list[str]) -> None:
    stop_strings = StopStrings(stops)
    emitted, matched = stop_strings.feed(text)
    if not matched:
        held = text[len(emitted) :]
        begun = [end for end in range(len(text)) if any(stop.startswith(text[end:]) for stop in stops)]
        assert held == text[begun[0] :] if begun else held == ""


@pytest.mark.parametrize("split", [["xabcd"], ["xab", "cd"], list("xabcd")])
def test_first_to_become_complete_wins(split: list[str]) -> None:
    """The text "bc" is complete before "abcd" is; "abc" is complete together with "bc" and begins earlier."""

    def shown(stops: list[str]) -> str:
        stop_strings, text = StopStrings(stops), ""
        for piece in split:
            emitted, matched = stop_strings.feed(piece)
            text += emitted
            if matched:
                break
        return text

    assert shown(["abcd", "bc"]) == "xa"
    assert shown(["bc", "abc"]) == "x"


def test_the_string_that_made_the_cut_is_known() -> None:
    stop_strings = StopStrings(["bc", "abc", "d"])
    stop_strings.feed("xab")
    assert stop_strings.matched is None
    stop_strings.feed("cd")
    assert stop_strings.matched == "abc"


def test_tokens_behind_the_cut_can_be_told() -> None:
    stop_strings = StopStrings(["END"])
    starts, emitted = [], ""
    for piece in ("one", " E", "N", "", "D!", "two"):
        starts.append(stop_strings.num_fed)
        text, matched = stop_strings.feed(piece)
        emitted += text
        if matched:
            break
    assert emitted == "one "
    assert [start < stop_strings.num_emitted for start in starts] == [True, True, False, False, False]


def test_held_text_is_counted_when_it_comes_out() -> None:
    stop_strings = StopStrings(["</s>"])
    assert stop_strings.feed("a</") == ("a", False)
    assert (stop_strings.num_fed, stop_strings.num_emitted) == (3, 1)
    assert stop_strings.feed("b<") == ("</b", False)
    assert stop_strings.flush() == "<"
    assert (stop_strings.num_fed, stop_strings.num_emitted) == (5, 5)
    assert stop_strings.flush() == ""


def test_empty_stop_string_is_refused() -> None:
    with pytest.raises(InvalidRequest) as refusal:
        StopStrings(["a", ""])
    assert refusal.value.param == "stop"
