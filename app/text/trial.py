"""A schema or grammar tried in a process of its own, which may run out of time or stack without harm to the server.

The library bounds the work of a step, but not that of every check before the first one: a chain of a few thousand
references overflows its stack, and thirty patterns that must hold together keep it busy for minutes. So this file is
run as a program: kind and source as JSON on stdin, what came of them as JSON on stdout. The last line there counts:
before each try the program writes what is to be said should it not come back.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
from typing import Literal

from llguidance import LLMatcher, LLParserLimits, grammar_from

# "calls": a JSON list of a Lark grammar, and of names with the JSON schemas that it calls ``arguments_0`` and so on.
Kind = Literal["json_schema", "grammar", "calls"]

CPU_S = 3
# On a busy machine those seconds take a while.
TIMEOUT_S = 30
# The stack of the trial; where its outcome is used there has to be more.
STACK_BYTES = 8 << 20
# An object may have some thousand optional members, each of which can come next; errors quote no source.
LIMITS = LLParserLimits(max_items_in_row=20_000, verbose_errors=False)
MAX_REASON_CHARS = 300
# A small model that is free to fill a gap may fill it for ever.
WHITESPACE = r"[\x20\x0A\x0D\x09]{1,16}"
TOO_COMPLEX = "it is too complex to be compiled"


def attempt(kind: Kind, source: str) -> tuple[str, str]:
    """What the library makes of ``source``, and why it cannot be used: one of the two is empty. Takes a few tenths of a
    second, and ``CPU_S`` of computing at most.

    Raises:
        OSError: the trial could not be held.
    """
    command, given = [sys.executable, "-P", __file__], json.dumps([kind, source]).encode()
    try:
        said = subprocess.run(command, input=given, capture_output=True, timeout=TIMEOUT_S).stdout
    except subprocess.TimeoutExpired as error:
        said = error.stdout or b""
    # What was ended by a signal, for want of stack or time, or by a fault of the library may have said half a line.
    *lines, _ = said.split(b"\n")
    grammar, reason = json.loads(lines[-1]) if lines else ("", TOO_COMPLEX)
    return grammar, reason


def _judge(kind: Kind, source: str) -> tuple[str, str]:
    if kind == "calls":
        return _judge_calls(source)
    try:
        grammar = grammar_from("grammar", source) if kind == "grammar" else _from_schema(source)
    except (ValueError, RecursionError) as error:  # it is not even written as its kind is
        return "", shortened(str(error))
    return _validated(grammar)


def _judge_calls(source: str) -> tuple[str, str]:
    lark, functions = json.loads(source)
    grammars = [{"lark_grammar": lark}]
    for i, (name, schema) in enumerate(functions):
        _say("", f"{name}: {TOO_COMPLEX}")
        grammar, reason = _judge("json_schema", schema)
        if reason:
            return "", f"{name}: {reason}"
        grammars += [{**part, "name": f"arguments_{i}"} for part in json.loads(grammar)["grammars"]]
    _say("", TOO_COMPLEX)
    return _validated(json.dumps({"grammars": grammars}))


def _from_schema(source: str) -> str:
    schema = json.loads(source)
    schema.pop("x-guidance", None)  # would let a schema say that parts of it need not hold
    return LLMatcher.grammar_from_json_schema(schema, overrides={"lenient": False, "whitespace_pattern": WHITESPACE})


def _validated(grammar: str) -> tuple[str, str]:
    is_bad, messages = LLMatcher.validate_grammar_with_warnings(grammar, None, limits=LIMITS)
    return ("", shortened(messages[0])) if is_bad else (grammar, "")


def shortened(reason: str) -> str:
    """A reason of the library, which may be pages long, as one line."""
    return " ".join(reason.split())[:MAX_REASON_CHARS]


def _say(grammar: str, reason: str) -> None:
    print(json.dumps([grammar, reason]), flush=True)


def _answer() -> None:
    kind, source = json.load(sys.stdin)
    _say("", TOO_COMPLEX)
    _say(*_judge(kind, source))


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_answer)
    thread.start()
    thread.join()
