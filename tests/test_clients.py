"""Programs that use other people's clients, against a real server: chat, streams, tools, shapes, and errors as the
client's own exceptions. Those beside openai are installed by ``make test-clients``, and skipped without it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.caller import SENTENCE, build_caller
from tests.serving import ROOT, ServerProcess, serving

PROGRAMS = ROOT / "tests" / "clients"
PYTHON = ROOT / ".clients" / "bin" / "python"
MODEL, KEY = "weatherman", "a-key"
MISSING = "the clients are not installed: make test-clients"


@pytest.fixture(scope="module")
def caller(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("caller")
    model = build_caller(model_dir, folder / "model")
    with serving(folder, MODEL=str(model), MODEL_ALIAS=MODEL, API_KEYS=KEY, STRICT_FIELDS="true") as server:
        server.http.headers["authorization"] = f"Bearer {KEY}"
        yield server


def run(command: str | Path, program: str, server: ServerProcess) -> None:
    arguments = [command, PROGRAMS / program, server.url, MODEL, KEY]
    # Each of the environments has packages of its own.
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(arguments, cwd=PROGRAMS, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_model_says_what_its_weights_say(caller: ServerProcess) -> None:
    body = {"prompt": "<|tell|>", "max_tokens": 9, "temperature": 2.0}
    assert caller.post("/v1/completions", body).json()["choices"][0]["text"] == SENTENCE


def test_openai(caller: ServerProcess) -> None:
    run(sys.executable, "try_openai.py", caller)


@pytest.mark.parametrize("name", ["openai", "litellm", "langchain", "instructor", "pydantic_ai"])
def test_a_python_client(name: str, caller: ServerProcess) -> None:
    if not PYTHON.exists():
        pytest.skip(MISSING)
    run(PYTHON, f"try_{name}.py", caller)


def test_anthropic(caller: ServerProcess) -> None:
    if not PYTHON.exists():
        pytest.skip(MISSING)
    run(PYTHON, "try_anthropic.py", caller)


def test_node_clients(caller: ServerProcess) -> None:
    node = shutil.which("node")
    if node is None or not (PROGRAMS / "node_modules").exists():
        pytest.skip(MISSING if node else "node is not installed")
    run(node, "try_node.mjs", caller)


def test_a_program_that_finds_something_wrong_fails(caller: ServerProcess) -> None:
    arguments = [sys.executable, PROGRAMS / "try_openai.py", caller.url, MODEL, "wrong"]
    done = subprocess.run(arguments, cwd=PROGRAMS, capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    assert "openai.AuthenticationError" in done.stderr
