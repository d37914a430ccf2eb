"""A model of two layers with random weights and the embedded model's tokenizer: it answers nonsense at once."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path
from typing import Any

COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def build_tiny_model(embedded: Path, folder: Path, window: int = 16384, **changes: Any) -> Path:
    """Write the model to ``folder``, which must not exist. ``embedded`` is the embedded model as a directory,
    ``window`` the longest context in tokens, and ``changes`` what is not as in a llama's config."""
    import mlx.core as mx  # here: its BLAS has to be loaded before it
    from mlx.utils import tree_flatten

    config = json.loads((embedded / "config.json").read_text()) | {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_traditional": False,
        "max_position_embeddings": window,
        **changes,
    }
    config.pop("quantization", None)
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(0)
    weights = dict(tree_flatten(module.Model(module.ModelArgs.from_dict(config)).parameters()))
    folder.mkdir()
    for name in COPIED:
        shutil.copy(embedded / name, folder / name)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder
