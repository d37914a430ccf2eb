"""From a model directory to weights in memory, a tokenizer, and the proof that the ragged step serves this family."""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
from huggingface_hub import snapshot_download
from mlx.utils import tree_flatten, tree_map

from app.engine import gguf
from app.engine.caches import Kept, file_limit_kept, look
from app.engine.kernels import on_cpu
from app.engine.preflight import system_memory_bytes
from app.errors import StartError

log = logging.getLogger("mlxcel.engine")

RECURRENT_WINDOW = 1 << 17  # tokens; a purely recurrent model has no bound of its own
HUB_FILES = ["*.json", "model*.safetensors", "tokenizer.model", "*.tiktoken", "*.txt", "*.jinja"]


with file_limit_kept():
    from mlx_lm.utils import dequantize_model, load_adapters, load_model, load_tokenizer


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """``window`` is the most tokens a request may hold."""

    model: nn.Module
    tokenizer: Any
    config: dict[str, Any]
    path: Path
    window: int
    vocab_size: int
    kept: Kept
    end_tokens: frozenset[int]
    generation_config: dict[str, Any] = field(default_factory=dict)

    @property
    def weight_bytes(self) -> int:
        return sum(array.nbytes for _, array in tree_flatten(self.model.parameters()))


def set_device(device: str) -> None:
    """``auto`` keeps MLX's choice, ``cpu`` and ``gpu`` pin it.

    Raises:
        StartError: the device does not exist here.
    """
    if device == "gpu" and not mx.is_available(mx.gpu):
        raise StartError("MLXCEL_DEVICE=gpu: MLX finds no GPU here; allowed: auto, cpu")
    if device != "auto":
        mx.set_default_device(mx.Device(mx.cpu if device == "cpu" else mx.gpu))
    if on_cpu():
        mx.disable_compile()  # on a CPU it starts a C++ compiler, which need not be there


def device_name() -> str:
    """Where MLX computes, as people call it."""
    return "CPU" if on_cpu() else str(mx.device_info().get("device_name", "GPU"))


def limit_memory(cache_bytes: int | None, wired_bytes: int) -> None:
    """Bound what MLX keeps of freed buffers (None: as MLX has it), and how much a Mac's GPU keeps wired (0: nothing).

    Raises:
        StartError: the system does not allow so much to be wired.
    """
    if cache_bytes is not None:
        mx.set_cache_limit(cache_bytes)
    if wired_bytes > 0 and mx.metal.is_available():
        try:
            mx.set_wired_limit(wired_bytes)
        except (ValueError, RuntimeError) as error:
            raise StartError(f"MLXCEL_WIRED_LIMIT={wired_bytes} is not possible: {one_line(error)}") from error


def memory_bytes() -> int:
    """What weights, pool and activations may take together, asked before there are any: on a GPU what its driver
    recommends, else what the system has left."""
    if not on_cpu():
        info = mx.device_info()
        return int(info.get("max_recommended_working_set_size") or info["memory_size"])
    return system_memory_bytes()


def free_bytes() -> int:
    """What the pool may still take now."""
    return system_memory_bytes() if on_cpu() else max(memory_bytes() - mx.get_active_memory(), 0)


def model_directory(model: str, cache_dir: Path, offline: bool) -> Path:
    """Where the model named by MLXCEL_MODEL lies: itself, its import, or its copy from the hub. Its files, where they
    are here, were checked before (``preflight``).

    Raises:
        StartError: there is no such model, or it cannot be imported or fetched.
    """
    path = Path(model).expanduser()
    if model == "embedded" or path.suffix == ".gguf":
        file = gguf.embedded_gguf() if model == "embedded" else path
        target = gguf.imported_directory(file, cache_dir)
        gguf.import_gguf(file, target, log.info)
        return target
    if path.is_dir():
        return path
    try:
        log.info("looking for %s %s", model, "in the local hub cache" if offline else "on the hub")
        return Path(snapshot_download(model, local_files_only=offline, allow_patterns=HUB_FILES))
    except Exception as error:
        where = "in the local hub cache (MLXCEL_OFFLINE is on)" if offline else "on the hub"
        raise StartError(
            f"MLXCEL_MODEL={model} is no folder here and was not found {where}: {one_line(error)}"
        ) from error


