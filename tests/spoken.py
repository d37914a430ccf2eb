"""Answers as models of several families write them, and what they mean."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from app.text import call_form
from app.text.dialect import FORMS, Dialect
from app.text.reader import Marks
from app.text.tool_calls import headed_calls, json_calls

PARAMETERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}}
TOOLS = tuple({"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in ("add", "get.it"))


class Control(str):
    """The name of a control token, in a script."""

    __slots__ = ()


def c(name: str) -> Control:
    return Control(name)


def mlx_dialect(parser: str, think: tuple[str, str] = ("", "")) -> Dialect:
    """The dialect of a model for which mlx-lm has a tool parser."""
    module = importlib.import_module(f"mlx_lm.tool_parsers.{parser}")
    marks = Marks(*think, (module.tool_call_start,), module.tool_call_end, module.parse_tool_call)
    return Dialect(marks, form=FORMS.get(module.__name__))


HERMES = mlx_dialect("json_tools")
QWEN = mlx_dialect("json_tools", ("<think>", "</think>"))
QWEN_CODER = mlx_dialect("qwen3_coder")
MISTRAL = mlx_dialect("mistral")
KIMI = mlx_dialect("kimi_k2")
MISTRAL_NEW = Dialect(Marks("", "", ("[TOOL_CALLS]",), "", headed_calls), form=call_form.MISTRAL_HEADERS)
LLAMA = Dialect(Marks("", "", ("<|python_tag|>",), "", json_calls, begins_with_json=True), form=call_form.LLAMA)
GPT_OSS = Dialect(Marks(), speaks_harmony=True, form=call_form.HARMONY)


@dataclass(frozen=True)
class Spoken:
    """``said`` is an answer in pieces, to a prompt that ends with ``prompt_end``; the rest is what it means."""

    name: str
    dialect: Dialect
    said: tuple[str, ...]
    text: str = ""
    reasoning: str = ""
    calls: tuple[tuple[str, Any], ...] = ()
    prompt_end: str = "assistant\n"


HERMES_CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": "ü </x> {"}}\n</tool_call>'
ADD = ("add", {"a": 2, "b": "ü </x> {"})
LLAMA_CALL = '{"name": "add", "parameters": {"a": 2, "b": "x"}}'
LLAMA_ADD = ("add", {"a": 2, "b": "x"})
TO_ADD = (c("<|channel|>"), "commentary to=functions.add ", c("<|constrain|>"), "json", c("<|message|>"))
HARMONY_ADD = ("add", {"a": 2})

SPOKEN = (
    Spoken("plain", HERMES, (" Hello <tool> world. \n",), " Hello <tool> world. \n"),
    Spoken("hermes", HERMES, (HERMES_CALL,), calls=(ADD,)),
    Spoken("hermes-text", HERMES, (f"I add.\n\n{HERMES_CALL}\n",), "I add.", calls=(ADD,)),
    Spoken("hermes-two", HERMES, (f"{HERMES_CALL}\n{HERMES_CALL}\nDone.",), "Done.", calls=(ADD, ADD)),
    Spoken("hermes-no-end", HERMES, (HERMES_CALL.removesuffix("</tool_call>"),), calls=(ADD,)),
    Spoken("hermes-broken", HERMES, ("Hm \n<tool_call>{no}</tool_call> so",), "Hm \n<tool_call>{no}</tool_call> so"),
    Spoken(
        "hermes-broken-then-right",
        HERMES,
        (f"<tool_call>[]]</tool_call>{HERMES_CALL}",),
        "<tool_call>[]]</tool_call>",
        calls=(ADD,),
    ),
    Spoken(
        "hermes-unknown",
        HERMES,
        ('<tool_call>{"name": "rm", "arguments": {}}</tool_call>',),
        '<tool_call>{"name": "rm", "arguments": {}}</tool_call>',
    ),
    Spoken("qwen-thinks", QWEN, ("<think>\nLet me see: 1 < 2.\n\n</think>\n\nThree.",), "Three.", "Let me see: 1 < 2."),
    Spoken(
        "qwen-thinks-and-calls",
        QWEN,
        (f"<think>\nNo <tool_call> yet.\n</think>\n\nI add.\n{HERMES_CALL}",),
        "I add.",
        "No <tool_call> yet.",
        (ADD,),
    ),
    Spoken(
        "qwen-prompt-thinks",
        QWEN,
        (f"Hm.\n</think>\n\n{HERMES_CALL}",),
        "",
        "Hm.",
        (ADD,),
        "<|im_start|>assistant\n<think>\n",
    ),
    Spoken("qwen-not-thinking", QWEN, ("Three. ",), "Three. ", prompt_end="<think>\n\n</think>\n\n"),
    Spoken("qwen-thinks-on", QWEN, ("Hm </thin",), "", "Hm </thin", (), "<think>\n"),
    Spoken(
        "qwen-coder",
        QWEN_CODER,
        (
            "<tool_call>\n<function=add>\n<parameter=a>\n2\n</parameter>\n"
            "<parameter=b>\nx\ny\n</parameter>\n</function>\n</tool_call>",
        ),
        calls=(("add", {"a": 2, "b": "x\ny"}),),
    ),
    Spoken("llama", LLAMA, (LLAMA_CALL,), calls=(LLAMA_ADD,)),
    Spoken("llama-two", LLAMA, (f"\n{LLAMA_CALL}; {LLAMA_CALL}",), calls=(LLAMA_ADD, LLAMA_ADD)),
    Spoken("llama-tag", LLAMA, (c("<|python_tag|>"), LLAMA_CALL), calls=(LLAMA_ADD,)),
    Spoken("llama-text-tag", LLAMA, ("So: ", c("<|python_tag|>"), LLAMA_CALL), "So:", calls=(LLAMA_ADD,)),
    Spoken("llama-json", LLAMA, ('{"sum": 5}',), '{"sum": 5}'),
    Spoken("llama-text", LLAMA, ('It is {"name": 1}',), 'It is {"name": 1}'),
    Spoken(
        "llama-code",
        LLAMA,
        (c("<|python_tag|>"), 'web.call(query="x")'),
        '<|python_tag|>web.call(query="x")',
    ),
    Spoken("llama-other-control", LLAMA, ("a", c("<|x|>"), "b"), "ab"),
    Spoken(
        "mistral-list",
        MISTRAL,
        (c("[TOOL_CALLS]"), '[{"name": "add", "arguments": {"a": 2}}, {"name": "get.it", "arguments": {}}]'),
        calls=(("add", {"a": 2}), ("get.it", {})),
    ),
    Spoken(
        "mistral-headers",
        MISTRAL,
        ("Well. ", c("[TOOL_CALLS]"), "add", c("[ARGS]"), '{"a": 2}', c("[TOOL_CALLS]"), "add", c("[ARGS]"), "{}"),
        "Well.",
        calls=(("add", {"a": 2}), ("add", {})),
    ),
    Spoken(
        "mistral-new",
        MISTRAL_NEW,
        ("Well. ", c("[TOOL_CALLS]"), "add", c("[ARGS]"), '{"b": "[ARGS]x"}', c("[TOOL_CALLS]"), "get.it[ARGS] {}\n"),
        "Well.",
        calls=(("add", {"b": "[ARGS]x"}), ("get.it", {})),
    ),
    Spoken(
        "mistral-new-list",
        MISTRAL_NEW,
        (c("[TOOL_CALLS]"), '[{"name": "get.it", "arguments": {}}]'),
        calls=(("get.it", {}),),
    ),
    Spoken(
        "mistral-new-broken",
        MISTRAL_NEW,
        (c("[TOOL_CALLS]"), "add", c("[ARGS]"), '{"a": 1} and'),
        '[TOOL_CALLS]add[ARGS]{"a": 1} and',
    ),
    Spoken("mistral-broken", MISTRAL, (c("[TOOL_CALLS]"), '[{"name": '), '[TOOL_CALLS][{"name": '),
    Spoken(
        "kimi",
        KIMI,
        (
            *("Sure.", c("<|tool_calls_section_begin|>"), c("<|tool_call_begin|>"), "functions.add:0"),
            *(c("<|tool_call_argument_begin|>"), '{"a": 2}', c("<|tool_call_end|>"), c("<|tool_calls_section_end|>")),
        ),
        "Sure.",
        calls=(("add", {"a": 2}),),
    ),
    Spoken("gpt-oss", GPT_OSS, (c("<|channel|>"), "final", c("<|message|>"), "Hi <b> \n"), "Hi <b> \n"),
    Spoken(
        "gpt-oss-thinks",
        GPT_OSS,
        (
            *(c("<|channel|>"), "analysis", c("<|message|>"), "They greet.", c("<|end|>")),
            *(c("<|start|>"), "assistant", c("<|channel|>"), "final", c("<|message|>"), "Hi!"),
        ),
        "Hi!",
        "They greet.",
    ),
    Spoken(
        "gpt-oss-calls",
        GPT_OSS,
        (
            *(c("<|channel|>"), "analysis", c("<|message|>"), "I add.", c("<|end|>")),
            *(c("<|start|>"), "assistant", *TO_ADD, '{"a": 2}'),
        ),
        "",
        "I add.",
        (HARMONY_ADD,),
    ),
    Spoken(
        "gpt-oss-two",
        GPT_OSS,
        (
            *(c("<|channel|>"), "commentary", c("<|message|>"), "First.", c("<|end|>"), c("<|start|>"), "assistant"),
            *(*TO_ADD, '{"a": 2}', c("<|call|>"), c("<|start|>"), "assistant to=functions.get.it"),
            *(c("<|channel|>"), "commentary json", c("<|message|>")),
        ),
        "First.",
        calls=(HARMONY_ADD, ("get.it", {})),
    ),
    Spoken(
        "gpt-oss-broken",
        GPT_OSS,
        (*TO_ADD, '{"a": '),
        '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": ',
    ),
    Spoken("gpt-oss-no-header", GPT_OSS, ("Hi!",), "Hi!"),
)
