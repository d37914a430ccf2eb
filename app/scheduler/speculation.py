"""Speculation by prompt lookup: where a text says again what it has said before, several tokens are checked at once.

A draft costs its row some more tokens in a forward, and saves a forward for each of its tokens that is right. It is
right where the draw after the tokens before it gives that very token. So whatever is drawn is what would have been
drawn without drafts: greedily, or by the same noise of the same position. For a token that is certain to be proposed
that is rejection sampling: it is taken with its own probability, and else a token by the odds of all others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from app.kv.block_table import BlockTables
from app.request import Request
from app.scheduler.plan import Draw

NGRAM_SIZES = (3, 2)  # the longest first
MAX_WIDTH = 15  # with the row's own token sixteen: more cost nearly as much as they save
# How many tokens in a row the lookup must have foretold before a row proposes, at first and at most.
FIRST_HITS = 2
MOST_HITS = 16


class Drafter(Protocol):
    """Where drafts come from."""

    def draft(self, request: Request) -> tuple[int, ...]:
        """What may follow the request's tokens; nothing where it should not propose."""
        ...

    def may_propose(self, request: Request) -> bool:
        """Whether there may be a draft once the request has one token more, whichever that is."""
        ...

    def learn(self, request_id: int, num_proposed: int, num_right: int) -> None:
        """A draft was checked: so many tokens of it were right, from its beginning on."""
        ...

    def forget(self, request_id: int) -> None:
        """The request has ended."""
        ...


class Speculation:
    """The drafts of a tick. Nobody gives way for them: they get blocks only where some lie idle and hold nothing. A
    constrained request has none: what it may draw depends on the tokens that a draft only guesses."""

    def __init__(self, drafter: Drafter | None, max_rows: int, tables: BlockTables) -> None:
        """``drafter`` None: nobody proposes. ``max_rows``: nor does anybody while more rows decode."""
        self._drafter = drafter
        self._max_rows = max_rows
        self._tables = tables

    def drafts(self, decoding: Sequence[Request]) -> list[tuple[Request, tuple[int, ...]]]:
        """Each request with its draft, the blocks for it in place. Call it when all others have got their blocks."""
        if self._drafter is None or len(decoding) > self._max_rows:
            return [(request, ()) for request in decoding]
        return [
            (request, () if request.constraint is not None else self._draft(self._drafter, request))
            for request in decoding
        ]

    def may_propose(self, decoding: Sequence[Request]) -> bool:
        """Whether any of these may propose in the next tick, if they all decode in it and nobody else."""
        drafter = self._drafter
        if drafter is None or len(decoding) > self._max_rows:
            return False
        return any(drafter.may_propose(request) for request in decoding if request.constraint is None)

    def learn(self, request: Request, draft: Sequence[int], num_right: int) -> None:
        """A draft was checked, and the request's tokens go on with what was right: blocks for the rest go back."""
        assert self._drafter is not None
        self._drafter.learn(request.id, len(draft), num_right)
        self._tables.trim(request.id, len(request.tokens) - 1)

    def forget(self, request_id: int) -> None:
        if self._drafter is not None:
            self._drafter.forget(request_id)

    def _draft(self, drafter: Drafter, request: Request) -> tuple[int, ...]:
        """A draft cut to what the answer has left, and to the request's blocks and those that nobody would miss."""
        tables = self._tables
        num_blocks = (len(tables.blocks(request.id)) + tables.pool.num_blank) // tables.layout.num_groups
        # The token after the draft is drawn too, and the last token of an answer is never computed.
        num_left = request.max_tokens - request.num_output - 1
        room = min(num_blocks * tables.block_size - len(request.tokens), num_left)
        draft = drafter.draft(request)[:room] if room > 0 else ()
        tables.grow(request.id, len(request.tokens) + len(draft))
        return draft


