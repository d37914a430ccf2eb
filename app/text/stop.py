"""Stop strings, found in text that arrives in pieces."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from app.errors import InvalidRequest


class StopStrings:
    """Cuts a growing text before the first stop string that becomes complete in it.

    The cut does not depend on how the text is split into pieces. Of stop strings that become complete at the same
    character, the one that starts first decides. No part of a stop string is ever given out before it is certain that
    the rest does not follow.

    ``num_fed`` and ``num_emitted`` count characters. A token whose text begins at character ``c`` (``num_fed`` before
    it was fed) belongs to the text given out once ``c < num_emitted``. After a match, tokens that begin at or after
    ``num_emitted`` are behind the cut. ``matched`` is the stop string that made the cut, None before.
    """

    def __init__(self, stops: Iterable[str]) -> None:
        """Raises InvalidRequest if one of them is empty."""
        self._stops = tuple(stops)
        if "" in self._stops:
            raise InvalidRequest("A stop string may not be empty.", "stop")
        self._held = ""
        self.num_fed = 0
        self.num_emitted = 0
        self.matched: str | None = None

    def feed(self, text: str) -> tuple[str, bool]:
        """Take the next piece; return the text that may be shown now, and whether a stop string is complete.

        After a match the text is over: neither ``feed`` nor ``flush`` has anything more to give.
        """
        self.num_fed += len(text)
        text = self._held + text
        matches = [(at + len(stop), at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if matches:
            _, shown, self.matched = min(matches)
        else:
            shown = len(text) - unfinished(text, self._stops)
        self._held = "" if matches else text[shown:]
        self.num_emitted += shown
        return text[:shown], bool(matches)

    def flush(self) -> str:
        """The text held back, when no more will come."""
        text, self._held = self._held, ""
        self.num_emitted += len(text)
        return text


def unfinished(text: str, wanted: Sequence[str]) -> int:
    """The length of the longest end of ``text`` that could be the beginning of a wanted string."""
    longest = max(map(len, wanted), default=0)
    for start in range(max(0, len(text) - longest + 1), len(text)):
        if any(one.startswith(text[start:]) for one in wanted):
            return len(text) - start
    return 0
