"""Chat messages and plain text to token ids, and back."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

import tokenizers

from app.errors import InvalidRequest, StartError

# What a client may not choose: names that the template call gives a meaning of its own.
RESERVED_NAMES = frozenset(
    {
        "messages",
        "conversation",
        "chat_template",
        "tokenize",
        "sanitize_control_tokens",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
    }
)


class Tokenizer(Protocol):
    """What text needs of a model's tokenizer: mlx-lm's wrapper and transformers' fast tokenizers both have it."""

    @property
    def backend_tokenizer(self) -> tokenizers.Tokenizer: ...

    @property
    def chat_template(self) -> Any: ...

    def apply_chat_template(self, conversation: list[dict[str, Any]], **options: Any) -> Any: ...


def fast_tokenizer(tokenizer: Tokenizer) -> tokenizers.Tokenizer:
    """The Rust tokenizer inside, which is safe to share between threads as long as nobody changes its settings.

    Raises:
        StartError: it has none.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, tokenizers.Tokenizer):
        raise StartError(f"the model's tokenizer ({type(tokenizer).__name__}) has no tokenizer.json, which is needed")
    return backend


class ChatText:
    """Renders, encodes and decodes for one model.

    **Control-token text in a message is text.** Before rendering, a fence is put behind the first character of every
    control token that a message spells out. The fence is a word of digits that nobody can guess and no template filter
    changes; our copy of the tokenizer knows it as a token of its own, so it cuts the text there and the control
    token is not recognised; then it is taken out of the ids. What the template itself writes has no fences.
    (A control token of a single character could not be fenced; none is known.)

    Safe to call from any thread. Encoding takes as long as the tokenizer needs (seconds for a megabyte) but releases
    the GIL meanwhile: the service calls it in a thread. Truncation and padding that a tokenizer.json may ask for are
    turned off.
    """

    def __init__(self, tokenizer: Tokenizer, end_tokens: Iterable[int] = ()) -> None:
        """``end_tokens`` are fenced too, should the tokenizer not know them as special.

        Raises StartError if the tokenizer is not a fast one.
        """
        self._tokenizer = tokenizer
        self._encoder = tokenizers.Tokenizer.from_str(fast_tokenizer(tokenizer).to_str())
        self._encoder.no_truncation()
        self._encoder.no_padding()
        self._literal_encoder = tokenizers.Tokenizer.from_str(self._encoder.to_str())
        self._literal_encoder.encode_special_tokens = True
        # A character of a token stands for one character of text, or for one of its bytes.
        self._longest_token = max(map(len, self._encoder.get_vocab()))
        added = self._encoder.get_added_tokens_decoder()
        control = {token.content for token in added.values() if token.special and len(token.content) > 1}
        control.update(text for token in end_tokens if len(text := self._encoder.id_to_token(token) or "") > 1)
        self._longest = max(map(len, control), default=0)
        # Matches only the first character, so that control tokens which overlap are all found.
        firsts = (f"{re.escape(first)}(?={_pattern(rests)})" for first, rests in _by_first(control).items())
        self._control = re.compile("|".join(firsts) or r"(?!)")
        # Text that the template may continue into a control token. Beginnings that are words ("s" of "sop") are left
        # out: a fence inside "user" or "content" would break every template.
        self._beginnings = frozenset(
            text[:length] for text in control if not text[0].isalnum() for length in range(1, len(text))
        )
        self._fence = f"{secrets.randbelow(10**24):024d}"
        self._encoder.add_tokens([tokenizers.AddedToken(self._fence, special=True, normalized=False)])
        self._fence_id = self._encoder.token_to_id(self._fence)

    def encode(
        self, text: str, add_special: bool = True, parse_special: bool = True, window: int | None = None
    ) -> list[int]:
        """Ids of plain text.

        ``add_special`` adds what the tokenizer puts around a text, such as a BOS token. ``parse_special`` recognises
        control tokens by their names; without it they are text like any other. A text that cannot have fewer than
        ``window`` tokens is refused without encoding it.

        Raises:
            InvalidRequest: the text is no valid Unicode, or too long.
        """
        _check_unicode(text, "prompt")
        self.check_length(len(text), window, "prompt")
        encoder = self._encoder if parse_special else self._literal_encoder
        return encoder.encode(text, add_special_tokens=add_special).ids

    def encode_parts(self, parts: Sequence[str | int], window: int | None = None) -> list[int]:
        """Ids of a prompt that is part text, part ids. Only a text at its beginning gets what the tokenizer puts around
        one. Raises as ``encode``."""
        ids: list[int] = []
        for place, part in enumerate(parts):
            ids += [part] if isinstance(part, int) else self.encode(part, place == 0, window=window)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, control tokens by their names.

        Raises:
            InvalidRequest: an id is not in the vocabulary.
        """
        for token in ids:
            if not 0 <= token < 2**32 or token == self._fence_id or self._encoder.id_to_token(token) is None:
                raise InvalidRequest(f"Token {token} is not in the vocabulary.", "tokens")
        return self._encoder.decode(list(ids), skip_special_tokens=False)

    def render(self, messages: Sequence[dict[str, Any]], template: Mapping[str, Any]) -> str:
        """The prompt that the model's chat template makes of messages. ``template`` holds what else it is given: tools
        and options by name.

        Raises:
            InvalidRequest: there is no template, it refuses the messages, or a content part is no text.
        """
        return self._rendered(messages, template).replace(self._fence, "")

    def encode_chat(
        self, messages: Sequence[dict[str, Any]], template: Mapping[str, Any], window: int | None = None
    ) -> list[int]:
        """The ids of ``render``'s prompt. Only the template writes control tokens, BOS among them.

        Raises:
            InvalidRequest: as ``render``, and as ``encode`` for ``window``.
        """
        rendered = self._rendered(messages, template)
        self.check_length(len(rendered.replace(self._fence, "")), window, "messages")
        ids = self._encoder.encode(rendered, add_special_tokens=False).ids
        return [token for token in ids if token != self._fence_id]

    def check_length(self, num_chars: int, window: int | None, param: str) -> None:
        """Raises InvalidRequest where so many characters cannot have fewer than ``window`` tokens."""
        fewest = num_chars // self._longest_token
        if window is not None and fewest >= window:
            raise InvalidRequest(
                f"The prompt has at least {fewest} tokens, and the context window of a slot is {window} tokens.",
                param,
                "context_length_exceeded",
            )

    def _rendered(self, messages: Sequence[dict[str, Any]], template: Mapping[str, Any]) -> str:
        """The prompt with its fences."""
        if self._tokenizer.chat_template is None and not getattr(self._tokenizer, "has_chat_template", False):
            raise InvalidRequest("This model has no chat template; use /v1/completions.", "messages")
        if refused := RESERVED_NAMES.intersection(template):
            raise InvalidRequest(f"A template option may not be named {min(refused)}.", "chat_template_kwargs")
        try:
            fenced = self._fenced([self._prepared(message) for message in messages])
            options = {"add_generation_prompt": True, **self._fenced(dict(template))}
            return str(self._tokenizer.apply_chat_template(fenced, tokenize=False, **options))
        except InvalidRequest:
            raise
        except Exception as error:  # a template is a program: it may fail in any way on messages it was not made for
            reason = f"{error}".replace(self._fence, "") or type(error).__name__
            raise InvalidRequest(f"The model's chat template refused the messages: {reason}", "messages") from error

    def _prepared(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A copy of a message as templates expect it: content is one string, arguments of tool calls are data, and
        developers are the system where the template has not heard of them."""
        prepared = dict(message, content=_joined(message.get("content")))
        if calls := message.get("tool_calls"):
            prepared["tool_calls"] = [_with_parsed_arguments(call) for call in calls]
        if prepared.get("role") == "developer" and "developer" not in str(self._tokenizer.chat_template):
            prepared["role"] = "system"
        return prepared

    def _fenced(self, value: Any) -> Any:
        """A copy of JSON-like data in which no string spells a control token, nor begins one at its end."""
        if isinstance(value, str):
            _check_unicode(value, "messages")
            return self._fenced_end(self._fenced_inside(value))
        if isinstance(value, Mapping):
            return {self._fenced_inside(key): self._fenced(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self._fenced(item) for item in value]
        return value

    def _fenced_inside(self, text: str) -> str:
        return self._control.sub(rf"\g<0>{self._fence}", text)

    def _fenced_end(self, text: str) -> str:
        for length in range(min(self._longest - 1, len(text)), 0, -1):
            cut = len(text) - length + 1
            if text[cut - 1 :] in self._beginnings:
                text = text[:cut] + self._fence + text[cut:]
        return text


def _by_first(texts: Iterable[str]) -> dict[str, set[str]]:
    """What may follow each first character."""
    rests: dict[str, set[str]] = {}
    for text in texts:
        rests.setdefault(text[0], set()).add(text[1:])
    return rests


def _pattern(texts: set[str]) -> str:
    """A pattern for any of ``texts`` that shares their beginnings, so that a search never tries them one by one."""
    if "" in texts:
        return ""
    branches = [re.escape(first) + _pattern(rests) for first, rests in _by_first(texts).items()]
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def _check_unicode(text: str, param: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"The text is no valid Unicode: {error.reason} at {error.start}.", param) from error


def _joined(content: Any) -> str:
    """Null is no text, and parts are joined."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, (list, tuple)):
        raise InvalidRequest("The content of a message must be a string or a list of parts.", "messages")
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text":
            raise InvalidRequest(f"Content parts of type {kind} are not supported; only text is.", "messages")
        if not isinstance(part.get("text"), str):
            raise InvalidRequest("A content part of type text must have a text.", "messages")
        texts.append(part["text"])
    return "".join(texts)


def _with_parsed_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        return dict(call)
    if not isinstance(arguments, dict):
        return dict(call)
    return {**call, "function": {**function, "arguments": arguments}}
