"""Grammars on a tiny vocabulary: which tokens may come next, what is refused, and what cannot harm the server."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from app.errors import Overloaded
from app.text import grammar as grammar_module
from app.text.grammar import Grammar, Grammars, Matcher
from app.text.trial import STACK_BYTES, TOO_COMPLEX, attempt
from tests.test_service import END, STOP, TOKENIZER, TOKENS, VOCABULARY, ids

SIZE = len(TOKENIZER)
PADDED = SIZE + 9  # as a model may have it
SINGLE = {token for data, token in TOKENS.items() if len(data) == 1}


@pytest.fixture(scope="module")
def grammars() -> Grammars:
    return Grammars(TOKENIZER, {END, STOP}, PADDED)


def compiled(grammars: Grammars, kind: Any, source: str) -> Grammar:
    found = grammars.compile(kind, source).result(60)
    assert isinstance(found, Grammar), found
    return found


def allowed(matcher: Matcher, tokens: list[int]) -> set[int]:
    mask = matcher.mask(tokens)
    assert len(mask) * 8 >= PADDED
    return {8 * at + bit for at, byte in enumerate(mask) for bit in range(8) if byte >> bit & 1}


def fits(texts: list[bytes], so_far: bytes) -> set[int]:
    """What may come next where one of ``texts`` has to come out, by trying every token."""
    words = {token for token in TOKENS.values() if token not in (END, STOP) and not VOCABULARY.is_control(token)}
    going_on = {token for token in words if any(text.startswith(so_far + VOCABULARY.data(token)) for text in texts)}
    return going_on | ({END, STOP} if so_far in texts else set())


@pytest.mark.parametrize(
    ("kind", "source", "texts"),
    [
        ("json_schema", '{"enum": ["abc", "abcd!", "one two"]}', ['"abc"', '"abcd!"', '"one two"']),
        ("json_schema", '{"type": "boolean"}', ["true", "false"]),
        ("grammar", 'root ::= "abc" | "abcd!" | ("one" | "two")', ["abc", "abcd!", "one", "two"]),
        (
            "grammar",
            "start: /(Hello world|Hello abc)!?/",
            [f"Hello {w}{e}" for w in ("world", "abc") for e in ("", "!")],
        ),
        ("grammar", 'start: "é" | "中文"', ["é", "中文"]),
    ],
)
def test_a_token_is_allowed_if_a_text_of_the_grammar_begins_so(
    grammars: Grammars, kind: Any, source: str, texts: list[str]
) -> None:
    grammar = compiled(grammars, kind, source)
    encoded = [text.encode() for text in texts]
    for data in encoded:
        tokens = ids("x", "y")
        matcher = grammar.start(len(tokens))
        for at, byte in enumerate(data):
            found = allowed(matcher, tokens)
            # Where only one text is left, the library allows what its tokenizer would make of it, here single bytes.
            assert TOKENS[bytes([byte])] in found
            assert found <= fits(encoded, data[:at])
            assert found & SINGLE == fits(encoded, data[:at]) & SINGLE
            tokens.append(TOKENS[bytes([byte])])
        assert allowed(matcher, tokens) == fits(encoded, data) >= {END, STOP}


def test_nothing_but_an_end_token_follows_the_end(grammars: Grammars) -> None:
    matcher = compiled(grammars, "json_schema", '{"const": 1}').start(0)
    assert allowed(matcher, ids("1")) == {END, STOP}


def test_a_matcher_catches_up_from_anywhere(grammars: Grammars) -> None:
    """A requeued request goes on with the matcher it has; one that began late would say the same."""
    grammar = compiled(grammars, "json_schema", '{"type": "array", "items": {"enum": ["abc", "bcd"]}}')
    prompt = ids("one", "two")
    steady = grammar.start(len(prompt))
    tokens = list(prompt)
    for piece in ("[", '"', "a", "bcd"[:1], "c", '"'):
        first = steady.mask(tokens)
        assert steady.mask(tokens) == first == grammar.start(len(prompt)).mask(tokens)
        tokens += ids(piece)
    assert steady.mask(tokens) == grammar.start(len(prompt)).mask(tokens)


def test_answers_of_one_grammar_know_nothing_of_each_other(grammars: Grammars) -> None:
    grammar = compiled(grammars, "json_schema", '{"enum": ["abc", "bcd"]}')
    one, other = grammar.start(0), grammar.start(0)
    begun = allowed(other, [])
    allowed(one, ids('"', "abc"))
    assert allowed(other, []) == begun
    seen: list[set[int]] = []
    thread = threading.Thread(target=lambda: seen.append(allowed(one, ids('"', "abc", '"'))))
    thread.start()
    thread.join()
    assert seen == [{END, STOP}]


def test_a_token_outside_the_grammar_is_a_fault(grammars: Grammars) -> None:
    matcher = compiled(grammars, "json_schema", '{"enum": ["abc"]}').start(0)
    for _ in range(2):
        with pytest.raises(ValueError, match="forbids"):
            matcher.mask(ids("x"))
        assert not matcher.is_at_limit


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ('start: "x" tail\ntail: ' + " | ".join(f'"a{i}" "b" t' for i in range(20_001)) + '\nt: "c"', "x"),
        ('root ::= "x" tail | "y"\ntail ::= "abc" tail', "xa"),
    ],
    ids=["alternatives", "forced for ever"],
)
def test_a_step_beyond_the_limits_is_no_fault(grammars: Grammars, source: str, text: str) -> None:
    matcher = compiled(grammars, "grammar", source).start(0)
    for at in range(len(text)):
        matcher.mask(ids(*text[:at]))
    assert not matcher.is_at_limit
    for _ in range(2):
        with pytest.raises(ValueError, match="beyond its limits"):
            matcher.mask(ids(*text))
        assert matcher.is_at_limit


@pytest.mark.parametrize(
    ("kind", "source", "reason"),
    [
        ("json_schema", {"not": {"type": "string"}}, "Unimplemented keys"),
        ("json_schema", {"type": "array", "uniqueItems": True}, "Unimplemented keys"),
        ("json_schema", {"type": "wish"}, "Invalid type"),
        ("json_schema", {"$ref": "#/$defs/gone"}, "does not exist"),
        ("json_schema", {"$ref": "http://example.com/schema"}, "does not fetch"),
        ("json_schema", {"enum": []}, "Unsatisfiable"),
        ("json_schema", {"type": "string", "minLength": 3, "maxLength": 2}, "Unsatisfiable"),
        ("json_schema", {"type": "string", "pattern": "(?=a)b"}, "look-around"),
        ("json_schema", {"type": "string", "pattern": "("}, "regex"),
        ("json_schema", {"type": "string", "format": "wish"}, "Unknown format"),
        ("json_schema", {"x-guidance": {"lenient": True}, "not": {}}, "Unimplemented keys"),
        ("grammar", "root ::= (((", "GBNF"),
        ("grammar", "start: nothing", "nothing"),
        ("grammar", "start: <|nothing|>", "special token"),
        ("grammar", "?", "GBNF"),
        ("grammar", 'root ::= "a" root', "without an end"),
        ("grammar", 'root ::= "a" other\nother ::= "b" other', "without an end"),
        ("grammar", 'start: "a" start', "without an end"),
    ],
)
def test_what_cannot_be_kept_to_is_refused_with_a_reason(
    grammars: Grammars, kind: Any, source: Any, reason: str
) -> None:
    text = source if isinstance(source, str) else json.dumps(source)
    found = grammars.compile(kind, text).result(60)
    assert isinstance(found, str)
    assert reason in found
    assert "\n" not in found


def chain(num: int) -> dict[str, Any]:
    links: dict[str, Any] = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(num)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{num}": {"type": "string"}}}


def intersection(num: int) -> dict[str, Any]:
    return {"allOf": [{"type": "string", "pattern": f"a{i}"} for i in range(num)]}


@pytest.mark.parametrize("schema", [chain(4000), intersection(40)], ids=["stack", "time"])
def test_a_schema_that_breaks_the_library_breaks_nothing_here(grammars: Grammars, schema: Any) -> None:
    assert grammars.compile("json_schema", json.dumps(schema)).result(60) == TOO_COMPLEX
    assert compiled(grammars, "json_schema", '{"enum": ["abc"]}')


def test_what_passes_its_trial_has_stack_enough_here(grammars: Grammars) -> None:
    """The longest chain that a trial survives is compiled in this process."""

    def passes(num: int) -> bool:
        return attempt("json_schema", json.dumps(chain(num))) != ("", TOO_COMPLEX)

    low, high = 100, 4000
    while high - low > 50:
        middle = (low + high) // 2
        low, high = (middle, high) if passes(middle) else (low, middle)
    assert isinstance(grammars.compile("json_schema", json.dumps(chain(low))).result(60), Grammar)
    assert threading.stack_size() < STACK_BYTES  # of other threads, which is as it was


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The sources that were tried, one after the other."""
    seen: list[str] = []
    monkeypatch.setattr(grammar_module, "attempt", lambda kind, source: (seen.append(source), attempt(kind, source))[1])
    return seen


