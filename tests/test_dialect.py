"""Which marks are looked for, decided from real tokenizers as mlx-lm loads them."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import load

from app.text import call_form
from app.text.call_form import CallForm
from app.text.dialect import PLAIN_CALLS, Dialect, dialect_of
from app.text.reader import Marks
from app.text.tool_calls import MAX_CALL_CHARS, json_calls, read_calls
from tests.spoken import TOOLS, c, mlx_dialect
from tests.test_chat import small
from tests.test_reader import read

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


@pytest.mark.parametrize(
    ("template", "control", "form", "end"),
    [
        (JSON_TEMPLATE, (), call_form.HERMES, "\n</tool_call>"),
        ("{{ messages }}", ("<tool_call>",), call_form.HERMES, "\n</tool_call>"),
        (MISTRAL_TEMPLATE, ("[TOOL_CALLS]",), call_form.MISTRAL_LIST, ""),
        (MISTRAL_TEMPLATE, ("[TOOL_CALLS]", "[ARGS]"), call_form.MISTRAL_HEADERS, ""),
        ("{{ messages }}", ("<|python_tag|>",), call_form.LLAMA, ""),
        ("{{ messages }}", HARMONY, call_form.HARMONY, ""),
    ],
)
def test_a_model_that_is_forced_to_call_does_it_as_ever(
    template: str, control: tuple[str, ...], form: CallForm, end: str, tmp_path: Path
) -> None:
    dialect = dialect_of(loaded(tmp_path, template, *control))
    assert dialect.forced == (replace(dialect, marks=replace(dialect.marks, call_end=end)), form)
    assert dialect.marks.call_end == end.lstrip()


def test_a_model_whose_calls_are_no_json_is_forced_to_write_some(tmp_path: Path) -> None:
    for template in (CODER_TEMPLATE, "{{ messages }}"):
        assert dialect_of(loaded(tmp_path, template)).forced == (PLAIN_CALLS, call_form.PLAIN_JSON)


def test_an_id_inside_a_mistral_call_is_not_its_name(tmp_path: Path) -> None:
    dialect = dialect_of(loaded(tmp_path, MISTRAL_TEMPLATE, "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"))
    said = (c("[TOOL_CALLS]"), "add", c("[CALL_ID]"), "x9", c("[ARGS]"), '{"b": "[CALL_ID]x"}')
    assert read(dialect, said) == ("", "", [("add", {"b": "[CALL_ID]x"})])


def test_a_parser_that_may_take_minutes_is_not_used(tmp_path: Path) -> None:
    tokenizer = loaded(tmp_path, "<|tool_call>{{ messages }}<tool_call|>")
    assert tokenizer.tool_parser.__module__ == "mlx_lm.tool_parsers.gemma4"
    assert dialect_of(tokenizer) == Dialect(Marks())


@pytest.mark.parametrize(
    ("parser", "unit"),
    [
        ("json_tools", "["),
        ("qwen3_coder", "<function="),
        ("qwen3_coder", "<function=f><parameter=a>"),
        ("mistral", "a[ARGS]"),
        ("pythonic", "[a(x="),
        ("glm47", "<arg_key>a</arg_key> "),
        ("function_gemma", "call:a{"),
        ("kimi_k2", "<|tool_call_begin|>"),
        ("longcat", "<longcat_arg_key>"),
        ("minicpm5", '<function name="a">'),
        ("minimax_m2", '<parameter name="a">'),
        ("muse_spark", "<atem:invoke "),
    ],
)
def test_a_model_that_repeats_itself_in_a_call_does_not_hold_up_the_server(parser: str, unit: str) -> None:
    """Time grows with the square of the length: a second for a quarter of the greatest is sixteen for the whole."""
    parse = mlx_dialect(parser).marks.parse
    assert parse is not None
    began_s = time.thread_time()
    read_calls(parse, unit * (MAX_CALL_CHARS // 4 // len(unit)), TOOLS)
    assert time.thread_time() - began_s < 1.0


def test_a_call_of_more_than_the_greatest_length_is_text() -> None:
    def parse(text: str, tools: Any) -> Any:
        return {"name": "add", "arguments": {}}

    assert len(read_calls(parse, "x" * MAX_CALL_CHARS, TOOLS)) == 1
    assert read_calls(parse, "x" * (MAX_CALL_CHARS + 1), TOOLS) == ()


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
