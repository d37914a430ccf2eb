"""Which way of setting reasoning and calls apart a model has learned."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from app.text.harmony import HarmonyReader
from app.text.reader import MarkedReader, Marks, Reader
from app.text.tool_calls import ParseCalls, json_calls

HARMONY_TOKENS = frozenset({"<|start|>", "<|channel|>", "<|message|>", "<|call|>"})
# Parsers of mlx-lm that take minutes for a call of the greatest length, if a model loses itself in it.
SLOW_PARSERS = frozenset({"mlx_lm.tool_parsers.gemma4", "mlx_lm.tool_parsers.kimi_k3"})
# Some Mistral models put the id of a call between its name and its arguments.
CALL_ID = re.compile(r"\[CALL_ID\]\w*(?=\[ARGS\])")
PYTHON_TAG = "<|python_tag|>"


class MarkingTokenizer(Protocol):
    """What mlx-lm's tokenizer wrapper has found out about a model: its marks, None for those it does not have, and the
    parser that fits what is between them."""

    @property
    def chat_template(self) -> Any: ...
    @property
    def think_start(self) -> str | None: ...
    @property
    def think_end(self) -> str | None: ...
    @property
    def tool_call_start(self) -> str | None: ...
    @property
    def tool_call_end(self) -> str | None: ...
    @property
    def tool_parser(self) -> ParseCalls | None: ...
    def get_vocab(self) -> dict[str, int]: ...


@dataclass(frozen=True, slots=True)
class Dialect:
    """``speaks_harmony`` is the way of gpt-oss, which needs no marks."""

    marks: Marks
    speaks_harmony: bool = False

    def reader(self, tools: Sequence[dict[str, Any]], prompt_end: str) -> Reader:
        """A reader of one answer to a prompt that ends with ``prompt_end``, where only ``tools`` may be called."""
        if self.speaks_harmony:
            return HarmonyReader(tools)
        think_start = self.marks.think_start
        return MarkedReader(self.marks, tools, bool(think_start) and prompt_end.rstrip().endswith(think_start))


PLAIN = Dialect(Marks())  # nothing is set apart


def dialect_of(tokenizer: MarkingTokenizer) -> Dialect:
    """What mlx-lm knows comes first; two formats that it has no parser for are read by our own."""
    vocabulary = tokenizer.get_vocab()
    if vocabulary.keys() >= HARMONY_TOKENS:
        return Dialect(Marks(), speaks_harmony=True)
    think_start, think_end = tokenizer.think_start or "", tokenizer.think_end or ""
    parse = tokenizer.tool_parser
    if parse is not None and parse.__module__ not in SLOW_PARSERS:
        starts, end = (tokenizer.tool_call_start or "",), tokenizer.tool_call_end or ""
        parse = _without_ids(parse) if "[CALL_ID]" in vocabulary else parse
        return Dialect(Marks(think_start, think_end, starts, end, parse))
    if "<tool_call>" in vocabulary or "<tool_call>" in str(tokenizer.chat_template):
        return Dialect(Marks(think_start, think_end, ("<tool_call>",), "</tool_call>", json_calls))
    if PYTHON_TAG in vocabulary:
        return Dialect(Marks(think_start, think_end, (PYTHON_TAG,), "", json_calls, begins_with_json=True))
    return Dialect(Marks(think_start, think_end))


def _without_ids(parse: ParseCalls) -> ParseCalls:
    """mlx-lm's parser takes the id of a Mistral call for its name."""
    return lambda text, tools: parse(CALL_ID.sub("", text), tools)