def test_equal_sources_are_tried_once_and_old_ones_again(monkeypatch: pytest.MonkeyPatch, tried: list[str]) -> None:
    monkeypatch.setattr(grammar_module, "MAX_CACHED", 2)
    grammars = Grammars(TOKENIZER, {END}, SIZE)
    first, *others = [f'start: "{word}"' for word in "abc"]
    for source in (first, first, *others, first):
        compiled(grammars, "grammar", source)
    assert tried == [first, *others, first]
    assert len(grammars._tried) == 2


def test_a_refusal_is_not_kept(grammars: Grammars, tried: list[str]) -> None:
    for _ in range(2):
        assert isinstance(grammars.compile("grammar", "start: nothing").result(60), str)
    assert len(tried) == 2


def exhaust(matcher: Matcher, first: str, then: str) -> None:
    """Let an answer go on with the same letter until its grammar cannot follow it."""
    with pytest.raises(ValueError, match="beyond its limits"):  # noqa: PT012 - one of many steps
        for num in range(2000):
            matcher.mask(ids(first, *then * num))
    assert matcher.is_at_limit
    with pytest.raises(ValueError, match="beyond its limits"):
        matcher.mask(ids(first, *then * num))


def test_a_limit_that_one_answer_has_met_is_nobody_elses(grammars: Grammars) -> None:
    """The library shares what it has worked out of a pattern among all copies, and what it counts of that."""
    source = 'start: "n" /[0-9]{1,3}/ | "s" X\nX: /c{60000}/'
    running = compiled(grammars, "grammar", source).start(0)
    running.mask(ids("n"))
    stuck = compiled(grammars, "grammar", source).start(0)
    exhaust(stuck, "s", "c")
    assert allowed(running, ids("n", "1")) == allowed(compiled(grammars, "grammar", source).start(0), ids("n", "1"))


