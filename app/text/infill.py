"""Code to be filled in: how a model that has learned it marks what is before, what is after, and where it goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.text.chat import Tokenizer, fast_tokenizer

# Before, after, middle: of StarCoder and others, Qwen, DeepSeek, CodeLlama.
MARKS = (
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
    ("\u2581<PRE>", "\u2581<SUF>", "\u2581<MID>"),
)
FILE_MARKS = ("<file_sep>", "<|file_sep|>")


@dataclass(frozen=True, slots=True)
class Infill:
    """The token ids of the marks. ``file`` is before each file, for models that have it."""

    before: int
    after: int
    middle: int
    file: int | None = None

    def prompt(
        self,
        encode: Callable[[str], Sequence[int]],
        before: str,
        after: str,
        begun: str = "",
        extra: Sequence[tuple[str, str]] = (),
    ) -> list[int]:
        """The ids of a prompt that asks for what is between ``before`` and ``after`` and begins with ``begun``.
        ``extra`` are name and text of other files."""
        ids: list[int] = []
        for name, text in extra:
            ids += encode(f"{text}\n") if self.file is None else [self.file, *encode(f"{name}\n{text}\n")]
        if extra and self.file is not None:
            ids.append(self.file)
        return [*ids, self.before, *encode(before), self.after, *encode(after), self.middle, *encode(begun)]


def infill_of(tokenizer: Tokenizer) -> Infill | None:
    """The marks that a tokenizer knows, None if it has none of them all. Raises StartError as ChatText does."""
    find = fast_tokenizer(tokenizer).token_to_id
    file = next((token for mark in FILE_MARKS if (token := find(mark)) is not None), None)
    for marks in MARKS:
        before, after, middle = map(find, marks)
        if before is not None and after is not None and middle is not None:
            return Infill(before, after, middle, file)
    return None
