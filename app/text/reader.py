"""What a model says, told apart while it comes: text for the reader, reasoning, and calls of functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from app.text.stop import unfinished
from app.text.tool_calls import ParseCalls, ToolCall, read_calls


@dataclass(slots=True)
class Said:
    """What has become certain. Each of the three grows by itself: their order among each other is not kept."""

    text: str = ""
    reasoning: str = ""
    calls: list[ToolCall] = field(default_factory=list)


class Reader(Protocol):
    """One answer. What comes out, joined, does not depend on how the text was cut into pieces."""

    def feed(self, text: str) -> Said:
        """The next text."""
        ...

    def control(self, name: str) -> Said:
        """A control token, which is no text by itself."""
        ...

    def end(self, is_whole: bool) -> Said:
        """What was held back. A call counts only in an answer that is whole: one that was cut off is text."""
        ...


@dataclass(frozen=True, slots=True)
class Marks:
    """How a model sets reasoning and calls apart from text. Empty strings are marks that it does not have.

    ``call_starts`` may be several; a call without an end goes to the end of the answer. ``begins_with_json``: an answer
    that begins with a brace is a call, without any mark.
    """

    think_start: str = ""
    think_end: str = ""
    call_starts: tuple[str, ...] = ()
    call_end: str = ""
    parse: ParseCalls | None = None
    begins_with_json: bool = False


class MarkedReader:
    """For models that put marks around reasoning and calls.

    White space beside a mark belongs to neither side. Inside reasoning no call begins. A call that cannot be read is
    given out as text, marks included.
    """

    def __init__(self, marks: Marks, tools: Sequence[dict[str, Any]], is_reasoning: bool) -> None:
        """Without ``tools`` nothing is a call. ``is_reasoning``: the prompt has begun the reasoning already."""
        self._marks = marks
        self._tools = tools
        self._call_starts = marks.call_starts if tools else ()
        self._looks_for_brace = marks.begins_with_json and bool(tools)
        self._is_reasoning = is_reasoning
        self._call_start: str | None = None  # the mark of the call that is being read
        self._after_mark = is_reasoning
        self._held = ""
        self._num_searched = 0

    def feed(self, text: str) -> Said:
        self._held += text
        said = Said()
        while self._step(said):
            pass
        return said

    def control(self, name: str) -> Said:
        """Dropped, unless it is in a call or part of a mark."""
        is_read = self._call_start is not None or any(name in mark for mark in self._wanted())
        return self.feed(name if is_read else "")

    def end(self, is_whole: bool) -> Said:
        said = Said()
        if self._call_start is not None:
            self._close_call(said, self._held, "", is_whole)
        else:
            self._give(said, len(self._held))
        self._held = ""
        return said

    def _wanted(self) -> list[str]:
        """The marks that mean something where we are."""
        if self._is_reasoning:
            return [self._marks.think_end]
        return [mark for mark in (self._marks.think_start, *self._call_starts) if mark]

    def _step(self, said: Said) -> bool:
        """Move past the next mark; False if there is none yet."""
        if self._call_start is not None:
            return self._step_in_call(said)
        if self._looks_for_brace and (begun := self._held.lstrip()):
            self._looks_for_brace = False
            if begun[0] == "{":
                self._call_start = ""
                return True
        marks = self._wanted()
        found = [(at, -len(mark), mark) for mark in marks if (at := self._held.find(mark)) >= 0]
        if not found:
            safe = self._held[: len(self._held) - unfinished(self._held, marks)]
            self._give(said, len(safe.rstrip() if marks else safe))
            return False
        at, _, mark = min(found)
        self._give(said, len(self._held[:at].rstrip()))
        space, _, self._held = self._held.partition(mark)
        if mark in self._call_starts and not self._is_reasoning:
            self._call_start = mark if self._after_mark else space + mark
            self._num_searched = 0
            return True
        self._after_mark = True
        self._looks_for_brace = self._is_reasoning and self._marks.begins_with_json and bool(self._tools)
        self._is_reasoning = not self._is_reasoning
        return True

    def _step_in_call(self, said: Said) -> bool:
        end = self._marks.call_end
        at = self._held.find(end, max(self._num_searched - len(end), 0)) if end else -1
        self._num_searched = len(self._held)
        if at < 0:
            return False
        body, self._held = self._held[:at], self._held[at + len(end) :]
        self._close_call(said, body, end, is_whole=True)
        return True

    def _close_call(self, said: Said, body: str, end: str, is_whole: bool) -> None:
        parse, start = self._marks.parse, self._call_start or ""
        calls = read_calls(parse, body, self._tools) if is_whole and parse else ()
        said.calls += calls
        if not calls:
            said.text += start + body + end  # just as it came
        self._after_mark = bool(calls)
        self._call_start = None

    def _give(self, said: Said, length: int) -> None:
        """Give out the beginning of what is held, without white space right after a mark."""
        text, self._held = self._held[:length], self._held[length:]
        if self._after_mark:
            text = text.lstrip()
            self._after_mark = not text
        if self._is_reasoning:
            said.reasoning += text
        else:
            said.text += text
