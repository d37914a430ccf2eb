"""What stops a start: each in one line that names its cause, and before anything heavy is imported."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest

from app.engine import preflight
from app.errors import StartError
from tests.serving import ROOT, free_port


def refused(**settings: str) -> str:
    """The one line on stderr of a real ``mlxcel serve`` that cannot start; fails if it takes 5 s or more."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("MLXCEL_")}
    chosen = {"PORT": str(free_port()), "LOG_LEVEL": "error", **settings}
    began_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "app", "serve"],
        cwd=ROOT,
        env=clean | {f"MLXCEL_{name}": value for name, value in chosen.items()},
        capture_output=True,
        text=True,
        timeout=30,
    )
    took_s = time.monotonic() - began_s
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    assert took_s < 5, f"{took_s:.1f} s: {lines[0]}"
    return lines[0]


@pytest.fixture
def model(tiny_model_dir: Path, tmp_path: Path) -> Path:
    """A model directory of the test's own to break."""
    return Path(shutil.copytree(tiny_model_dir, tmp_path / "model"))


def change_config(model: Path, **fields: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def test_a_missing_folder_on_the_real_command() -> None:
    assert refused(MODEL="/no/such/model").startswith("mlxcel: MLXCEL_MODEL=/no/such/model: there is no such folder")


def test_a_bad_variable_on_the_real_command() -> None:
    assert refused(MAX_QUEUE_DEPTH="many").startswith("mlxcel: MLXCEL_MAX_QUEUE_DEPTH='many' is not allowed: ")
    assert "did you mean MLXCEL_MAX_QUEUE_DEPTH" in refused(MAX_QUEUE_DEPHT="3")


def test_a_folder_without_config_on_the_real_command(model: Path) -> None:
    (model / "config.json").unlink()
    assert refused(MODEL=str(model)) == f"mlxcel: no model at {model}: there is no config.json"


def test_an_incomplete_download_on_the_real_command(model: Path) -> None:
    weights = model / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    assert "is incomplete: it has" in refused(MODEL=str(model))


def test_an_unknown_family_on_the_real_command(model: Path) -> None:
    change_config(model, model_type="frobnicator")
    assert "is of the family 'frobnicator', which mlx-lm does not know" in refused(MODEL=str(model))


def test_a_broken_gguf_on_the_real_command(tmp_path: Path) -> None:
    path = tmp_path / "noise.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 5, 5) + bytes(range(256)) * 20)
    assert "is not a whole GGUF file" in refused(MODEL=str(path))


def test_more_budget_than_memory_on_the_real_command(model: Path) -> None:
    line = refused(MODEL=str(model), KV_CACHE_BUDGET="100000G")
    assert line.startswith("mlxcel: too little memory: ")
    assert " of KV budget = " in line
    assert " are available" in line


def test_whole_models_pass(tiny_model_dir: Path, model_dir: Path) -> None:
    from app.engine.gguf import embedded_gguf

    for whole in (tiny_model_dir, model_dir):
        assert preflight.check_files(str(whole)) == (whole / "model.safetensors").stat().st_size
    assert preflight.check_files(str(embedded_gguf())) == embedded_gguf().stat().st_size
    assert preflight.check_files("embedded") == preflight.check_files("owner/name") == 0


@pytest.mark.parametrize(
    ("content", "said"),
    [("", "is not JSON"), ("{", "is not JSON"), ("[]", "is not a JSON object"), ("{}", "names no model_type")],
)
def test_a_broken_config(model: Path, content: str, said: str) -> None:
    (model / "config.json").write_text(content)
    with pytest.raises(StartError, match=said) as refusal:
        preflight.check_files(str(model))
    assert "\n" not in str(refusal.value)


def test_a_family_under_another_name_is_known(model: Path) -> None:
    change_config(model, model_type="mistral")
    preflight.check_files(str(model))


def header(tensors: object) -> bytes:
    data = json.dumps(tensors).encode()
    return struct.pack("<Q", len(data)) + data


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no whole header"),
        (b"\xff" * 100, "no whole header"),
        (struct.pack("<Q", 4) + b"nope", "no table of tensors"),
        (header([1]), "no table of tensors"),
        (header({"w": {"data_offsets": [0, 8]}}) + b"1234", r"it has \d+ of \d+ bytes"),
    ],
)
def test_broken_weights(model: Path, content: bytes, said: str) -> None:
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(StartError, match=said):
        preflight.check_files(str(model))


def test_missing_weights(model: Path) -> None:
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (model / "model.safetensors").rename(model / "model-1.safetensors")
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(StartError, match=r"model-2\.safetensors cannot be read: No such file"):
        preflight.check_files(str(model))
    for file in model.glob("model*"):
        file.unlink()
    with pytest.raises(StartError, match="there are no weights"):
        preflight.check_files(str(model))


def test_every_cut_through_a_gguf_header_is_noticed(tmp_path: Path) -> None:
    from app.engine.gguf import embedded_gguf

    with embedded_gguf().open("rb") as file:
        whole = file.read(1_200_000)
    path = tmp_path / "cut.gguf"
    for length in (0, 3, 10, 23, 100, 5000, 900_000):
        path.write_bytes(whole[:length])
        with pytest.raises(StartError, match="is not a whole GGUF file"):
            preflight.check_files(str(path))


def test_memory_is_summed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "system_memory_bytes", lambda: 100 << 20)
    preflight.check_memory("auto", 100 << 20)
    preflight.check_memory(60 << 20, 40 << 20)
    with pytest.raises(
        StartError, match=r"60\.0 MiB of weights \+ 50\.0 MiB of KV budget = 110\.0 MiB, and 100\.0 MiB"
    ):
        preflight.check_memory(50 << 20, 60 << 20)