def load(path: Path, weight_dtype: str, adapter: Path | None = None) -> LoadedModel:
    """Open a model directory through mlx-lm; ``weight_dtype`` is auto, float32, float16 or bfloat16. ``adapter`` is the
    folder of an adapter that mlx-lm's training has written for this model.

    All that is to be known of the model is known then, what it takes included, and no weight has been read: each is
    when it is first used, all of them by ``read_weights``.

    On a CPU auto means float32, because MLX multiplies half-precision and quantised matrices more than ten times slower
    there; elsewhere the weights stay as stored.

    Raises:
        StartError: no model there, a broken one, a family that the ragged step cannot serve, or an adapter that
            does not fit.
    """
    if not (path / "config.json").is_file():
        raise StartError(f"no model at {path}: there is no config.json")
    try:
        model, config = load_model(path, lazy=True)
        tokenizer = load_tokenizer(path, eos_token_ids=config.get("eos_token_id"))
    except (Exception, SystemExit) as error:  # a module of mlx-lm leaves the process where a package is missing
        raise StartError(f"the model at {path} cannot be loaded: {one_line(error)}") from error
    if adapter is not None:
        try:
            load_adapters(model, str(adapter))
        except Exception as error:
            raise StartError(f"MLXCEL_ADAPTER={adapter} cannot be put on this model: {one_line(error)}") from error
    dtype = weight_dtype if weight_dtype != "auto" else "float32" if on_cpu() else None
    if dtype is not None:
        model = _cast(model, getattr(mx, dtype))
    needed, available = sum(array.nbytes for _, array in tree_flatten(model.parameters())), memory_bytes()
    if needed > available:
        raise StartError(
            f"too little memory: the weights at {path} take {needed / 2**20:.1f} MiB,"
            f" and {available / 2**20:.1f} MiB are available"
        )
    try:
        kept = look(model)
    except Exception as error:
        family = config.get("model_type", "unknown")
        raise StartError(f"model family '{family}' cannot be served yet: {one_line(error)}") from error
    text_config = config.get("text_config", config)
    generation = path / "generation_config.json"
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        config=config,
        path=path,
        window=_window(text_config, tokenizer, path, kept),
        vocab_size=_vocab_size(text_config, tokenizer),
        kept=kept,
        end_tokens=frozenset(int(token) for token in tokenizer.eos_token_ids),
        generation_config=json.loads(generation.read_text()) if generation.is_file() else {},
    )


def read_weights(loaded: LoadedModel) -> None:
    """Read all weights into memory, one after the other: what a conversion takes meanwhile is freed for the next.

    Raises:
        StartError: they cannot be read.
    """
    try:
        for _, array in tree_flatten(loaded.model.parameters()):
            mx.eval(array)
    except Exception as error:
        raise StartError(f"the weights at {loaded.path} cannot be read: {one_line(error)}") from error


def one_line(error: BaseException) -> str:
    """What an error is and says, cut to 300 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


def _cast(model: nn.Module, dtype: mx.Dtype) -> nn.Module:
    """Scales are cast before the packed weights are opened, so that nothing is rounded on the way."""
    model.update(tree_map(lambda p: p.astype(dtype) if mx.issubdtype(p.dtype, mx.floating) else p, model.parameters()))
    model = dequantize_model(model)
    model.eval()
    return model


def _window(config: dict[str, Any], tokenizer: Any, path: Path, kept: Kept) -> int:
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "n_ctx"):
        if isinstance(config.get(name), int):
            return int(config[name])
    if 0 < tokenizer.model_max_length < 10**9:
        return int(tokenizer.model_max_length)
    if set(kept.names) == {"ArraysCache"}:  # what it keeps has one size, however much it reads
        return RECURRENT_WINDOW
    raise StartError(f"the model at {path} does not say how long its context window is (max_position_embeddings)")


def _vocab_size(config: dict[str, Any], tokenizer: Any) -> int:
    return int(config.get("vocab_size") or len(tokenizer))