def right(draft: Sequence[int], draws: tuple[Draw, ...]) -> tuple[Draw, ...]:
    """The draws that count: as many as the draft has right tokens, from its beginning on, and the one after them."""
    for place, (token, draw) in enumerate(zip(draft, draws, strict=False), 1):
        if draw.token != token:
            return draws[:place]
    return draws


class PromptLookup:
    """Proposes what followed the last tokens of a text when they stood in it before.

    A row begins to propose, one token, once the lookup would have been right ``FIRST_HITS`` times in a row: that can be
    told without computing anything. A draft that is right to its end is followed by one twice as long and one more, up
    to ``MAX_WIDTH``; another by one as long as it was right. If nothing of it was, the row is silent until the lookup
    has been right twice as often as was asked before, up to ``MOST_HITS``. So a row can always come back, and one whose
    text only seems to repeat itself loses a forward's odd token in seventeen at most.
    """

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}

    def draft(self, request: Request) -> tuple[int, ...]:
        row = self._read(request)
        width = row.width or int(row.repeats.num_hits >= row.hits_needed)
        draft = row.repeats.continuation(request.tokens, width) if width else ()
        # An end token ends the answer where it is drawn, and a banned one is not drawn at all.
        ends = (i for i, token in enumerate(draft) if token in request.end_tokens or token in request.sampling.banned)
        return draft[: next(ends, width)]

    def may_propose(self, request: Request) -> bool:
        row = self._read(request)
        return row.width > 0 or row.repeats.num_hits + 1 >= row.hits_needed

    def learn(self, request_id: int, num_proposed: int, num_right: int) -> None:
        row = self._rows[request_id]
        if num_right == num_proposed:
            row.width = min(2 * max(row.width, num_proposed) + 1, MAX_WIDTH)
            row.hits_needed = FIRST_HITS
        else:
            row.width = num_right
            if num_right == 0:
                row.hits_needed = min(2 * row.hits_needed, MOST_HITS)

    def forget(self, request_id: int) -> None:
        self._rows.pop(request_id, None)

    def _read(self, request: Request) -> _Row:
        row = self._rows.setdefault(request.id, _Row())
        row.repeats.read(request.tokens)
        return row


class _Row:
    """``width``: how long a draft may be; 0 while the row is silent, and waits for ``hits_needed``."""

    def __init__(self) -> None:
        self.repeats = Repeats()
        self.width = 0
        self.hits_needed = FIRST_HITS


class Repeats:
    """Where each n-gram of a growing text was seen last. Reading a token takes constant time."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, ...], int] = {}  # n-gram -> place of the token that followed it
        self._num_read = 0
        self.num_hits = 0  # how many of the last tokens in a row were those that a lookup before them would have given

    def read(self, tokens: Sequence[int]) -> None:
        """Go on to the end of ``tokens``, of which all that was read before must be the beginning."""
        for place in range(self._num_read, len(tokens)):
            early = self._find(tokens, place)
            self.num_hits = self.num_hits + 1 if early is not None and tokens[early] == tokens[place] else 0
            for size in NGRAM_SIZES:
                if place >= size:
                    self._places[tuple(tokens[place - size : place])] = place
        self._num_read = len(tokens)

    def continuation(self, tokens: Sequence[int], num_tokens: int) -> tuple[int, ...]:
        """What followed the last n-gram of ``tokens``, all of which were read, when it stood there last: the longest
        n-gram that stood there before. Where that runs into the end of the text it is taken to go round."""
        early = self._find(tokens, len(tokens))
        if early is None:
            return ()
        period = len(tokens) - early
        return tuple(tokens[early + i % period] for i in range(num_tokens))

    def _find(self, tokens: Sequence[int], place: int) -> int | None:
        """The place of the token that followed the n-gram before ``place``, the last time before this one."""
        for size in NGRAM_SIZES:
            if place >= size and (early := self._places.get(tuple(tokens[place - size : place]))) is not None:
                return early
        return None
