"""What reaches a terminal: no control character of a model's, and every delta in its place."""

from __future__ import annotations

import unicodedata

import pytest

from app.completion import Delta
from app.screen import Screen, printable


def test_every_control_character_but_newline_and_tab_is_spelled_out() -> None:
    for code in range(0x110000):
        char = chr(code)
        if unicodedata.category(char) == "Cc" and char not in "\n\t":
            assert printable(f"a{char}b") == f"a\\x{code:02x}b"
        elif code < 0x3000:
            assert printable(char) == char


def test_an_answer_ends_with_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    for texts in (("one", " \x1b[31mtwo"), ("one \x1b[31mtwo\n",)):
        screen = Screen()
        for text in texts:
            screen.show(Delta(0, text))
        screen.end("length")
        assert capsys.readouterr() == ("one \\x1b[31mtwo\n", "")


def test_nothing_is_written_for_no_answer(capsys: pytest.CaptureFixture[str]) -> None:
    Screen().end("cancelled")
    assert capsys.readouterr() == ("", "")


def test_reasoning_is_for_a_person_and_never_part_of_the_output(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_terminal, told in ((True, "Hm\\x07.\n[length]\n"), (False, "")):
        monkeypatch.setattr("sys.stderr.isatty", lambda is_terminal=is_terminal: is_terminal)
        screen = Screen()
        screen.show(Delta(0, reasoning="Hm\x07."))
        screen.show(Delta(0, "Yes"))
        screen.end("length")
        assert capsys.readouterr() == ("Yes\n", told)
