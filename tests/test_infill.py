"""Marks of code to be filled in: which model has them, and the prompt that is made of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from app.text.infill import Infill, infill_of


def tokenizer(*marks: str) -> Any:
    """One token a byte, and ``marks`` from 256 on."""
    vocab = {text: token for token, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    made = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_tokens([AddedToken(mark, special=True, normalized=False) for mark in marks])
    return PreTrainedTokenizerFast(tokenizer_object=made)


@pytest.mark.parametrize(
    ("marks", "found"),
    [
        (("<fim_prefix>", "<fim_suffix>", "<fim_middle>"), Infill(256, 257, 258)),
        (("<|fim_middle|>", "<|file_sep|>", "<|fim_prefix|>", "<|fim_suffix|>"), Infill(258, 259, 256, 257)),
        (("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"), Infill(256, 257, 258)),  # noqa: RUF001
        (("▁<PRE>", "▁<SUF>", "▁<MID>"), Infill(256, 257, 258)),
        (("<fim_prefix>", "<fim_suffix>"), None),
        (("<fim_prefix>", "<|fim_suffix|>", "<fim_middle>"), None),
        (("<file_sep>",), None),
        ((), None),
    ],
)
def test_the_marks_of_each_family(marks: tuple[str, ...], found: Infill | None) -> None:
    assert infill_of(tokenizer(*marks)) == found


def test_the_embedded_model_has_none(model_dir: Path) -> None:
    assert infill_of(AutoTokenizer.from_pretrained(model_dir)) is None


def test_the_prompt_is_other_files_before_after_and_place() -> None:
    def encode(text: str) -> list[int]:
        return [ord(letter) for letter in text]

    marks = Infill(1000, 1001, 1002)
    assert marks.prompt(encode, "a", "b") == [1000, 97, 1001, 98, 1002]
    assert marks.prompt(encode, "", "b", "c") == [1000, 1001, 98, 1002, 99]
    assert marks.prompt(encode, "a", "b", extra=[("f", "x")]) == [120, 10, 1000, 97, 1001, 98, 1002]
    with_files = Infill(1000, 1001, 1002, 1003)
    assert with_files.prompt(encode, "a", "b", extra=[("f", "x"), ("g", "y")]) == [
        *(1003, 102, 10, 120, 10),
        *(1003, 103, 10, 121, 10),
        *(1003, 1000, 97, 1001, 98, 1002),
    ]
