"""A real service over HTTP whose model says what is written down: tokens of a played engine in, answers out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from app.api.app import create_app
from app.metrics import Metrics
from app.scheduler.plan import Row
from app.service import ModelCard, Service
from app.text.chat import ChatText
from app.text.detokenizer import Vocabulary
from app.text.dialect import PLAIN, Dialect
from app.text.grammar import Grammars
from tests.played import PlayedEngine, working
from tests.scripted import Options
from tests.spoken import SPOKEN, Control

NAMES = sorted({str(piece) for spoken in SPOKEN for piece in spoken.said if isinstance(piece, Control)})
TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}{% if tools %}#{% endif %}{{ ending }}"


def build_tokenizer(template: str = TEMPLATE) -> Any:
    """One token a byte, and every control token of the scripts."""
    vocab = {text: token for token, text in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(text, special=True, normalized=False) for text in ("<|eot|>", *NAMES)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=template)


TOKENIZER = build_tokenizer()
VOCABULARY = Vocabulary(TOKENIZER)
END = TOKENIZER.convert_tokens_to_ids("<|eot|>")
CARD = ModelCard(
    ids=("small",),
    path="small",
    created=0,
    n_ctx=512,
    most_tokens=2048,
    vocab_size=len(TOKENIZER),
    bytes_per_block=1,
    end_tokens=frozenset({END}),
    chat_template=TEMPLATE,
)


def tokens_of(said: Sequence[str]) -> list[int]:
    found: list[int] = []
    for piece in said:
        name = str(piece)
        is_control = isinstance(piece, Control)
        found += [TOKENIZER.convert_tokens_to_ids(name)] if is_control else TOKENIZER.backend_tokenizer.encode(name).ids
    return found


@asynccontextmanager
async def talking(
    said: Sequence[str], dialect: Dialect = PLAIN, template: str = TEMPLATE, **card: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server whose model always says ``said``, and then ends its turn, as far as it may: what a
    constraint leaves out ends the test. ``card`` are fields of its card."""
    script = tokens_of(said)

    def play(row: Row, index: int) -> int:
        token = script[index] if index < len(script) else END
        if row.constraint is not None:
            mask = row.constraint.mask(row.tokens)
            assert mask[token // 8] >> token % 8 & 1, f"{TOKENIZER.decode(script[:index])!r} may not go on so"
        return token

    async with working(PlayedEngine(play), num_blocks=256, block_size=8) as worker:
        service = Service(worker, lambda *_: None)
        text = ChatText(build_tokenizer(template), CARD.end_tokens)
        grammars = Grammars(TOKENIZER, CARD.end_tokens, CARD.vocab_size)
        service.open(replace(CARD, chat_template=template, **card), text, VOCABULARY, grammars, dialect)
        app = create_app(service, Options(max_body_bytes=10**6), Metrics(service, "0"))
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test/v1") as client:
            yield client
