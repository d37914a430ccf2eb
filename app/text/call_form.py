"""How a model writes its calls down, as a grammar for answers that have to be calls and nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CallForm:
    """Calls whose arguments are JSON. ``before_name``, ``before_arguments`` and ``after`` are what a call has around
    its two parts; ``begin`` and ``end`` stand around all calls, ``between`` between two. Without ``between`` there is
    only one call."""

    before_name: str
    before_arguments: str
    after: str = ""
    begin: str = ""
    between: str | None = None
    end: str = ""

    def grammar(self, functions: Sequence[tuple[str, str]], many: bool, tokens: Mapping[str, int]) -> str:
        """The source, of the kind "calls", of a grammar that allows a call of one of ``functions``, or several with
        ``many`` where the form knows that.

        ``functions`` have a name and the JSON schema of their arguments each. ``tokens`` are those that stand for more
        than their text, by their names: a mark has to be written as the token it is.
        """
        own = self.before_name + self.before_arguments + self.after + self.begin + (self.between or "") + self.end
        marks = sorted((name for name in tokens if name and name in own), key=len, reverse=True)
        cuts = re.compile(f"({'|'.join(map(re.escape, marks))})" if marks else r"(?!)")

        def spelled(text: str) -> str:
            parts = filter(None, cuts.split(text))
            return " ".join(f"<[{tokens[part]}]>" if part in marks else json.dumps(part) for part in parts)

        more = f"({spelled(self.between)} call)*" if many and self.between is not None else ""
        lines = [
            f"start: {spelled(self.begin)} call {more} {spelled(self.end)}",
            f"call: {' | '.join(f'call_{i}' for i in range(len(functions)))}",
        ]
        for i, (name, _) in enumerate(functions):
            opened = spelled(self.before_name + name + self.before_arguments)
            lines.append(f"call_{i}: {opened} @arguments_{i} {spelled(self.after)}")
        return json.dumps(["\n".join(lines), list(functions)])


HERMES = CallForm('<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", between="\n")
MISTRAL_LIST = CallForm('{"name": "', '", "arguments": ', "}", "[TOOL_CALLS][", ", ", "]")
MISTRAL_HEADERS = CallForm("[TOOL_CALLS]", "[ARGS]", between="")
# These two have learned to call one function at a time.
LLAMA = CallForm('{"name": "', '", "parameters": ', "}")
HARMONY = CallForm("<|channel|>commentary to=functions.", " <|constrain|>json<|message|>")
# For a model that has learned no form, or one that is no JSON.
PLAIN_JSON = CallForm('{"name": "', '", "arguments": ', "}")
