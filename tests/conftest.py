"""Shared by all tests: an optimised BLAS, loaded before anything imports MLX, and the embedded model as a directory."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.engine.blas import preload
from tests.serving import ServerProcess, serving

preload("auto", "auto")


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M-Instruct, imported from the installed wheel as the server does it."""
    from app.engine.gguf import embedded_gguf, import_gguf, imported_directory

    source = embedded_gguf()
    target = imported_directory(source, tmp_path_factory.mktemp("models"))
    import_gguf(source, target, report=lambda _: None)
    return target


@pytest.fixture(scope="session")
def tiny_model_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of two layers with random weights and the embedded model's tokenizer: it answers nonsense at once."""
    import mlx.core as mx
    from mlx.utils import tree_flatten
    from mlx_lm.models.llama import Model, ModelArgs

    config = json.loads((model_dir / "config.json").read_text()) | {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_traditional": False,
        "max_position_embeddings": 16384,
    }
    config.pop("quantization", None)
    mx.random.seed(0)
    weights = dict(tree_flatten(Model(ModelArgs.from_dict(config)).parameters()))
    folder = tmp_path_factory.mktemp("models") / "tiny"
    folder.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(model_dir / name, folder / name)
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    return folder


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for all tests that only ask it things: four slots, four places in the queue."""
    folder = tmp_path_factory.mktemp("server")
    with serving(folder, CACHE_DIR=str(folder), MAX_QUEUE_DEPTH="4") as process:
        yield process
