"""Import of GGUF files: the embedded model answers, its tokens are those of the file, no half import is ever seen."""

from __future__ import annotations

import importlib.util
import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx_lm
import pytest
from mlx.utils import tree_unflatten
from mlx_lm.tokenizer_utils import load as load_tokenizer
from tokenizers import pre_tokenizers

from app.engine import gguf
from app.engine.gguf import embedded_gguf, import_gguf, imported_directory
from app.errors import StartError

ODD_TEXTS = [
    "def f(x):\n\treturn x ** 2  # 1234",
    "日本語テキスト、漢字",
    "😀👩‍👩‍👧 é e\u0301",
    "\t\t  tabs\r\n\n\n end ",
    " 123 4567 ٣٤ ½",
    "don't WE'LL",
    "a\x00b\u2028c\ufeff",
    "<|im_start|>user\nhi<|im_end|>\n<repo_name>",
    "",
]


def silent(_: str) -> None:
    pass


def plain(model: nn.Module) -> nn.Module:
    """The model with its packed weights unpacked to float32, which the CPU multiplies fast."""
    unpacked = []
    for path, layer in model.named_modules():
        if isinstance(layer, (nn.QuantizedLinear, nn.QuantizedEmbedding)):
            new = nn.Linear(1, 1, bias=False) if isinstance(layer, nn.QuantizedLinear) else nn.Embedding(1, 1)
            new.weight = mx.dequantize(layer.weight, layer.scales, layer.biases, layer.group_size, layer.bits)
            unpacked.append((path, new))
    model.update_modules(tree_unflatten(unpacked))
    model.set_dtype(mx.float32)
    return model


def test_embedded_model_answers(model_dir: Path) -> None:
    model, tokenizer = mlx_lm.load(str(model_dir))
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(question, add_generation_prompt=True)
    answer = mlx_lm.generate(plain(model), tokenizer, prompt, max_tokens=12)
    assert answer == "The capital of France is Paris."


def test_weights_stay_packed_as_stored(model_dir: Path) -> None:
    stored = mx.load(str(embedded_gguf()))
    written = mx.load(str(model_dir / "model.safetensors"))
    assert len(written) == len(stored)
    for there, here in {
        "blk.7.attn_k.weight": "model.layers.7.self_attn.k_proj.weight",
        "blk.29.ffn_down.scales": "model.layers.29.mlp.down_proj.scales",
        "token_embd.biases": "model.embed_tokens.biases",
        "output_norm.weight": "model.norm.weight",
    }.items():
        assert mx.array_equal(stored[there], written[here])
    config = json.loads((model_dir / "config.json").read_text())
    assert config["quantization"] == {
        "group_size": 32,
        "bits": 4,
        "model.embed_tokens": {"group_size": 32, "bits": 8},
    }


def test_tokens_have_the_ids_of_the_file(model_dir: Path) -> None:
    tokenizer = load_tokenizer(model_dir)
    metadata: Any = mx.load(str(embedded_gguf()), return_metadata=True)[1]
    tokens = metadata["tokenizer.ggml.tokens"]
    assert tokenizer.convert_ids_to_tokens(list(range(len(tokens)))) == tokens
    assert len(tokenizer) == len(tokens)
    assert set(tokenizer.all_special_ids) <= set(range(17))
    assert {token for token, added in tokenizer.added_tokens_decoder.items() if added.special} == set(range(17))
    assert tokenizer.eos_token_id == 2
    assert set(json.loads((model_dir / "generation_config.json").read_text())["eos_token_id"]) == {0, 2}


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_odd_texts_come_back(model_dir: Path, text: str) -> None:
    tokenizer = load_tokenizer(model_dir)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text


def test_digits_are_cut_singly(model_dir: Path) -> None:
    words = load_tokenizer(model_dir).backend_tokenizer.pre_tokenizer.pre_tokenize_str("in 2048")
    assert [word for word, _ in words] == ["in", "Ġ", "2", "0", "4", "8"]


def letters() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


Change = Callable[[dict[str, mx.array], dict[str, Any]], None]


