"""Which way of setting reasoning and calls apart a model has learned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

from app.text import call_form
from app.text.call_form import CallForm
from app.text.harmony import HarmonyReader
from app.text.reader import MarkedReader, Marks, Reader
from app.text.tool_calls import ParseCalls, headed_calls, json_calls

HARMONY_TOKENS = frozenset({"<|start|>", "<|channel|>", "<|message|>", "<|call|>"})
# Parsers of mlx-lm that take minutes for a call of the greatest length, if a model loses itself in it.
SLOW_PARSERS = frozenset({"mlx_lm.tool_parsers.gemma4", "mlx_lm.tool_parsers.kimi_k3"})
# How models write what the parsers of mlx-lm read, where it is JSON.
FORMS = {"mlx_lm.tool_parsers.json_tools": call_form.HERMES, "mlx_lm.tool_parsers.mistral": call_form.MISTRAL_LIST}
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
    """``speaks_harmony`` is the way of gpt-oss, which needs no marks. ``form`` is how calls are written, where that is
    known and their arguments are JSON."""

    marks: Marks
    speaks_harmony: bool = False
    form: CallForm | None = None

    @property
    def forced(self) -> tuple[Dialect, CallForm]:
        """How calls are read and written where an answer has to be some: as ever, or else as plain JSON."""
        if self.form is None:
            return PLAIN_CALLS, call_form.PLAIN_JSON
        # JSON has no line break in a string, so together with one an end mark is told from the same text in a string.
        marks = replace(self.marks, call_end=self.form.after.removeprefix("}"))
        return replace(self, marks=marks), self.form

    def reader(self, tools: Sequence[dict[str, Any]], prompt_end: str) -> Reader:
        """A reader of one answer to a prompt that ends with ``prompt_end``, where only ``tools`` may be called."""
        if self.speaks_harmony:
            return HarmonyReader(tools)
        think_start = self.marks.think_start
        return MarkedReader(self.marks, tools, bool(think_start) and prompt_end.rstrip().endswith(think_start))


PLAIN = Dialect(Marks())  # nothing is set apart
PLAIN_CALLS = Dialect(Marks(parse=json_calls, begins_with_json=True))


def dialect_of(tokenizer: MarkingTokenizer) -> Dialect:
    """What mlx-lm knows comes first; three formats that it has no parser for, or one that knows less, are read by our
    own."""
    vocabulary = tokenizer.get_vocab()
    if vocabulary.keys() >= HARMONY_TOKENS:
        return Dialect(Marks(), speaks_harmony=True, form=call_form.HARMONY)
    think = tokenizer.think_start or "", tokenizer.think_end or ""
    parse = tokenizer.tool_parser
    if parse is not None and parse.__module__ not in SLOW_PARSERS:
        starts, end = (tokenizer.tool_call_start or "",), tokenizer.tool_call_end or ""
        if starts == ("[TOOL_CALLS]",) and "[ARGS]" in vocabulary:
            return Dialect(Marks(*think, starts, end, headed_calls), form=call_form.MISTRAL_HEADERS)
        return Dialect(Marks(*think, starts, end, parse), form=FORMS.get(parse.__module__))
    if "<tool_call>" in vocabulary or "<tool_call>" in str(tokenizer.chat_template):
        return Dialect(Marks(*think, ("<tool_call>",), "</tool_call>", json_calls), form=call_form.HERMES)
    if PYTHON_TAG in vocabulary:
        marks = Marks(*think, (PYTHON_TAG,), "", json_calls, begins_with_json=True)
        return Dialect(marks, form=call_form.LLAMA)
    return Dialect(Marks(*think))
