"""What GGUF calls the fields and tensors of each family that can be imported, and what mlx-lm calls them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from app.errors import StartError

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
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
QKV = frozenset({"attn_q", "attn_k", "attn_v"})
TENSOR_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|scales|biases|bias)")


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


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture of GGUF, whose name is mlx-lm's ``model_type`` too.

    ``is_interleaved``: the two halves of each head of q and k lie interleaved. ``norm_offset`` is what GGUF has added
    to the weights of norms. ``layer_tensors`` are those beside the ones that all have, ``biased`` those with a bias.
    """

    name: str
    architecture: str
    activation: str = "silu"
    is_interleaved: bool = False
    norm_offset: float = 0.0
    layer_tensors: dict[str, str] = field(default_factory=dict)
    biased: frozenset[str] = frozenset()

    def weight_name(self, path: Path, name: str) -> str:
        """``blk.3.attn_q.scales`` -> ``model.layers.3.self_attn.q_proj.scales``. Raises StartError."""
        match = TENSOR_NAME.fullmatch(name)
        if match and (match["kind"] != "bias" or match["part"] in self.biased):
            layer, part, kind = match["layer"], match["part"], match["kind"]
            if layer is None and part in TOP_TENSORS:
                return f"{TOP_TENSORS[part]}.{kind}"
            names = LAYER_TENSORS | self.layer_tensors
            if layer is not None and part in names:
                return f"model.layers.{layer}.{names[part]}.{kind}"
        raise StartError(f"{path} holds the tensor {name}, which the import of {self.name} models does not know")

    def weight(self, name: str, array: mx.array) -> mx.array:
        """A tensor of the file as mlx-lm has it."""
        return array - self.norm_offset if self.norm_offset and name.endswith("norm.weight") else array

    def config(self, metadata: Metadata, tensors: dict[str, mx.array]) -> dict[str, Any]:
        """The model's config.json, but for its end tokens. Raises StartError for what is computed otherwise there."""
        path, name = metadata.path, self.name
        if metadata.get("split.count", 1) > 1:
            raise StartError(f"{path} is one part of a split GGUF; merge its parts first")
        scaling = metadata.get(f"{name}.rope.scaling.type", "none")
        if scaling != "none" or "rope_freqs.weight" in tensors:
            raise StartError(
                f"{path} scales its rotary embedding, which the import does not support; use the MLX model"
            )
        if "token_embd.weight" not in tensors:
            raise StartError(f"{path} holds no token embedding")
        hidden_size, num_heads = metadata[f"{name}.embedding_length"], metadata[f"{name}.attention.head_count"]
        head_dim = metadata.get(f"{name}.attention.key_length", hidden_size // num_heads)
        if metadata.get(f"{name}.rope.dimension_count", head_dim) != head_dim:
            raise StartError(f"{path} rotates only a part of each head, which the import does not support")
        config = {
            "architectures": [self.architecture],
            "model_type": name,
            "hidden_size": hidden_size,
            "intermediate_size": metadata[f"{name}.feed_forward_length"],
            "num_hidden_layers": metadata[f"{name}.block_count"],
            "num_attention_heads": num_heads,
            "num_key_value_heads": metadata.get(f"{name}.attention.head_count_kv", num_heads),
            "head_dim": head_dim,
            "rms_norm_eps": metadata[f"{name}.attention.layer_norm_rms_epsilon"],
            "rope_theta": metadata.get(f"{name}.rope.freq_base", 10000.0),
            "rope_traditional": self.is_interleaved,
            "max_position_embeddings": metadata[f"{name}.context_length"],
            "vocab_size": tensors["token_embd.weight"].shape[0],
            "tie_word_embeddings": "output.weight" not in tensors,
            "hidden_act": self.activation,
        }
        quantization = self._quantization(path, tensors, config)
        return config | ({"quantization": quantization} if quantization else {})

    def _quantization(self, path: Path, tensors: dict[str, mx.array], config: dict[str, Any]) -> dict[str, Any]:
        """The most frequent packing as default, and an entry by path for each layer that is packed otherwise."""
        packing: dict[str, tuple[int, int]] = {}
        for name, scales in tensors.items():
            if name.endswith(".scales"):
                stem = name.removesuffix(".scales")
                width = config["intermediate_size"] if stem.endswith("ffn_down") else config["hidden_size"]
                if stem.endswith("attn_output"):
                    width = config["num_attention_heads"] * config["head_dim"]
                bits = tensors[stem + ".weight"].shape[-1] * 32 // width
                packing[self.weight_name(path, name).removesuffix(".scales")] = (width // scales.shape[-1], bits)
        if not packing:
            return {}
        kinds = list(packing.values())
        default = max(set(kinds), key=kinds.count)
        entries: dict[str, Any] = {"group_size": default[0], "bits": default[1]}
        for layer, (group_size, bits) in packing.items():
            if (group_size, bits) != default:
                entries[layer] = {"group_size": group_size, "bits": bits}
        return entries


FAMILIES = {
    family.name: family
    for family in (
        Family("llama", "LlamaForCausalLM", is_interleaved=True),
        Family("qwen2", "Qwen2ForCausalLM", biased=QKV),
        Family("qwen3", "Qwen3ForCausalLM", layer_tensors=HEAD_NORMS),
        Family("gemma", "GemmaForCausalLM", activation="gelu_pytorch_tanh", norm_offset=1.0),
    )
}


def family_of(metadata: Metadata) -> Family:
    """Raises StartError for an architecture that cannot be imported."""
    name = metadata["general.architecture"]
    if name not in FAMILIES:
        raise StartError(
            f"{metadata.path} is of architecture {name}; only {', '.join(FAMILIES)} can be imported from GGUF"
        )
    return FAMILIES[name]
