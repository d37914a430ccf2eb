"""A schema or grammar tried in a process of its own, which may run out of time or stack without harm to the server.

The library bounds the work of a step, but not that of every check before the first one: a chain of a few thousand
references overflows its stack, and thirty patterns that must hold together keep it busy for minutes. So this file is
run as a program: kind and source as JSON on stdin, what came of them as JSON on stdout.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import threading
from typing import Literal

from llguidance import LLMatcher, LLParserLimits, grammar_from

Kind = Literal["json_schema", "grammar"]

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
    try:
        done = subprocess.run(
            [sys.executable, "-P", __file__],
            input=json.dumps([kind, source]),
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        return "", TOO_COMPLEX
    if not done.stdout:  # ended by a signal for want of stack or time, or by a fault of the library
        return "", TOO_COMPLEX
    grammar, reason = json.loads(done.stdout)
    return grammar, reason


def _converted(kind: Kind, source: str) -> str:
    """Raises ValueError where the source is not even written as its kind is."""
    if kind == "grammar":
        return grammar_from("grammar", source)
    schema = json.loads(source)
    schema.pop("x-guidance", None)  # would let a schema say that parts of it need not hold
    return LLMatcher.grammar_from_json_schema(schema, overrides={"lenient": False, "whitespace_pattern": WHITESPACE})


def _judge(kind: Kind, source: str) -> tuple[str, str]:
    try:
        grammar = _converted(kind, source)
    except (ValueError, RecursionError) as error:
        return "", shortened(str(error))
    is_bad, messages = LLMatcher.validate_grammar_with_warnings(grammar, None, limits=LIMITS)
    return ("", shortened(messages[0])) if is_bad else (grammar, "")


def shortened(reason: str) -> str:
    """A reason of the library, which may be pages long, as one line."""
    return " ".join(reason.split())[:MAX_REASON_CHARS]


def _answer() -> None:
    kind, source = json.load(sys.stdin)
    json.dump(_judge(kind, source), sys.stdout)


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_answer)
    thread.start()
    thread.join()
