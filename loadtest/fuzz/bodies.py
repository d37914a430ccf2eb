"""Request bodies: valid ones, and what becomes of them when a few places are broken."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from random import Random
from typing import Any

HI = [{"role": "user", "content": "Hi there"}]
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
CALL = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Paris"}'}}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"

# (route, body) that is answered with 200, more or less often the kind that makes the engine work.
VALID: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": HI, "max_tokens": 8}),
    (CHAT, {"messages": HI, "max_tokens": 8, "stream": True, "stream_options": {"include_usage": True}}),
    (CHAT, {"messages": HI, "max_tokens": 4, "n": 2, "logprobs": True, "top_logprobs": 3, "seed": 7}),
    (CHAT, {"messages": HI, "max_completion_tokens": 6, "tools": [TOOL], "tool_choice": "auto", "stream": True}),
    (CHAT, {"messages": [{"role": "system", "content": [{"type": "text", "text": "Be brief"}]}, *HI], "max_tokens": 3}),
    (
        CHAT,
        {
            "messages": [
                *HI,
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "tool_call_id": "1", "content": "rain"},
            ],
            "max_tokens": 5,
        },
    ),
    (CHAT, {"messages": HI, "max_tokens": 5, "chat_template_kwargs": {"a": [1, {"b": None}]}, "priority": 3}),
    (TEXT, {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0, "stop": ["zebra", "\n\n"]}),
    (TEXT, {"prompt": ["a b c", "1 2 3"], "max_tokens": 4, "echo": True, "stream": True}),
    (TEXT, {"prompt": [[1, 2, 3], [40, 50]], "max_tokens": 3, "logprobs": 2, "n": 2}),
    (TEXT, {"prompt": "x " * 80, "max_tokens": 2, "cache_salt": "s", "top_k": 5, "top_p": 0.9, "min_p": 0.1}),
    (TEXT, {"prompt": "y", "max_tokens": 40, "ignore_eos": True, "logit_bias": {"5": 3, "100": -100}, "stream": True}),
    (TEXT, {"prompt": "z", "max_tokens": 6, "repetition_penalty": 1.2, "presence_penalty": 1, "frequency_penalty": -1}),
    ("/completion", {"prompt": ["Once", 5], "n_predict": 6, "stream": True, "n_probs": 2, "samplers": ["top_k"]}),
    ("/completion", {"prompt": "Once", "n_predict": 4, "n_cmpl": 2, "logit_bias": [[5, 1.5], ["a", False]]}),
    ("/v1/responses", {"input": "Hi", "max_output_tokens": 6, "stream": True}),
    (
        "/v1/responses",
        {
            "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
            "instructions": "Be brief",
            "max_output_tokens": 4,
            "tools": [{"type": "function", **TOOL["function"]}],
        },
    ),
    ("/v1/messages", {"messages": HI, "max_tokens": 6, "stream": True, "stop_sequences": ["zebra"]}),
    ("/v1/messages", {"messages": HI, "max_tokens": 4, "system": [{"type": "text", "text": "Be brief"}]}),
    ("/v1/messages/count_tokens", {"messages": HI}),
    ("/tokenize", {"content": "Hello <|im_end|> world", "add_special": True, "with_pieces": True}),
    ("/detokenize", {"tokens": [1, 2, 3, 49000]}),
    ("/apply-template", {"messages": HI, "tools": [TOOL]}),
]
# Each new schema costs the server a process of its own, so they are rare.
SHAPED: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"messages": HI, "max_tokens": 12, "response_format": {"type": "json_object"}}),
    (
        CHAT,
        {
            "messages": HI,
            "max_tokens": 12,
            "response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}},
        },
    ),
    (TEXT, {"prompt": "a", "max_tokens": 12, "json_schema": SCHEMA, "stream": True}),
    (TEXT, {"prompt": "a", "max_tokens": 12, "grammar": 'root ::= "yes" | "no"'}),
]


class Literal(str):
    """Goes into JSON as it is."""


class Pairs(list[tuple[str, Any]]):
    """An object that may have a member twice."""


EXTREMES: list[Any] = [
    None, True, False, 0, 1, -1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, 2**64, -(2**63), -(2**63) - 1,
    10**30, 0.1, -0.0, 1.0, 5e-324, 1e308, Literal("1e999"), Literal("-1e999"), Literal("NaN"), Literal("Infinity"),
    Literal("1" * 5000), Literal("1." + "0" * 5000), Literal("01"), Literal("0x10"), Literal("1e-99999"),
    "", "a", "0", "true", "null", "\x00", "\x7f", "\ufeff", "\u2028", "\U0010ffff", "\ud83d", "\udc00a", "e\u0301" * 50,
    "<|im_end|>", "<|im_start|>system\n", "<tool_call>", "{{ 7*7 }}", "{% for x in range(10**9) %}", "../" * 20, "%00",
    "a" * 20_000, "\n" * 3000, "\U0001f431" * 3000, [], {}, [[]], [None], [{}], {"": None}, {"a": {"b": [1]}},
    Literal(json.dumps([1] * 5000)), ["a"] * 300, Literal(json.dumps({i: i for i in range(1200)})),
    {"type": "text"}, {"$ref": "#"}, {"role": "user"},
]  # fmt: skip


def written(value: Any, escapes: bool = True) -> str:
    """JSON, with Literals as they are; lone surrogates are always escaped."""
    if isinstance(value, Literal):
        return str(value)
    if isinstance(value, Pairs | dict):
        pairs = value.items() if isinstance(value, dict) else value
        return "{" + ",".join(f"{written(str(name), escapes)}:{written(item, escapes)}" for name, item in pairs) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(written(item, escapes) for item in value) + "]"
    if isinstance(value, str):
        has_surrogate = any("\ud800" <= char <= "\udfff" for char in value)
        return json.dumps(value, ensure_ascii=escapes or has_surrogate)
    return json.dumps(value)


def chosen(rng: Random) -> tuple[str, dict[str, Any]]:
    """A valid body and its route. Seeds and prompts vary."""
    route, body = rng.choice(SHAPED if rng.random() < 0.02 else VALID)
    body = json.loads(json.dumps(body))
    if rng.random() < 0.3 and "prompt" in body:
        body["prompt"] = "".join(rng.choices(string.printable, k=rng.randrange(1, 400)))
    return route, body


def broken(rng: Random, body: dict[str, Any]) -> bytes:
    """``body`` with one to three places changed, and sometimes a few of its bytes."""
    value: Any = body
    for _ in range(rng.randint(1, 3)):
        value = _changed(rng, value)
    data = written(value, escapes=rng.random() < 0.5).encode()
    return _torn(rng, data) if rng.random() < 0.2 else data


def nested(rng: Random, body: dict[str, Any]) -> bytes:
    """``body`` with a member that is nested deeply, closed or not."""
    depth = rng.choice([50, 500, 1000, 1023, 1024, 1025, 5000, 100_000])
    opening, closing = rng.choice([("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
    inner = opening * depth + "1" + (closing * depth if rng.random() < 0.8 else "")
    names = [*body, "tools", "chat_template_kwargs", "json_schema", "metadata", "unknown", "logit_bias"]
    return written({**body, rng.choice(names): Literal(inner)}).encode()


def _changed(rng: Random, value: Any) -> Any:
    """One place deeper with each step, and then a change there."""
    if isinstance(value, Pairs):
        return value
    if isinstance(value, dict) and value and rng.random() < 0.8:
        name = rng.choice(list(value))
        return _member_changed(rng, value, name)
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], _changed(rng, value[at]), *value[at + 1 :]]
    return rng.choice(EXTREMES)


def _member_changed(rng: Random, value: dict[str, Any], name: str) -> Any:
    item = value[name]
    extreme = rng.choice(EXTREMES)
    changes: list[Callable[[], Any]] = [
        lambda: {**value, name: extreme},
        lambda: {**value, name: extreme},
        lambda: {**value, name: _changed(rng, item)},
        lambda: {**value, name: _changed(rng, item)},
        lambda: {**value, name: [item]},
        lambda: {**value, name: item * 3 if isinstance(item, str | list) else extreme},
        lambda: {other: one for other, one in value.items() if other != name},
        lambda: Pairs([*value.items(), (name, extreme)]),
        lambda: {**value, rng.choice(["unknown", "", "\x00", "a" * 5000, "é", *FIELDS]): extreme},
        lambda: {**value, name.upper(): item},
    ]
    return rng.choice(changes)()


def _torn(rng: Random, data: bytes) -> bytes:
    torn = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(torn) + 1)
        match rng.randrange(4):
            case 0:
                torn[at:at] = rng.randbytes(rng.randint(1, 4))
            case 1:
                del torn[at : at + rng.randint(1, 8)]
            case 2:
                torn[at:] = b""
            case _:
                torn[at : at + 1] = rng.randbytes(1)
    return bytes(torn)


FIELDS = (
    "model", "n", "stop", "seed", "temperature", "top_p", "top_k", "min_p", "logit_bias", "logprobs", "top_logprobs",
    "max_tokens", "stream", "stream_options", "tools", "tool_choice", "prompt", "messages", "echo", "best_of",
    "priority", "cache_salt", "reasoning_effort", "chat_template_kwargs", "user", "suffix", "functions",
    "response_format",
)  # fmt: skip
