"""A conversation on a real terminal: typed, stopped, recalled, left."""

from __future__ import annotations

import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.repl import PROMPT
from app.screen import printable
from tests.commanding import CTRL_C, CTRL_D, CTRL_P, ENTER, Terminal, greedy

NUM_NEW = 8
HELP_SHOWN = "/reset   forget what was said"


@pytest.fixture
def talk(tiny_model_dir: Path, tmp_path: Path) -> Callable[..., Any]:
    """Starts a conversation with the model that answers nonsense at once."""

    def start(*flags: str, term: str = "dumb", **settings: str) -> Terminal:
        where = {"MODEL": str(tiny_model_dir), "CACHE_DIR": str(tmp_path), **settings}
        return Terminal("run", "--temperature", "0", *flags, term=term, **where)

    return start


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def shown(answer: str) -> str:
    """An answer as a terminal is sent it, with the end of its line."""
    return printable(answer.removesuffix("\n") + "\n").replace("\n", "\r\n")


def test_turns_add_up_until_they_are_reset(talk: Callable[..., Any], model_dir: Path) -> None:
    system, first, second = "You write stories.", "Tell me about a cat.\nIts name is Oscar.", "And what is its name?"
    opening = [said("system", system), said("user", first)]
    (one,) = greedy(model_dir, NUM_NEW, opening)
    two, fresh = greedy(
        model_dir,
        NUM_NEW,
        [*opening, said("assistant", one), said("user", second)],
        [said("system", system), said("user", second)],
    )
    assert two != fresh
    flags = ("--max-tokens", str(NUM_NEW), "--system", system)
    with talk(*flags, MODEL=str(model_dir)) as terminal:
        for lines, answer in (
            (("Tell me about a cat.\\", "Its name is Oscar."), one),
            ((second,), two),
            (("/reset", second), fresh),
        ):
            terminal.expect(PROMPT)
            for line in lines:
                terminal.type(line + ENTER)
                terminal.expect(line)
            terminal.expect(shown(answer) + "[length]\r\n")
        terminal.expect(PROMPT)
        terminal.type(CTRL_D)
        assert terminal.exit_code() == 0
    assert "\x1b" not in terminal.seen
    assert "Traceback" not in terminal.seen


def test_ctrl_c_stops_an_answer_and_the_conversation_goes_on(talk: Callable[..., Any]) -> None:
    with talk() as terminal:
        for _ in range(2):
            terminal.expect(PROMPT)
            terminal.type("/reset" + ENTER)  # the same answer again, which is known to have no end
            terminal.expect(PROMPT)
            terminal.type("Tell me everything." + ENTER)
            terminal.expect("everything.\r\n")
            terminal.expect_more(200)
            terminal.type(CTRL_C)
            terminal.expect("[cancelled]\r\n")
        terminal.expect(PROMPT)
        terminal.type("half a line")
        terminal.expect("half a line")
        time.sleep(1)  # until readline waits for a key: a signal just before that is seen with the next key only
        terminal.type(CTRL_C)
        terminal.expect(PROMPT)
        terminal.type("/help" + ENTER)
        terminal.expect(HELP_SHOWN)
        terminal.expect(PROMPT)
        terminal.type("/nonsense" + ENTER)
        terminal.expect("/nonsense is no command")
        terminal.expect(PROMPT)
        terminal.type("/exit" + ENTER)
        assert terminal.exit_code() == 0
    assert "Traceback" not in terminal.seen


def test_a_line_can_be_edited_and_recalled_in_the_next_run(talk: Callable[..., Any], tmp_path: Path) -> None:
    left, delete = "\x02", "\x04"
    with talk() as terminal:
        terminal.expect(PROMPT)
        terminal.type("/hexlp" + left * 3 + delete + ENTER)
        terminal.expect(HELP_SHOWN)
        terminal.expect(PROMPT)
        terminal.process.kill()  # a window that is closed
    history = tmp_path / "history"
    assert history.read_text().splitlines()[-1] == "/help"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    with talk() as terminal:
        terminal.expect(PROMPT)
        terminal.type(CTRL_P + ENTER)
        terminal.expect(HELP_SHOWN)
        terminal.expect(PROMPT)
        terminal.type(CTRL_D)
        assert terminal.exit_code() == 0


def test_what_is_pasted_is_one_message(talk: Callable[..., Any]) -> None:
    begin, end = "\x1b[200~", "\x1b[201~"  # as a terminal marks it, where it is asked to
    with talk("--max-tokens", "2", term="xterm") as terminal:
        terminal.expect("\x1b[?2004h" + PROMPT)
        terminal.type(f"{begin}One\nTwo\nThree{end}" + ENTER)
        terminal.expect("[length]")
        terminal.expect(PROMPT)
        terminal.type(CTRL_D)
        assert terminal.exit_code() == 0
    assert terminal.seen.count("[length]") == 1


def test_two_conversations_keep_the_lines_of_both(talk: Callable[..., Any], tmp_path: Path) -> None:
    with talk() as one, talk() as other:
        for terminal, line in ((one, "/help"), (other, "/reset"), (one, "/reset")):
            terminal.expect(PROMPT)
            terminal.type(line + ENTER)
        for terminal in (one, other):
            terminal.expect(PROMPT)
            terminal.type(CTRL_D)
            assert terminal.exit_code() == 0
    assert sorted((tmp_path / "history").read_text().splitlines()[-3:]) == ["/help", "/reset", "/reset"]  # in any order


def test_a_command_with_more_behind_it_is_no_question(talk: Callable[..., Any]) -> None:
    with talk() as terminal:
        terminal.expect(PROMPT)
        terminal.type("/reset everything" + ENTER)
        terminal.expect("/reset takes nothing after it")
        terminal.expect(PROMPT)
        terminal.type(CTRL_D)
        assert terminal.exit_code() == 0


def test_a_history_that_cannot_be_kept_is_told_and_harms_nobody(talk: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "history").mkdir()
    with talk() as terminal:
        terminal.expect("lines are not kept")
        terminal.expect(PROMPT)
        terminal.type("/help" + ENTER)
        terminal.expect(HELP_SHOWN)
        terminal.expect(PROMPT)
        terminal.type(CTRL_D)
        assert terminal.exit_code() == 0


def test_a_full_window_is_told_and_reset_begins_anew(talk: Callable[..., Any]) -> None:
    with talk("--max-tokens", "4", CTX_SIZE="512", N_PARALLEL="1") as terminal:
        terminal.expect(PROMPT)
        terminal.type("word " * 600 + ENTER)
        terminal.expect("the context window of a slot is 512 tokens")
        terminal.expect("/reset begins anew.")
        terminal.expect(PROMPT)
        terminal.type("Hi" + ENTER)
        terminal.expect("[length]")
        terminal.expect(PROMPT)
        terminal.type(CTRL_D)
        assert terminal.exit_code() == 0
