"""Single fields: what is refused, what has no effect, and the checks that are more than a type and a range."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from app.errors import InvalidRequest

NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})

# Accepted without effect, and why: most steer a hosted service, not an answer.
INERT = {
    "user": "names a person to a hosted service",
    "metadata": "goes with answers that a hosted service stores",
    "service_tier": "there is one tier",
    "safety_identifier": "names a person to a hosted service",
    "prompt_cache_key": "equal prefixes are found by their tokens; `cache_salt` keeps them apart",
    "prompt_cache_options": "prefixes are kept in blocks, wherever they end",
    "prompt_cache_retention": "the operator sets it: `MLXCEL_PROMPT_CACHE_TTL`",
}

# Responses honour metadata, and have one more.
INERT_IN_RESPONSES = {name: why for name, why in INERT.items() if name != "metadata"} | {
    "max_tool_calls": "counts calls of built-in tools, and there are none"
}

# Fields of the public API that this server does not honour, with the values that ask for nothing. Others are refused.
NEUTRAL: dict[str, dict[str, tuple[Any, ...]]] = {
    "chat": {
        "store": (False,),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "moderation": (),
        "prediction": (),
        "web_search_options": (),
        "verbosity": ("medium",),
    },
    "completion": {
        "suffix": ("",),
    },
    "response": {
        # Fields of chat that have another name here, or none.
        "messages": (),
        "max_tokens": (),
        "max_completion_tokens": (),
        "response_format": (),
        "reasoning_effort": (),
        "logprobs": (False,),
        "n": (1,),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "access_programs": (),
        "background": (False,),
        "background_options": (),
        "context_management": ([],),
        "conversation": (),
        "image": (),
        "moderation": (),
        "prompt": (),
        "truncation": ("disabled",),
    },
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What the loaded model allows. Token ids run from 0 to ``vocab_size`` - 1."""

    vocab_size: int

    def bias(self, given: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
        """Turn the string ids of a ``logit_bias`` into numbers.

        Raises:
            InvalidRequest: a key is no token id; the text names it.
        """
        return tuple((self._bias_id(key), value) for key, value in given.items())

    def check_ids(self, ids: list[int], param: str) -> None:
        """Raises InvalidRequest for the first id outside the vocabulary."""
        for token in ids:
            if not 0 <= token < self.vocab_size:
                raise InvalidRequest(f"{param}: token id {token} is not in the vocabulary of {self.vocab_size}", param)

    def _bias_id(self, key: str) -> int:
        if key.isascii() and key.isdigit() and len(key) <= 20 and int(key) < self.vocab_size:
            return int(key)
        shown = key[:32]
        raise InvalidRequest(f"logit_bias: {shown!r} is not a token id below {self.vocab_size}", "logit_bias")


def check_messages(value: Any) -> list[dict[str, Any]]:
    """Check a conversation and drop its null members; content that may be null becomes the empty string.

    Raises:
        InvalidRequest: naming the place, as in ``messages[2].content``.
    """
    if not isinstance(value, list):
        raise InvalidRequest("messages: must be a list", "messages")
    if not value:
        raise InvalidRequest("messages: must not be empty", "messages")
    return [_message(item, f"messages[{index}]") for index, item in enumerate(value)]


def check_tools(value: Any) -> list[dict[str, Any]]:
    """Check the functions that a model may call, and drop their null members.

    Raises:
        InvalidRequest: naming the place, as in ``tools[2].function.name``.
    """
    if not isinstance(value, list):
        raise InvalidRequest("tools: must be a list", "tools")
    return [_tool(item, f"tools[{index}]") for index, item in enumerate(value)]


def check_function(function: Mapping[str, Any], where: str) -> None:
    """Check how a function is called and described, in whichever API. Raises InvalidRequest, naming the place."""
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise InvalidRequest(f"{where}.name: must be 1 to 128 letters, digits, and any of _ . -", f"{where}.name")
    if not isinstance(function.get("description", ""), str):
        raise InvalidRequest(f"{where}.description: must be a string", f"{where}.description")


def check_prompts(value: Any) -> list[str | list[int]]:
    """A prompt is text or token ids; a list of either is a list of prompts. The result always is such a list.

    Raises:
        InvalidRequest: neither shape, or an empty list.
    """
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return list(value)
        if _are_ids(value):
            return [value]
        if all(isinstance(item, list) and item and _are_ids(item) for item in value):
            return list(value)
    raise InvalidRequest("prompt: must be a string, a list of strings, token ids, or a list of lists of them", "prompt")


def _are_ids(items: list[Any]) -> bool:
    return all(type(item) is int for item in items)


def _tool(item: Any, where: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise InvalidRequest(f"{where}: must be an object", where)
    if item.get("type") != "function":
        raise InvalidRequest(f"{where}.type: only function tools are supported", f"{where}.type")
    at = f"{where}.function"
    if not isinstance(item.get("function"), dict):
        raise InvalidRequest(f"{at}: must be an object", at)
    function = {name: value for name, value in item["function"].items() if value is not None}
    check_function(function, at)
    if not isinstance(function.get("parameters", {}), dict):
        raise InvalidRequest(f"{at}.parameters: must be an object", f"{at}.parameters")
    return {**item, "function": function}


def _message(item: Any, where: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise InvalidRequest(f"{where}: must be an object", where)
    message = {name: value for name, value in item.items() if value is not None}
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise InvalidRequest(f"{where}.role: must be one of {', '.join(sorted(ROLES))}", f"{where}.role")
    for name in ("name", "tool_call_id"):
        if not isinstance(message.get(name, ""), str):
            raise InvalidRequest(f"{where}.{name}: must be a string", f"{where}.{name}")
    calls = message.get("tool_calls", [])
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise InvalidRequest(f"{where}.tool_calls: must be a list of objects", f"{where}.tool_calls")
    if "content" not in message:
        if role != "assistant" or not (calls or "function_call" in message):
            raise InvalidRequest(f"{where}.content: is required", f"{where}.content")
        # A template that joins strings would fail on None, or spell it out in the prompt.
        return {**message, "content": ""}
    _check_content(message["content"], f"{where}.content")
    return message


def _check_content(content: Any, where: str) -> None:
    if isinstance(content, str):
        return
    if not isinstance(content, list):
        raise InvalidRequest(f"{where}: must be a string or a list of parts", where)
    for index, part in enumerate(content):
        at = f"{where}[{index}]"
        if not isinstance(part, dict):
            raise InvalidRequest(f"{at}: must be an object", at)
        if part.get("type") != "text":
            raise InvalidRequest(f"{at}.type: only text parts are supported", f"{at}.type")
        if not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{at}.text: must be a string", f"{at}.text")
