"""Text of tokens: what comes out piece by piece is what the tokenizer would have said of the whole."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from app.errors import StartError
from app.text.detokenizer import Detokenizer, Vocabulary


def byte_level() -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: token for token, text in enumerate([*alphabet, "Ġt", "he", "Ġthe"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("Ġ", "t"), ("h", "e"), ("Ġt", "he")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken("<end>", special=True), AddedToken("café au lait", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_fallback(strip: bool = True) -> Any:
    words = [
        "<unk>",
        "<end>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "▁",
        "t",
        "h",
        "e",
        "▁t",
        "he",
        "▁the",
        "日",
    ]
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he")]
    vocab = {text: token for token, text in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps: list[Any] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)
    tokenizer.add_tokens([AddedToken("<unk>", special=True), AddedToken("<end>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture(scope="module")
def smollm2(model_dir: Path) -> Any:
    return AutoTokenizer.from_pretrained(model_dir)


@pytest.fixture(scope="module")
def tokenizers_by_name(smollm2: Any) -> dict[str, Any]:
    return {
        "smollm2": smollm2,
        "byte level": byte_level(),
        "byte fallback": byte_fallback(),
        "byte fallback, unstripped": byte_fallback(strip=False),
    }


NAMES = ("smollm2", "byte level", "byte fallback", "byte fallback, unstripped")
anything = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], deadline=None)


def streamed(tokenizer: Any, ids: list[int], continues: bool = False) -> str:
    detokenizer = Detokenizer(Vocabulary(tokenizer), continues)
    return "".join(detokenizer.add(token) for token in ids) + detokenizer.flush()


@pytest.mark.parametrize("name", NAMES)
@anything
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_text_comes_back_as_the_tokenizer_decodes_it(tokenizers_by_name: dict[str, Any], name: str, text: str) -> None:
    tokenizer = tokenizers_by_name[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert streamed(tokenizer, ids) == tokenizer.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


@pytest.mark.parametrize("name", ["smollm2", "byte level"])
@anything
@given(data=st.data())
def test_random_ids_as_the_tokenizer_decodes_them(tokenizers_by_name: dict[str, Any], name: str, data: Any) -> None:
    tokenizer = tokenizers_by_name[name]
    control = set(tokenizer.all_special_ids) | set(tokenizer.added_tokens_decoder)
    plain = st.integers(0, len(tokenizer) + 5).filter(lambda token: token not in control)
    ids = data.draw(st.lists(plain, max_size=30))
    assert streamed(tokenizer, ids) == tokenizer.decode(ids, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("name", NAMES)
@anything
@given(data=st.data())
def test_random_ids_are_the_text_of_their_bytes(tokenizers_by_name: dict[str, Any], name: str, data: Any) -> None:
    tokenizer = tokenizers_by_name[name]
    vocabulary = Vocabulary(tokenizer)
    ids = data.draw(st.lists(st.integers(0, len(tokenizer) + 5), max_size=30))
    runs, detokenizer, shown = [b""], Detokenizer(vocabulary, continues=True), ""
    for token in ids:
        shown += detokenizer.add(token)
        if vocabulary.is_control(token):
            runs.append(b"")
        else:
            runs[-1] += vocabulary.data(token)
    expected = "".join(run.decode("utf-8", "replace") for run in runs)
    assert expected.startswith(shown)
    assert len(expected) - len(shown) <= 3, "more held back than one unfinished character"
    assert shown + detokenizer.flush() == expected


def test_unfinished_character_is_held_back_and_never_lost(smollm2: Any) -> None:
    vocabulary = Vocabulary(smollm2)
    ids = smollm2.encode("é漢", add_special_tokens=False)
    detokenizer = Detokenizer(vocabulary)
    parts = [detokenizer.add(token) for token in ids[:-1]]
    assert "�" not in "".join(parts)
    assert detokenizer.flush() == "�"
    assert detokenizer.flush() == ""
    assert b"".join(vocabulary.data(token) for token in ids).decode() == "é漢"


def test_control_token_ends_an_unfinished_character() -> None:
    tokenizer = byte_level()
    start, end = tokenizer.convert_tokens_to_ids(["æ", "<end>"])  # the byte E6 alone
    detokenizer = Detokenizer(Vocabulary(tokenizer))
    assert [detokenizer.add(token) for token in (start, end, end)] == ["", "�", ""]


def test_replacement_comes_as_soon_as_bytes_are_hopeless() -> None:
    tokenizer = byte_level()
    start, letter = tokenizer.convert_tokens_to_ids(["æ", "t"])
    detokenizer = Detokenizer(Vocabulary(tokenizer))
    assert [detokenizer.add(token) for token in (start, letter)] == ["", "�t"]


def test_ids_beyond_the_vocabulary_are_empty(smollm2: Any) -> None:
    vocabulary = Vocabulary(smollm2)
    assert vocabulary.data(len(smollm2) + 100) == b""
    assert vocabulary.data(2) == b"<|im_end|>"
    assert vocabulary.is_control(2)
    assert streamed(smollm2, [2, len(smollm2)]) == ""


def test_added_token_of_plain_text_is_kept_as_it_is() -> None:
    tokenizer = byte_level()
    token = tokenizer.convert_tokens_to_ids("café au lait")
    assert streamed(tokenizer, [token]) == "café au lait" == tokenizer.decode([token])


def test_leading_space_belongs_to_a_text_that_continues() -> None:
    tokenizer = byte_fallback()
    ids = tokenizer.convert_tokens_to_ids(["▁the", "▁the"])
    assert streamed(tokenizer, ids) == "the the"
    assert streamed(tokenizer, ids, continues=True) == " the the"


def test_other_decoders_are_refused_by_name() -> None:
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.decoder = decoders.WordPiece()
    with pytest.raises(StartError, match="WordPiece"):
        Vocabulary(tokenizer)


def test_cost_is_linear() -> None:
    """An endless run of bytes that are no character: the case in which decoding anew each time costs the square."""
    tokenizer = byte_level()
    vocabulary = Vocabulary(tokenizer)
    (byte,) = tokenizer.convert_tokens_to_ids(["æ"])
    detokenizer = Detokenizer(vocabulary)
    started = time.perf_counter()
    num_characters = sum(len(detokenizer.add(byte)) for _ in range(100_000))
    assert num_characters == 99_999
    assert time.perf_counter() - started < 5.0
