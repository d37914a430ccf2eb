"""Models of every family mlx-lm has, tiny and with random weights, the same ones each time."""

from __future__ import annotations

import importlib
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import yaml
from mlx.utils import tree_map

from app.engine.caches import look
from app.engine.loader import LoadedModel

CONFIGS = Path(__file__).parent / "configs.yaml"


@cache
def described() -> dict[str, Any]:
    """What configs.yaml holds: ``tiny``, ``families``, ``untried``."""
    return dict(yaml.safe_load(CONFIGS.read_text()))


def config_of(family: str, **changes: Any) -> dict[str, Any]:
    """The whole config of a family; ``changes`` go over it, into that of the text tower where there is one."""
    tiny, own = described()["tiny"], described()["families"][family]
    module = family.split()[0]
    if "text_config" not in own:
        return {**tiny, "model_type": module, **own, **changes}
    text = {**tiny, "model_type": f"{module}_text", **own["text_config"], **changes}
    return {**tiny, "model_type": module, **own, "text_config": text}


def build(family: str, **changes: Any) -> nn.Module:
    """A model of ``family`` in float32 as far as its module allows; ``changes`` as in ``config_of``."""
    config = config_of(family, **changes)
    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(5)
    model = module.Model(module.ModelArgs.from_dict(config))
    model.update(tree_map(_random, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


def loaded(family: str, model: nn.Module) -> LoadedModel:
    """What the engine takes."""
    config = {"model_type": family.split()[0]}
    tiny = described()["tiny"]
    window, vocabulary = tiny["max_position_embeddings"], tiny["vocab_size"]
    return LoadedModel(model, None, config, Path(family), window, vocabulary, look(model), frozenset())


def _random(weight: mx.array) -> mx.array:
    """Matrices are drawn anew; vectors, which hold gains, biases and sinks, are only moved."""
    if not mx.issubdtype(weight.dtype, mx.floating):
        return weight
    noise = mx.random.normal(weight.shape)
    return (noise * 0.15 if weight.ndim > 1 else weight + noise * 0.1).astype(weight.dtype)
