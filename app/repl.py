"""A conversation on a terminal: lines in, answers out, until Ctrl-D."""

from __future__ import annotations

import sys
from pathlib import Path

from app.conversation import Conversation
from app.errors import InvalidRequest, MlxcelError
from app.local import LocalModel
from app.screen import Screen, printable

try:
    import readline
except ImportError:  # a Python without it: lines can be typed, and neither edited nor recalled
    readline = None  # type: ignore[assignment]

PROMPT, MORE = "> ", ". "
COMMANDS = ("/reset", "/help", "/exit")
MAX_LINES = 1000
HELP = """\
/reset   forget what was said
/help    show this
/exit    leave, as Ctrl-D does
A line that ends with \\ goes on in the next one. Up and down recall earlier lines.
Ctrl-C stops an answer, or drops the line that is being typed."""


class Lines:
    """What is typed at the prompt, with the lines of earlier runs to recall. They are kept in a file for its owner."""

    def __init__(self, path: Path, is_plain: bool = True) -> None:
        """A terminal that is not ``is_plain`` is asked to mark what is pasted: all of it is one message then."""
        self._path: Path | None = path
        self._num_saved = 0
        if readline is not None:
            readline.set_history_length(MAX_LINES)
            if not is_plain:
                readline.parse_and_bind("set enable-bracketed-paste on")
            try:
                if path.exists() and path.stat().st_size:
                    readline.read_history_file(path)
            except OSError as error:
                self._give_up(error)
            self._num_saved = readline.get_current_history_length()

    def read(self) -> str:
        """One message. Raises EOFError at Ctrl-D, KeyboardInterrupt at Ctrl-C."""
        parts = [input(PROMPT)]
        while parts[-1].endswith("\\"):
            parts[-1] = parts[-1][:-1]
            parts.append(input(MORE))
        self._save()
        return "\n".join(parts)

    def _save(self) -> None:
        """After each message, because a terminal may be closed at any time. Lines are added to the file, since another
        conversation may write to it too."""
        if readline is None or self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.touch(mode=0o600)
            num_lines = readline.get_current_history_length()
            if hasattr(readline, "append_history_file"):
                readline.append_history_file(num_lines - self._num_saved, self._path)
            else:  # libedit, which a Mac's own Python may have
                readline.write_history_file(self._path)
            self._num_saved = num_lines
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        print(f"lines are not kept: {self._path}: {error.strerror}", file=sys.stderr)
        self._path = None


def talk(model: LocalModel, conversation: Conversation, lines: Lines) -> None:
    """Answer line after line until Ctrl-D or /exit.

    Raises:
        MlxcelError: the engine has died.
    """
    print("/help lists the commands; Ctrl-C stops an answer, Ctrl-D leaves", file=sys.stderr)
    while True:
        try:
            text = lines.read()
            if text.strip() == "/exit":
                return
            if text.strip():
                _obey_or_answer(text, model, conversation)
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()


def _obey_or_answer(text: str, model: LocalModel, conversation: Conversation) -> None:
    words = text.split()
    if len(words) > 1 and words[0] in COMMANDS:
        print(f"{words[0]} takes nothing after it", file=sys.stderr)
    elif words == ["/reset"]:
        conversation.reset()
    elif len(words) == 1 and words[0].startswith("/"):
        print(HELP if words == ["/help"] else f"{printable(words[0])} is no command; /help lists them", file=sys.stderr)
    else:
        _answer(text, model, conversation)


def _answer(text: str, model: LocalModel, conversation: Conversation) -> None:
    screen = Screen()
    try:
        answer = model.answer(conversation.asked(text), screen.show)
    except MlxcelError as error:
        screen.end()
        if model.has_failed:
            raise
        is_full = isinstance(error, InvalidRequest) and error.code == "context_length_exceeded"
        print(printable(str(error)) + (" /reset begins anew." if is_full else ""), file=sys.stderr)
    else:
        screen.end(answer.finish_reason)
        conversation.add(text, answer.text)
