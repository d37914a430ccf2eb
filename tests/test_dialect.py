"""Which marks are looked for, decided from real tokenizers as mlx-lm loads them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import load

from app.text.dialect import Dialect, dialect_of
from app.text.reader import Marks
from app.text.tool_calls import json_calls
from tests.spoken import TOOLS
from tests.test_chat import small

JSON_TEMPLATE = "{% for t in tools %}<tool_call>{{ tool_call.name }}{% endfor %}{{ messages }}"
CODER_TEMPLATE = "<tool_call>\n<function={{ messages }}"
MISTRAL_TEMPLATE = "[TOOL_CALLS]{{ messages }}"
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|end|>")


def loaded(folder: Path, template: str, *control: str) -> Any:
    small(template, control=("<bos>", *control)).save_pretrained(folder)
    return load(folder)


@pytest.mark.parametrize(
    ("template", "control", "marks", "module"),
    [
        (JSON_TEMPLATE, (), ("", "", ("<tool_call>",), "</tool_call>"), "mlx_lm.tool_parsers.json_tools"),
        (
            JSON_TEMPLATE,
            ("<think>", "</think>"),
            ("<think>", "</think>", ("<tool_call>",), "</tool_call>"),
            "mlx_lm.tool_parsers.json_tools",
        ),
        (CODER_TEMPLATE, (), ("", "", ("<tool_call>",), "</tool_call>"), "mlx_lm.tool_parsers.qwen3_coder"),
        (MISTRAL_TEMPLATE, ("[TOOL_CALLS]",), ("", "", ("[TOOL_CALLS]",), ""), "mlx_lm.tool_parsers.mistral"),
        ("{{ messages }}", ("<tool_call>",), ("", "", ("<tool_call>",), "</tool_call>"), json_calls.__module__),
        ("{{ messages }}", ("<|python_tag|>",), ("", "", ("<|python_tag|>",), ""), json_calls.__module__),
    ],
)
def test_a_model_shows_its_marks(
    template: str, control: tuple[str, ...], marks: tuple[Any, ...], module: str, tmp_path: Path
) -> None:
    found = dialect_of(loaded(tmp_path, template, *control)).marks
    assert (found.think_start, found.think_end, found.call_starts, found.call_end) == marks
    assert found.parse is not None
    assert found.parse.__module__ == module
    assert found.begins_with_json == ("<|python_tag|>" in control)


def test_gpt_oss_speaks_harmony(tmp_path: Path) -> None:
    assert dialect_of(loaded(tmp_path, "{{ messages }}", *HARMONY)).speaks_harmony


def test_the_embedded_model_only_speaks(model_dir: Path) -> None:
    assert dialect_of(load(model_dir)) == Dialect(Marks())


@pytest.mark.parametrize(
    ("prompt_end", "is_reasoning"),
    [("assistant\n<think>\n", True), ("<think>", True), ("assistant\n", False), ("<think>\n\n</think>\n\n", False)],
)
def test_a_prompt_may_have_begun_the_reasoning(prompt_end: str, is_reasoning: bool) -> None:
    reader = Dialect(Marks("<think>", "</think>")).reader(TOOLS, prompt_end)
    assert (reader.feed("Hm").reasoning == "Hm") == is_reasoning
