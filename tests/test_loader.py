"""Loading: limits of MLX's memory, and adapters on a model directory."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten

from app.engine import loader
from app.errors import StartError

LORA = {
    "num_layers": 2,
    "fine_tune_type": "lora",
    "lora_parameters": {"rank": 4, "scale": 2.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]},
}


@pytest.fixture(scope="module")
def quantised_dir(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model in four bits."""
    from mlx_lm.utils import load_model, quantize_model

    folder = tmp_path_factory.mktemp("models") / "quantised"
    shutil.copytree(tiny_model_dir, folder)
    model, config = quantize_model(*load_model(tiny_model_dir), 32, 4)
    mx.save_safetensors(str(folder / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def adapter(folder: Path, config: dict[str, Any] = LORA, rank: int = 4) -> Path:
    """An adapter as mlx-lm's training writes it: both matrices of the query projection in both layers."""
    weights = {}
    for layer in range(2):
        for side, shape in (("a", (64, rank)), ("b", (rank, 64))):
            key = mx.random.key(2 * layer + (side == "b"))
            weights[f"model.layers.{layer}.self_attn.q_proj.lora_{side}"] = mx.random.normal(shape, key=key)
    mx.save_safetensors(str(folder / "adapters.safetensors"), weights)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def logits(loaded: loader.LoadedModel) -> mx.array:
    return loaded.model(mx.array([[1, 2, 3, 4]]))


def test_an_adapter_changes_the_model_by_its_product(quantised_dir: Path, tmp_path: Path) -> None:
    plain = loader.load(quantised_dir, "float32")
    adapted = loader.load(quantised_dir, "float32", adapter(tmp_path))
    assert not mx.allclose(logits(plain), logits(adapted), atol=1e-3)
    written = mx.load(str(tmp_path / "adapters.safetensors"))
    for layer, attention in enumerate(block.self_attn for block in plain.model.layers):
        a, b = (written[f"model.layers.{layer}.self_attn.q_proj.lora_{side}"] for side in "ab")
        attention.q_proj.weight = attention.q_proj.weight + 2.0 * (a @ b).T
    assert mx.allclose(logits(plain), logits(adapted), atol=1e-3)
    dtypes = {array.dtype for _, array in tree_flatten(adapted.model.parameters())}
    assert dtypes == {mx.float32}, "what is not float32 is slow on a CPU"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("missing", "does not exist"),
        ("no config", "adapter_config.json"),
        ("bad config", "num_layers"),
        ("no weights", "adapters.safetensors"),
        ("other rank", "does not match"),
    ],
)
def test_an_adapter_that_does_not_fit_is_one_line(quantised_dir: Path, tmp_path: Path, fault: str, said: str) -> None:
    folder = tmp_path / "adapter"
    if fault != "missing":
        folder.mkdir()
        adapter(folder, {} if fault == "bad config" else LORA, 8 if fault == "other rank" else 4)
    for name, file in (("no config", "adapter_config.json"), ("no weights", "adapters.safetensors")):
        if fault == name:
            (folder / file).unlink()
    with pytest.raises(StartError) as error:
        loader.load(quantised_dir, "auto", folder)
    assert str(error.value).startswith(f"MLXCEL_ADAPTER={folder} cannot be put on this model: ")
    assert said in str(error.value)
    assert "\n" not in str(error.value)


def test_memory_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    before = mx.set_cache_limit(1000)
    try:
        loader.limit_memory(None, 0)
        assert mx.set_cache_limit(1000) == 1000, "unset leaves it alone"
        loader.limit_memory(2000, 0)
        assert mx.set_cache_limit(1000) == 2000
    finally:
        mx.set_cache_limit(before)


@pytest.mark.parametrize("is_available", [True, False])
def test_the_wired_limit_is_set_on_metal_only_and_only_when_asked_for(
    monkeypatch: pytest.MonkeyPatch, is_available: bool
) -> None:
    given: list[int] = []
    monkeypatch.setattr(mx.metal, "is_available", lambda: is_available)
    monkeypatch.setattr(mx, "set_wired_limit", given.append)
    loader.limit_memory(None, 0)
    loader.limit_memory(None, 5000)
    assert given == ([5000] if is_available else [])


def test_a_wired_limit_above_the_systems_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(num_bytes: int) -> None:
        raise ValueError("larger than the\nmaximum")

    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    monkeypatch.setattr(mx, "set_wired_limit", refuse)
    with pytest.raises(StartError, match=r"^MLXCEL_WIRED_LIMIT=5000 is not possible: ValueError: larger than the max"):
        loader.limit_memory(None, 5000)


def test_a_module_that_leaves_the_process_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx-lm's module for olmo does, where a package is missing."""
    monkeypatch.setitem(sys.modules, "hf_olmo", None)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "olmo"}))
    mx.save_safetensors(str(tmp_path / "model.safetensors"), {"x": mx.zeros(1)})
    with pytest.raises(StartError, match=r"cannot be loaded: SystemExit: 1$"):
        loader.load(tmp_path, "auto")
