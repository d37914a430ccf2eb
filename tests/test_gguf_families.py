"""Each family that GGUF brings, written as llama.cpp's converter writes it, against the model it was made from; and
vocabularies of SentencePiece and of Qwen against the libraries they come from."""

from __future__ import annotations

import importlib
import io
import json
import random
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx_lm
import pytest
import sentencepiece
from mlx.utils import tree_flatten, tree_map
from mlx_lm.tokenizer_utils import load as load_tokenizer
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from app.engine.gguf import import_gguf
from tests.test_gguf import ODD_TEXTS, letters, silent

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 4, 2, 16
# From mlx-lm's names to GGUF's, as llama.cpp's gguf-py has them.
NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def reference(family: str, vocab_size: int, tied: bool) -> Any:
    module = importlib.import_module(f"mlx_lm.models.{family}")
    config = {
        "model_type": family,
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": 1e-5,
        "rope_theta": 20000.0,
        "rope_traditional": family == "llama",
        "max_position_embeddings": 64,
        "vocab_size": vocab_size,
        "tie_word_embeddings": tied,
    }
    mx.random.seed(3)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.update(tree_map(lambda p: p + 0.2 * mx.random.normal(p.shape), model.parameters()))
    mx.eval(model.parameters())
    return model


def written_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{NAMES[part]}.{kind}"
    return f"{NAMES[stem]}.{kind}"


def write(path: Path, family: str, model: Any, vocabulary: dict[str, Any]) -> Path:
    weights = {written_name(name): array for name, array in tree_flatten(model.parameters())}
    if family == "gemma":
        weights = {name: array + 1 if "norm" in name else array for name, array in weights.items()}
    numbers = {
        "embedding_length": HIDDEN,
        "feed_forward_length": INNER,
        "block_count": 2,
        "attention.head_count": HEADS,
        "attention.head_count_kv": KV_HEADS,
        "attention.key_length": HEAD_DIM,
        "context_length": 64,
    }
    metadata = {
        "general.architecture": family,
        f"{family}.attention.layer_norm_rms_epsilon": mx.array(1e-5),
        f"{family}.rope.freq_base": mx.array(20000.0),
        **{f"{family}.{key}": mx.array(number, mx.uint32) for key, number in numbers.items()},
        **{f"tokenizer.ggml.{key}": value for key, value in vocabulary.items()},
    }
    mx.save_gguf(str(path), weights, metadata)
    return path


def byte_vocabulary() -> dict[str, Any]:
    tokens = ["<s>", "</s>", *letters(), "ab", "abc"]
    return {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": tokens,
        "token_type": mx.array([3, 3] + [1] * (len(tokens) - 2), mx.int32),
        "merges": ["a b", "ab c"],
        "bos_token_id": mx.array(0, mx.uint32),
        "eos_token_id": mx.array(1, mx.uint32),
    }


@pytest.mark.parametrize(
    ("family", "tied"),  # gemma has no output head of its own
    [*((family, tied) for family in ("llama", "qwen2", "qwen3") for tied in (True, False)), ("gemma", True)],
)
def test_logits_are_those_of_the_model_it_was_made_from(family: str, tied: bool, tmp_path: Path) -> None:
    vocabulary = byte_vocabulary()
    model = reference(family, len(vocabulary["tokens"]), tied)
    import_gguf(write(tmp_path / "tiny.gguf", family, model, vocabulary), tmp_path / "out", silent)
    imported, tokenizer = mlx_lm.load(str(tmp_path / "out"))
    assert imported.args.model_type == family
    assert tokenizer.eos_token_ids == {1}
    tokens = mx.array([[(5 * i + 2) % len(vocabulary["tokens"]) for i in range(20)]])
    want = model(tokens)
    assert mx.allclose(imported(tokens), want, rtol=0, atol=1e-5 * mx.abs(want).max().item())


def test_qwen_cuts_words_as_its_own_tokenizer_does(tmp_path: Path) -> None:
    import_gguf(
        write(tmp_path / "t.gguf", "qwen2", reference("qwen2", 260, True), byte_vocabulary()), tmp_path / "out", silent
    )
    words = load_tokenizer(tmp_path / "out").backend_tokenizer.pre_tokenizer.pre_tokenize_str("WE'LL pay 123!\n\n  now")
    assert [word for word, _ in words] == ["WE", "'LL", "Ġpay", "Ġ", "1", "2", "3", "!ĊĊ", "Ġ", "Ġnow"]


def sentences() -> list[str]:
    source = random.Random(1)
    words = ["river", "stone", "windows", "gardens", "über", "naïve", "12", "345", "e-mail", "don't", "x=1;", "日本"]
    return [" ".join(source.choices(words, k=12)) for _ in range(400)]


@pytest.mark.parametrize("prefix", [True, False])
def test_a_sentencepiece_vocabulary_gives_the_librarys_own_tokens(prefix: bool, tmp_path: Path) -> None:
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences()),
        model_writer=made,
        model_type="bpe",
        vocab_size=370,
        byte_fallback=True,
        add_dummy_prefix=prefix,
        remove_extra_whitespaces=False,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    library = sentencepiece.SentencePieceProcessor(model_proto=made.getvalue())
    ids = range(library.vocab_size())
    types = [
        2 if library.is_unknown(i) else 3 if library.is_control(i) else 6 if library.is_byte(i) else 1 for i in ids
    ]
    vocabulary = {
        "model": "llama",
        "tokens": [library.id_to_piece(i) for i in ids],
        "scores": mx.array([library.get_score(i) for i in ids]),
        "token_type": mx.array(types, mx.int32),
        "unknown_token_id": mx.array(library.unk_id(), mx.uint32),
        "bos_token_id": mx.array(library.bos_id(), mx.uint32),
        "eos_token_id": mx.array(library.eos_id(), mx.uint32),
        "add_space_prefix": mx.array(prefix),
    }
    model = reference("gemma", library.vocab_size(), True)
    import_gguf(write(tmp_path / "t.gguf", "gemma", model, vocabulary), tmp_path / "out", silent)
    tokenizer = load_tokenizer(tmp_path / "out")
    for text in [*sentences()[:50], *ODD_TEXTS]:
        if "\x00" in text:
            continue  # the library ends there
        got = tokenizer.encode(text, add_special_tokens=False)
        assert got == library.encode(text), text
        assert tokenizer.decode(got) == text
    assert tokenizer.encode("river")[0] == library.bos_id()


def test_a_qwen_vocabulary_gives_the_tokens_of_its_own_tokenizer(tmp_path: Path) -> None:
    own = Tokenizer(models.BPE())
    own.normalizer = normalizers.NFC()
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    own.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=letters(), show_progress=False)
    own.train_from_iterator(sentences(), trainer)
    document = json.loads(own.to_str())["model"]
    ids = {token: text for text, token in document["vocab"].items()}
    merges = [" ".join(merge) if isinstance(merge, list) else merge for merge in document["merges"]]
    vocabulary = byte_vocabulary() | {
        "tokens": [ids[i] for i in range(len(ids))],
        "token_type": mx.array([1] * len(ids), mx.int32),
        "merges": merges,
    }
    model = reference("qwen2", len(ids), True)
    import_gguf(write(tmp_path / "t.gguf", "qwen2", model, vocabulary), tmp_path / "out", silent)
    tokenizer = load_tokenizer(tmp_path / "out")
    for text in [*sentences()[:50], *ODD_TEXTS]:
        assert tokenizer.encode(text, add_special_tokens=False) == own.encode(text).ids, text