def write_tiny(path: Path, change: Change = lambda weights, metadata: None) -> Path:
    """A llama of one layer and 8-wide heads, with random weights."""
    tokens = ["<s>", "</s>", "<tool>", *letters(), "ab", "abc"]
    size = {"attn_q": (16, 16), "attn_k": (8, 16), "attn_v": (8, 16), "attn_output": (16, 16)}
    size |= {"ffn_gate": (32, 16), "ffn_up": (32, 16), "ffn_down": (16, 32), "attn_norm": (16,), "ffn_norm": (16,)}
    weights = {f"blk.0.{name}.weight": mx.random.normal(shape) for name, shape in size.items()}
    weights |= {"token_embd.weight": mx.random.normal((len(tokens), 16)), "output_norm.weight": mx.ones((16,))}
    numbers = {
        "llama.embedding_length": 16,
        "llama.feed_forward_length": 32,
        "llama.block_count": 1,
        "llama.attention.head_count": 2,
        "llama.attention.head_count_kv": 1,
        "llama.context_length": 64,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }
    metadata: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.attention.layer_norm_rms_epsilon": mx.array(1e-5),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": mx.array([3, 3, 4] + [1] * (len(tokens) - 3), mx.int32),
        "tokenizer.ggml.merges": ["a b", "ab c"],
        **{key: mx.array(number, mx.uint32) for key, number in numbers.items()},
    }
    change(weights, metadata)
    mx.save_gguf(str(path), weights, metadata)
    return path


def test_tiny_model_loads_and_ties_its_head(tmp_path: Path) -> None:
    import_gguf(write_tiny(tmp_path / "tiny.gguf"), tmp_path / "out", silent)
    model, tokenizer = mlx_lm.load(str(tmp_path / "out"))
    assert model.args.tie_word_embeddings
    assert model(mx.array([[1, 2, 3]])).shape == (1, 3, len(tokenizer))
    assert tokenizer.encode("abc<tool>")[-1] == 2
    assert not tokenizer.added_tokens_decoder[2].special


def test_head_of_its_own_is_used(tmp_path: Path) -> None:
    def untie(weights: dict[str, mx.array], _: dict[str, Any]) -> None:
        weights["output.weight"] = 2 * weights["token_embd.weight"]

    import_gguf(write_tiny(tmp_path / "tiny.gguf", untie), tmp_path / "out", silent)
    model, _ = mlx_lm.load(str(tmp_path / "out"))
    assert not model.args.tie_word_embeddings
    assert mx.allclose(model.lm_head.weight, 2 * model.model.embed_tokens.weight)


def test_bos_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    def with_bos(_: dict[str, mx.array], metadata: dict[str, Any]) -> None:
        metadata["tokenizer.ggml.add_bos_token"] = mx.array(True)

    import_gguf(write_tiny(tmp_path / "tiny.gguf", with_bos), tmp_path / "out", silent)
    tokenizer = load_tokenizer(tmp_path / "out")
    assert tokenizer.encode("a")[0] == 0
    assert 0 not in tokenizer.encode("a", add_special_tokens=False)


def test_llama3_words_are_cut_as_llama3_does(tmp_path: Path) -> None:
    def llama3(_: dict[str, mx.array], metadata: dict[str, Any]) -> None:
        metadata["tokenizer.ggml.pre"] = "llama-bpe"

    import_gguf(write_tiny(tmp_path / "tiny.gguf", llama3), tmp_path / "out", silent)
    words = load_tokenizer(tmp_path / "out").backend_tokenizer.pre_tokenizer.pre_tokenize_str(
        "WE'LL pay 12345!\n\n  now"
    )
    assert [word for word, _ in words] == ["WE", "'LL", "Ġpay", "Ġ", "123", "45", "!ĊĊ", "Ġ", "Ġnow"]


def field(key: str, value: Any) -> Change:
    return lambda weights, metadata: metadata.update({key: value})


def tensor(name: str) -> Change:
    return lambda weights, metadata: weights.update({name: mx.ones((16,))})


