"""Shared by all tests: an optimised BLAS, loaded before anything imports MLX, and the embedded model as a directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.engine.blas import preload
from loadtest.tiny_model import build_tiny_model
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
    """See ``loadtest.tiny_model``."""
    return build_tiny_model(model_dir, tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """One server for all tests that only ask it things: four slots, four places in the queue."""
    folder = tmp_path_factory.mktemp("server")
    with serving(folder, CACHE_DIR=str(folder), MAX_QUEUE_DEPTH="4") as process:
        yield process