def test_a_step_that_takes_too_long_is_the_last(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    source = 'start: /[a-z]/ x\nx: x x | "" | "a" | x x x'
    matcher = compiled(grammars, "grammar", source).start(0)
    monkeypatch.setattr(grammar_module, "STEP_S", 0.02)
    exhaust(matcher, "b", "a")
    assert not matcher._matcher.is_error(), "the library would go on"


def test_only_so_many_may_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_module, "MAX_WAITING", 2)
    grammars = Grammars(TOKENIZER, {END}, SIZE)
    held = threading.Event()
    grammars._threads.submit(held.wait)
    waiting = [grammars.compile("grammar", f'start: "{word}"') for word in "ab"]
    with pytest.raises(Overloaded):
        grammars.compile("grammar", 'start: "c"')
    waiting.append(grammars.compile("grammar", 'start: "a"'))
    held.set()
    assert all(isinstance(future.result(60), Grammar) for future in waiting)
    compiled(grammars, "grammar", 'start: "c"')


def test_a_tokenizer_that_the_library_does_not_take_is_no_end_of_the_server() -> None:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    odd = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0, "b": 1}, unk_token="a")))
    found = Grammars(odd, {7}, 2).compile("grammar", 'start: "a"').result(60)
    assert isinstance(found, str)
    assert "tokenizer" in found