def without(name: str) -> Change:
    return lambda weights, metadata: (weights.pop(name, None), metadata.pop(name, None))[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (field("general.architecture", "mamba"), "architecture mamba"),
        (field("tokenizer.ggml.model", "t5"), "kind t5"),
        (field("tokenizer.ggml.pre", "tekken"), "pre-tokenizer tekken"),
        (field("llama.rope.scaling.type", "yarn"), "rotary"),
        (field("llama.rope.dimension_count", mx.array(4, mx.uint32)), "part of each head"),
        (field("split.count", mx.array(2, mx.uint16)), "split GGUF"),
        (tensor("rope_freqs.weight"), "rotary"),
        (tensor("blk.0.ffn_gate_inp.weight"), "ffn_gate_inp"),
        (tensor("blk.0.attn_q.bias"), "attn_q.bias"),
        (without("token_embd.weight"), "no token embedding"),
        (without("llama.block_count"), "llama.block_count"),
        (field("tokenizer.ggml.merges", ["there isnot"]), "no tokenizer can be made"),
    ],
)
def test_what_cannot_be_imported_is_refused_by_name(tmp_path: Path, change: Change, said: str) -> None:
    with pytest.raises(StartError, match=said):
        import_gguf(write_tiny(tmp_path / "tiny.gguf", change), tmp_path / "out", silent)
    assert not list(tmp_path.glob("out*/"))


def test_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"not a model")
    with pytest.raises(StartError, match="broken"):
        import_gguf(tmp_path / "broken.gguf", tmp_path / "out", silent)
    with pytest.raises(StartError, match="missing"):
        import_gguf(tmp_path / "missing.gguf", tmp_path / "out", silent)


def test_a_file_that_may_not_be_written_is_read_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a release that belongs to root: MLX would open the file itself for writing."""
    source = write_tiny(tmp_path / "tiny.gguf")
    monkeypatch.setattr(gguf.os, "access", lambda path, mode: False)
    import_gguf(source, tmp_path / "out", silent)
    assert {file.suffix for file in (tmp_path / "out").iterdir()} == {".json", ".safetensors"}


def test_import_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fail(step: str) -> None:
        if "weights" in step:
            raise KeyboardInterrupt

    source = write_tiny(tmp_path / "tiny.gguf")
    with pytest.raises(KeyboardInterrupt):
        import_gguf(source, tmp_path / "out", fail)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_rest_of_a_killed_import_is_swept_away(tmp_path: Path) -> None:
    rest = tmp_path / "out.partial"
    rest.mkdir()
    (rest / "model-old.safetensors").write_bytes(b"half")
    import_gguf(write_tiny(tmp_path / "tiny.gguf"), tmp_path / "out", silent)
    assert not rest.exists()
    assert not (tmp_path / "out" / "model-old.safetensors").exists()


def test_finished_import_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    steps: list[str] = []
    import_gguf(tmp_path / "missing.gguf", tmp_path / "out", steps.append)
    assert steps == []


def import_and_count(source: Path, target: Path, barrier: Any, steps: Any) -> None:
    barrier.wait()
    import_gguf(source, target, steps.put)
    mlx_lm.load(str(target))
    steps.put("loaded")


def test_two_processes_at_once_make_one_import(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, steps = context.Barrier(2), context.Queue()
    arguments = (write_tiny(tmp_path / "tiny.gguf"), tmp_path / "cache" / "out", barrier, steps)
    processes = [context.Process(target=import_and_count, args=arguments) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0]
    told = [steps.get(timeout=5) for _ in range(5)]
    assert told.count("loaded") == 2
    assert sum(step.startswith("reading") for step in told) == 1


def test_directory_changes_with_the_file(tmp_path: Path) -> None:
    source = write_tiny(tmp_path / "tiny.gguf")
    first = imported_directory(source, tmp_path)
    assert first == imported_directory(source, tmp_path)
    assert first.name.startswith("tiny-")
    source.write_bytes(source.read_bytes() + b"\0")
    assert imported_directory(source, tmp_path) != first


def test_missing_wheel_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    assert embedded_gguf().suffix == ".gguf"
    monkeypatch.setattr(gguf, "EMBEDDED_PACKAGE", "no_such_package")
    assert importlib.util.find_spec("no_such_package") is None
    with pytest.raises(StartError, match="pip install"):
        embedded_gguf()
