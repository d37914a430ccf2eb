"""Text out of token ids, one token at a time: linear in their number, and never a part of a character."""

from __future__ import annotations

import codecs
import json
import re
from typing import Any

from app.errors import StartError
from app.text.chat import Tokenizer, fast_tokenizer

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_characters() -> dict[int, int]:
    """The alphabet of byte-level vocabularies as a table for ``str.translate``: each of their characters to its byte.

    Printable Latin-1 stands for itself; the other bytes, in order, are the characters from U+0100 on. Characters below
    that which are not in the alphabet go to one above, so that they do not pass for bytes.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(0x100)) - set(printable))
    table = dict.fromkeys(others, 0xFFFF)
    table.update({0x100 + i: byte for i, byte in enumerate(others)})
    return table


BYTE_CHARACTERS = _byte_characters()


class Vocabulary:
    """The raw bytes of every token, as the tokenizer's own decoder would make them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises StartError if the tokenizer is not a fast one, or its decoder is of a kind not known here."""
        self._tokenizer = fast_tokenizer(tokenizer)
        added = self._tokenizer.get_added_tokens_decoder()
        self.control_tokens = frozenset(token for token, one in added.items() if one.special)
        self.added = {one.content: token for token, one in added.items()}  # beside what it was trained to
        state = self._tokenizer.decoder.__getstate__() if self._tokenizer.decoder else '{"type": "nothing"}'
        decoder = json.loads(state)
        steps: list[dict[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        names = [step["type"] for step in steps]
        self._space = ""
        self.leading_spaces = 0
        if names == ["ByteLevel"]:
            return
        if names not in (["Replace", "ByteFallback", "Fuse"], ["Replace", "ByteFallback", "Fuse", "Strip"]):
            raise StartError(f"the model's tokenizer decodes by {' + '.join(names)}, which is not supported")
        self._space = steps[0]["pattern"]["String"]
        if len(steps) == 4:
            self.leading_spaces = steps[3]["start"]

    def is_control(self, token: int) -> bool:
        """Whether the token steers the model and stands for no text."""
        return token in self.control_tokens

    def name(self, token: int) -> str:
        """How a control token is written."""
        return self._tokenizer.id_to_token(token) or ""

    def data(self, token: int) -> bytes:
        """The bytes of a token, which may be only a part of a character; of a control token, its name.

        Empty for ids beyond the vocabulary: models pad their embedding.
        """
        text = self._tokenizer.id_to_token(token)
        if text is None:
            return b""
        if self._space:
            byte = BYTE_TOKEN.fullmatch(text)
            return bytes([int(byte[1], 16)]) if byte else text.replace(self._space, " ").encode()
        try:
            return text.translate(BYTE_CHARACTERS).encode("latin-1")
        except UnicodeEncodeError:  # an added token, kept as plain text
            return text.encode()


class Detokenizer:
    """The text of one answer. What it gives out, joined, is the UTF-8 text of the tokens' bytes, where bytes that are
    no character become U+FFFD.

    Vocabularies of the SentencePiece kind mark word beginnings with a space, and their decoders drop the one before the
    first word. So does this, unless the answer ``continues`` a text, where that space belongs between the two.
    """

    def __init__(self, vocabulary: Vocabulary, continues: bool = False) -> None:
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._leading_spaces = 0 if continues else vocabulary.leading_spaces

    def add(self, token: int) -> str:
        """The text that is certain now. Only the bytes of an unfinished character are held back.

        A control token has no text and ends the character before it, finished or not.
        """
        if self._vocabulary.is_control(token):
            return self.flush()
        return self._stripped(self._decoder.decode(self._vocabulary.data(token)))

    def flush(self) -> str:
        """What is held back, as U+FFFD."""
        return self._stripped(self._decoder.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        while self._leading_spaces and text:
            if text.startswith(" "):
                text = text[1:]
                self._leading_spaces -= 1
            else:
                self._leading_spaces = 0
        return text
