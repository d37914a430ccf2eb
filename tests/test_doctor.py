"""What the doctor finds, on a machine that is well and on set-ups that are broken."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from app.engine.gguf import embedded_gguf, imported_directory
from tests.commanding import environment, mlxcel
from tests.serving import ROOT, free_port

NAMES = [
    "Python",
    "packages",
    "settings",
    "BLAS",
    "device",
    "model",
    "memory",
    "disk",
    "files",
    "address",
    "open files",
]


def examined(*arguments: str, **settings: str) -> tuple[int, dict[str, Any]]:
    """Exit code, and every check by its name."""
    given = {"PORT": str(free_port()), **settings}
    done = mlxcel("doctor", "--json", *arguments, **given)
    assert done.stderr == b""
    told = json.loads(done.stdout)
    assert told["ok"] == (done.returncode == 0)
    for check in told["checks"]:
        assert check["found"]
        assert bool(check["remedy"]) == (check["verdict"] != "ok")
    return done.returncode, {check["name"]: check for check in told["checks"]}


def test_nothing_fails_on_a_machine_that_runs_these_tests(tmp_path: Path) -> None:
    code, checks = examined(CACHE_DIR=str(tmp_path / "not" / "yet"))
    assert code == 0, checks
    assert list(checks) == NAMES
    assert checks["model"]["found"].endswith("MiB")
    assert list(tmp_path.iterdir()) == []


def broken_weights(model: Path, folder: Path) -> str:
    shutil.copytree(model, folder / "broken")
    file = folder / "broken" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    return str(folder / "broken")


def test_a_broken_model_fails_and_its_memory_is_not_guessed(tiny_model_dir: Path, tmp_path: Path) -> None:
    code, checks = examined("--model", broken_weights(tiny_model_dir, tmp_path))
    assert code == 1
    assert checks["model"]["verdict"] == "fail"
    assert "is incomplete: it has " in checks["model"]["found"]
    assert [name for name in NAMES if name not in checks] == ["memory"]
    assert [name for name, check in checks.items() if check["verdict"] == "fail"] == ["model"]


def test_a_damaged_import_is_told_with_its_folder(tmp_path: Path) -> None:
    code, checks = examined(CACHE_DIR=str(tmp_path))
    assert code == 0
    made = imported_directory(embedded_gguf(), tmp_path)
    made.mkdir()
    code, checks = examined(CACHE_DIR=str(tmp_path))
    assert code == 1
    assert "damaged" in checks["model"]["found"]
    assert str(made) in checks["model"]["remedy"]


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("BLAS", {"BLAS": "/nowhere/libblas.so"}, "MLXCEL_BLAS is /nowhere/libblas.so"),
        ("memory", {"KV_CACHE_BUDGET": "100000G"}, "102400000 MiB of KV budget"),
        ("disk", {"CACHE_DIR": "/dev/null/cache"}, "/dev/null/cache cannot be written"),
        ("files", {"API_KEY_FILE": "/nowhere/keys"}, "MLXCEL_API_KEY_FILE=/nowhere/keys cannot be read"),
        ("files", {"API_KEY_FILE": "/dev/null"}, "has no key in it"),
        ("files", {"LOG_FILE": "/tmp"}, "MLXCEL_LOG_FILE=/tmp cannot be written"),
        ("files", {"RECORD_DIR": "/dev/null/records"}, "MLXCEL_RECORD_DIR=/dev/null/records cannot be written"),
        ("address", {"HOST": "203.0.113.7"}, "203.0.113.7:"),
        ("address", {"SSL_CERT_FILE": "/nowhere", "SSL_KEY_FILE": "/nowhere"}, "MLXCEL_SSL_CERT_FILE=/nowhere"),
        ("model", {"MODEL": "/nowhere"}, "MLXCEL_MODEL=/nowhere"),
        ("model", {"MODEL": "nobody/nothing", "OFFLINE": "1"}, "MLXCEL_OFFLINE is on"),
    ],
)
def test_what_is_broken_fails_under_its_name(name: str, settings: dict[str, str], said: str) -> None:
    if name == "BLAS" and sys.platform != "linux":
        pytest.skip("a BLAS is chosen on Linux only")
    code, checks = examined(**settings)
    assert code == 1
    assert checks[name]["verdict"] == "fail"
    assert said in checks[name]["found"]
    assert [other for other, check in checks.items() if check["verdict"] == "fail"] == [name]


def test_settings_that_cannot_be_used_are_told_first(tmp_path: Path) -> None:
    code, checks = examined(PROT="8080")
    assert code == 1
    assert list(checks) == NAMES[:3]
    assert "did you mean MLXCEL_PORT?" in checks["settings"]["found"]


def test_a_port_in_use_and_no_blas_are_warnings() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        code, checks = examined(PORT=str(taken.getsockname()[1]), BLAS="none")
    assert code == 0
    assert checks["address"]["verdict"] == "warn"
    assert "is in use" in checks["address"]["found"]
    assert checks["BLAS"]["verdict"] == ("warn" if sys.platform == "linux" else "ok")


@pytest.mark.parametrize(("limit", "verdict"), [(90, "fail"), (500, "warn")])
def test_few_open_files_are_told_for_a_person_to_read(limit: int, verdict: str) -> None:
    done = subprocess.run(
        ["sh", "-c", f'ulimit -n {limit} && exec "$0" -m app doctor', sys.executable],
        cwd=ROOT,
        env=environment({"PORT": str(free_port())}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    lines = done.stdout.splitlines()
    assert done.returncode == (1 if verdict == "fail" else 0)
    (at,) = [number for number, line in enumerate(lines) if "open files" in line]
    assert lines[at].startswith(f"{verdict}  open files  at most {limit}")
    assert "ulimit -n 4096" in lines[at + 1]
    assert lines[at + 1].startswith(" " * 18)
