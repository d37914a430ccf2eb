"""A llama of two layers with random weights and the embedded model's tokenizer: it answers nonsense at once."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def build_tiny_model(embedded: Path, folder: Path, window: int = 16384) -> Path:
    """Write the model to ``folder``, which must not exist. ``embedded`` is the embedded model as a directory, and
    ``window`` the longest context in tokens."""
    import mlx.core as mx  # here: its BLAS has to be loaded before it
    from mlx.utils import tree_flatten
    from mlx_lm.models.llama import Model, ModelArgs

    config = json.loads((embedded / "config.json").read_text()) | {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_traditional": False,
        "max_position_embeddings": window,
    }
    config.pop("quantization", None)
    mx.random.seed(0)
    weights = dict(tree_flatten(Model(ModelArgs.from_dict(config)).parameters()))
    folder.mkdir()
    for name in COPIED:
        shutil.copy(embedded / name, folder / name)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder
