"""The tokenizer in a GGUF file, with the ids of the file: byte-level BPE, or SentencePiece's BPE."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from app.engine.gguf_family import Metadata
from app.errors import StartError

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # of tokenizer.ggml.token_type
SPACE = "▁"

# Control tokens that end an answer, whichever of them the file names as its end token.
END_TOKENS = frozenset(
    {"<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>", "<eos>"}
)

# How text is cut into words before merging; GGUF gives only a name, the models' own tokenizer.json these.
LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2_WORDS = LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}")


def tokenizer_of(metadata: Metadata) -> str:
    """The text of tokenizer.json.

    Raises:
        StartError: the vocabulary is of a kind that is not supported, or no tokenizer can be made of it.
    """
    kind = metadata["tokenizer.ggml.model"]
    if kind not in KINDS:
        raise StartError(f"{metadata.path} has a vocabulary of kind {kind}; only {', '.join(KINDS)} can be imported")
    try:
        return _with_special_tokens(KINDS[kind](metadata), metadata).to_str(pretty=True)
    except StartError:
        raise
    except Exception as error:  # the library has no other
        raise StartError(f"{metadata.path} has a vocabulary of which no tokenizer can be made: {error}") from error


def tokenizer_config(metadata: Metadata, window: int) -> dict[str, Any]:
    """What tokenizer_config.json holds; ``window`` in tokens."""
    tokens = metadata["tokenizer.ggml.tokens"]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": window,
    }
    for field, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token is not None and token < len(tokens):
            config[f"{field}_token"] = tokens[token]
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config


def end_tokens(metadata: Metadata) -> list[int]:
    """The ids of the tokens that end an answer."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    by_text = [token for token, text in enumerate(tokens) if types[token] == CONTROL and text in END_TOKENS]
    return list(dict.fromkeys([*(token for token in named if token is not None), *by_text]))


def _byte_level(metadata: Metadata) -> Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    words = metadata["tokenizer.ggml.pre"]
    whole_words_first = words == "llama-bpe"  # Llama 3 takes a word that is a token as it is, merges or not
    tokenizer = Tokenizer(models.BPE(vocab=_ids(metadata), merges=merges, ignore_merges=whole_words_first))
    if words == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _pre_tokenizer(metadata.path, words)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _pre_tokenizer(path: Path, name: str) -> pre_tokenizers.PreTokenizer:
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "gpt-2":
        return words
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    if name in ("llama-bpe", "qwen2"):
        pattern = LLAMA3_WORDS if name == "llama-bpe" else QWEN2_WORDS
        split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    raise StartError(f"{path} has the pre-tokenizer {name}; only smollm, gpt-2, llama-bpe and qwen2 can be imported")


def _sentencepiece(metadata: Metadata) -> Tokenizer:
    """SentencePiece joins the two neighbours whose joint piece has the highest score. So every way to make a piece of
    two others is a merge, in the order of the pieces' scores."""
    tokens, types, scores = (metadata[f"tokenizer.ggml.{name}"] for name in ("tokens", "token_type", "scores"))
    known = _ids(metadata)
    joined = [
        (-score, text[:cut], text[cut:])
        for text, kind, score in zip(tokens, types, scores, strict=True)
        if kind in (NORMAL, USER_DEFINED)
        for cut in range(1, len(text))
        if text[:cut] in known and text[cut:] in known
    ]
    joined.sort(key=lambda merge: merge[0])
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    merges = [(left, right) for _, left, right in joined]
    tokenizer = Tokenizer(models.BPE(vocab=known, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = [normalizers.Prepend(SPACE)] if has_prefix else []
    tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if has_prefix else []
    parts = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def _with_special_tokens(tokenizer: Tokenizer, metadata: Metadata) -> Tokenizer:
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    marked = [(text, kind) for text, kind in zip(tokens, types, strict=True) if kind in (CONTROL, USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(text, special=kind == CONTROL, normalized=False) for text, kind in marked])
    has_bos = metadata["tokenizer.ggml.model"] == "llama" or metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    if metadata.get("tokenizer.ggml.add_bos_token", has_bos):
        bos = metadata["tokenizer.ggml.bos_token_id"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", pair=f"{tokens[bos]} $A $B:1", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer


def _ids(metadata: Metadata) -> dict[str, int]:
    return {text: token for token, text in enumerate(metadata["tokenizer.ggml.tokens"])}


# By tokenizer.ggml.model.
KINDS: dict[str, Callable[[Metadata], Tokenizer]] = {"gpt2": _byte_level, "llama": _sentencepiece}
