"""Calls in the forms of several families: what their grammars let through is what their readers take for calls."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import AddedToken

from app.text.call_form import HERMES as HERMES_FORM
from app.text.dialect import PLAIN, Dialect
from app.text.grammar import Grammar, Grammars
from tests import spoken, talking
from tests.spoken import TOOLS, c
from tests.test_reader import read

SCHEMA = json.dumps({**spoken.PARAMETERS, "additionalProperties": False})
FUNCTIONS = [(tool["function"]["name"], SCHEMA) for tool in TOOLS]
NAMED = ', "arguments": '
TO = (c("<|channel|>"), "commentary to=functions.")
JSON = (" ", c("<|constrain|>"), "json", c("<|message|>"))
# By family: one call of `add` with {"a": 2}, and where there may be several, another one of `get.it` with {}.
WRITTEN: dict[str, tuple[Dialect, Sequence[str], Sequence[str]]] = {
    "qwen": (
        spoken.QWEN,
        (f'<tool_call>\n{{"name": "add"{NAMED}{{"a": 2}}}}\n</tool_call>',),
        (f'\n<tool_call>\n{{"name": "get.it"{NAMED}{{}}}}\n</tool_call>',),
    ),
    "hermes": (
        spoken.HERMES,
        (f'<tool_call>\n{{"name": "add"{NAMED}{{"a": 2}}}}\n</tool_call>',),
        (f'\n<tool_call>\n{{"name": "get.it"{NAMED}{{}}}}\n</tool_call>',),
    ),
    "llama": (spoken.LLAMA, ('{"name": "add", "parameters": {"a": 2}}',), ()),
    "mistral": (spoken.MISTRAL, (c("[TOOL_CALLS]"), f'[{{"name": "add"{NAMED}{{"a": 2}}}}', "]"), ()),
    "mistral-two": (
        spoken.MISTRAL,
        (c("[TOOL_CALLS]"), f'[{{"name": "add"{NAMED}{{"a": 2}}}}'),
        (f', {{"name": "get.it"{NAMED}{{}}}}]',),
    ),
    "mistral-new": (
        spoken.MISTRAL_NEW,
        (c("[TOOL_CALLS]"), "add", c("[ARGS]"), '{"a": 2}'),
        (c("[TOOL_CALLS]"), "get.it", c("[ARGS]"), "{}"),
    ),
    "gpt-oss": (spoken.GPT_OSS, (*TO, "add", *JSON, '{"a": 2}'), ()),
    "xml": (spoken.QWEN_CODER, (f'{{"name": "add"{NAMED}{{"a": 2}}}}',), ()),
    "none": (PLAIN, (f'{{"name": "add"{NAMED}{{"a": 2}}}}',), ()),
}
EVERY = pytest.mark.parametrize("family", WRITTEN)


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(talking.TOKENIZER, {talking.END}, talking.CARD.vocab_size)


def grammar_of(grammars: Grammars, dialect: Dialect, many: bool, functions: Any = FUNCTIONS) -> Grammar:
    _, form = dialect.forced
    found = grammars.compile("calls", form.grammar(functions, many, talking.VOCABULARY.added)).result(60)
    assert isinstance(found, Grammar), found
    return found


def reached(grammar: Grammar, said: Sequence[str]) -> tuple[int, bool]:
    """How many tokens of ``said`` the grammar lets through, and whether the answer may end there."""
    matcher = grammar.start(0)
    tokens: list[int] = []
    for token in (*talking.tokens_of(said), None):
        mask = matcher.mask(tokens)
        if token is None or not mask[token // 8] >> token % 8 & 1:
            break
        tokens.append(token)
    return len(tokens), bool(mask[talking.END // 8] >> talking.END % 8 & 1)


@EVERY
def test_what_a_model_writes_is_let_through_and_understood(grammars: Grammars, family: str) -> None:
    dialect, first, second = WRITTEN[family]
    said = (*first, *second)
    grammar = grammar_of(grammars, dialect, many=True)
    assert reached(grammar, said) == (len(talking.tokens_of(said)), True)
    calls = [("add", {"a": 2}), ("get.it", {})] if second else [("add", {"a": 2})]
    assert read(dialect.forced[0], said) == ("", "", calls)


@EVERY
def test_an_answer_may_not_end_within_a_call(grammars: Grammars, family: str) -> None:
    """Wherever it may end there is a call more than there was."""
    dialect, first, second = WRITTEN[family]
    grammar = grammar_of(grammars, dialect, many=True)
    tokens = talking.tokens_of((*first, *second))
    matcher = grammar.start(0)
    ends = [matcher.mask(tokens[:at])[talking.END // 8] >> talking.END % 8 & 1 for at in range(len(tokens) + 1)]
    assert sum(ends) == (2 if second and family != "mistral-two" else 1)
    assert ends[-1] == 1
    assert not any(ends[: len(talking.tokens_of(first)) - 1])


@EVERY
def test_only_one_call_where_no_more_may_be(grammars: Grammars, family: str) -> None:
    dialect, first, second = WRITTEN[family]
    grammar = grammar_of(grammars, dialect, many=False)
    length = len(talking.tokens_of(first))
    assert reached(grammar, (*first, *second)) == (length, family != "mistral-two")


@EVERY
@pytest.mark.parametrize(
    ("right", "wrong", "at"),
    [
        ("add", "sub", 0),  # not offered
        ('"a": 2', '"a": "2"', 5),  # not of the type
        ('"a": 2', '"c": 2', 1),  # not in the schema
    ],
)
def test_what_is_no_call_of_the_functions_is_not_let_through(
    grammars: Grammars, family: str, right: str, wrong: str, at: int
) -> None:
    dialect, first, _ = WRITTEN[family]
    grammar = grammar_of(grammars, dialect, many=True)
    place = next(i for i, piece in enumerate(first) if right in piece)
    said = [*first[:place], first[place].partition(right)[0] + wrong]
    before = len(talking.tokens_of(said)) - len(wrong)
    assert reached(grammar, said) == (before + at, False)


@EVERY
def test_nothing_comes_before_a_call(grammars: Grammars, family: str) -> None:
    grammar = grammar_of(grammars, WRITTEN[family][0], many=True)
    for text in (" ", "Well", "<think>", c("<|python_tag|>")):
        length, may_end = reached(grammar, (text,))
        assert length < len(talking.tokens_of((text,)))
        assert not may_end


def test_a_name_that_begins_another_is_told_from_it(grammars: Grammars) -> None:
    functions = [("add", '{"const": {}}'), ("add_all", '{"const": {"x": 1}}')]
    for dialect, first, _ in (WRITTEN["hermes"], WRITTEN["mistral-new"], WRITTEN["gpt-oss"]):
        grammar = grammar_of(grammars, dialect, False, functions)
        for name, arguments in (("add", "{}"), ("add_all", '{"x":1}')):
            said = [_renamed(piece, name, arguments) for piece in first]
            assert reached(grammar, said) == (len(talking.tokens_of(said)), True)
            wrong = [_renamed(piece, name, "[]") for piece in first]
            assert not reached(grammar, wrong)[1]


def _renamed(piece: str, name: str, arguments: str) -> str:
    if isinstance(piece, spoken.Control):
        return piece
    return piece.replace("add", name).replace('{"a": 2}', arguments)


def test_a_mark_is_the_token_it_is_also_where_that_is_none_of_control() -> None:
    tokenizer = talking.build_tokenizer()
    tokenizer.backend_tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False)])
    (mark,) = tokenizer.backend_tokenizer.encode("<tool_call>").ids
    grammars = Grammars(tokenizer, {talking.END}, len(tokenizer))
    source = HERMES_FORM.grammar(FUNCTIONS, True, {"<tool_call>": mark})
    found = grammars.compile("calls", source).result(60)
    assert isinstance(found, Grammar)
    mask = found.start(0).mask([])
    assert [bit for bit in range(8 * len(mask)) if mask[bit // 8] >> bit % 8 & 1] == [mark]


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ({"not": {}}, "Unimplemented keys"),
        ({"x-guidance": {"lenient": True}, "properties": {"a": {"not": {}}}}, "Unimplemented keys"),
        ({"$ref": "#/$defs/gone"}, "does not exist"),
        ({"allOf": [{"type": "string", "pattern": f"a{i}"} for i in range(40)]}, "too complex"),
        ({"$defs": {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(4000)}, "$ref": "#/$defs/d0"}, ""),
    ],
    ids=["keyword", "lenient", "reference", "time", "stack"],
)
def test_a_schema_that_cannot_be_kept_to_is_named(grammars: Grammars, bad: dict[str, Any], reason: str) -> None:
    functions = [FUNCTIONS[0], ("odd", json.dumps(bad)), FUNCTIONS[1]]
    _, form = spoken.HERMES.forced
    found = grammars.compile("calls", form.grammar(functions, True, {})).result(60)
    assert isinstance(found, str)
    assert found.startswith("odd: ")
    assert reason in found
