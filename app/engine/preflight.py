"""What can be known of a model before anything heavy is imported: whether its files are whole, and fit into memory.

mlx_lm takes seconds to import, and MLX itself may crash on a broken GGUF header: neither is worth waiting for.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import struct
from pathlib import Path
from typing import Any, BinaryIO

from app.errors import StartError

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
MAX_HEADER_BYTES = 100_000_000  # of a safetensors file, as its format has it

# Bytes of the GGUF metadata types with a fixed size, by their number; 8 is text and 9 an array.
GGUF_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
GGUF_TEXT, GGUF_ARRAY = 8, 9


def check_files(model: str) -> int:
    """Look at what MLXCEL_MODEL names; returns how many bytes of weights lie on disk (0: nothing to look at yet).

    Raises:
        StartError: it is missing, or a file of it is broken, incomplete or of an unknown family.
    """
    path = Path(model).expanduser()
    if model == "embedded":
        return 0
    if path.suffix == ".gguf":
        if not path.is_file():
            raise StartError(f"MLXCEL_MODEL={model}: there is no such file")
        _check_gguf(path)
        return path.stat().st_size
    if path.is_dir():
        _check_family(path)
        return sum(_check_safetensors(file) for file in _weight_files(path))
    if not HUB_ID.fullmatch(model):
        raise StartError(f"MLXCEL_MODEL={model}: there is no such folder, and it is no hub id (owner/name)")
    return 0


def check_memory(budget: int | str, weight_bytes: int) -> None:
    """Whether weights and a KV budget given in bytes fit into the memory of this system.

    Raises:
        StartError: they do not; the text has the sum.
    """
    kv_bytes = budget if isinstance(budget, int) else 0
    available_bytes = system_memory_bytes()
    if weight_bytes + kv_bytes > available_bytes:
        parts = f"{_mib(weight_bytes)} of weights + {_mib(kv_bytes)} of KV budget = {_mib(weight_bytes + kv_bytes)}"
        raise StartError(f"too little memory: {parts}, and {_mib(available_bytes)} are available")


def system_memory_bytes() -> int:
    """What this process may still take: what the system has left, or less where a control group limits it."""
    left = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    meminfo, cgroup = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
    if meminfo.exists() and (found := re.search(r"MemAvailable:\s+(\d+) kB", meminfo.read_text())):
        left = int(found[1]) * 1024
    if (cgroup / "memory.max").exists() and (limit := (cgroup / "memory.max").read_text().strip()).isdecimal():
        left = min(left, int(limit) - int((cgroup / "memory.current").read_text()))
    return left


def _check_family(path: Path) -> None:
    config = _read_json(path / "config.json", path)
    family = config.get("model_type")
    if not isinstance(family, str):
        raise StartError(f"the model at {path} cannot be loaded: its config.json names no model_type")
    spec = importlib.util.find_spec("mlx_lm")  # of a top-level package: found without being imported
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        renamed = _renamed_families(Path(folder) / "utils.py").get(family, family)
        if not (Path(folder) / "models" / f"{renamed}.py").is_file() and "model_file" not in config:
            raise StartError(f"the model at {path} is of the family '{family}', which mlx-lm does not know")


def _renamed_families(source: Path) -> dict[str, str]:
    """mlx-lm's own table of families that are another one under a different name."""
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "MODEL_REMAPPING":
            table: dict[str, str] = ast.literal_eval(node.value)
            return table
    return {}


def _weight_files(path: Path) -> list[Path]:
    files = set(path.glob("model*.safetensors"))
    index = path / "model.safetensors.index.json"
    if index.is_file():
        files |= {path / name for name in _read_json(index, path).get("weight_map", {}).values()}
    if not files:
        raise StartError(f"the model at {path} cannot be loaded: there are no weights (model*.safetensors)")
    return sorted(files)


def _check_safetensors(path: Path) -> int:
    """The size of the file, once it is known to hold all that its header names."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            if size < 8 or header_bytes > min(size - 8, MAX_HEADER_BYTES):
                raise StartError(f"{path} is broken or incomplete: it has no whole header")
            header = json.loads(file.read(header_bytes))
        ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
    except OSError as error:
        raise StartError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError, IndexError):
        raise StartError(f"{path} is broken: its header is no table of tensors") from None
    needed = 8 + header_bytes + max(ends, default=0)
    if size < needed:
        raise StartError(f"{path} is incomplete: it has {size} of {needed} bytes")
    return size


def _read_json(path: Path, model: Path) -> dict[str, Any]:
    if not path.is_file():
        raise StartError(f"no model at {model}: there is no {path.name}")
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StartError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise StartError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise StartError(f"{path} is not a JSON object")
    return value


def _check_gguf(path: Path) -> None:
    """Walk through the header, so that every length in it is known to stay inside the file."""
    try:
        with path.open("rb") as file:
            _Header(file, path.stat().st_size).walk()
    except OSError as error:
        raise StartError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise StartError(f"{path} is not a whole GGUF file: {error}") from None


class _Header:
    """A cursor over a GGUF header. Raises ValueError where the file does not go on as its format says."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._size = size

    def walk(self) -> None:
        if self._file.read(4) != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        if self._number("<I") not in (2, 3):
            raise ValueError("it is of an unknown version")
        num_tensors, num_fields = self._number("<Q"), self._number("<Q")
        for _ in range(num_fields):
            self._skip(self._number("<Q"))
            self._skip_value(self._number("<I"))
        for _ in range(num_tensors):
            self._skip(self._number("<Q"))
            num_dims = self._number("<I")
            if num_dims > 8:
                raise ValueError(f"a tensor has {num_dims} dimensions")
            self._skip(8 * num_dims + 4)
            if self._number("<Q") >= self._size:
                raise ValueError("a tensor lies behind its end")

    def _skip_value(self, kind: int) -> None:
        if kind == GGUF_TEXT:
            self._skip(self._number("<Q"))
        elif kind == GGUF_ARRAY:
            inner, count = self._number("<I"), self._number("<Q")
            if inner in GGUF_BYTES:
                self._skip(GGUF_BYTES[inner] * count)
            else:
                for _ in range(count):
                    self._skip_value(inner)
        elif kind in GGUF_BYTES:
            self._skip(GGUF_BYTES[kind])
        else:
            raise ValueError(f"it has a field of the unknown type {kind}")

    def _number(self, form: str) -> int:
        data = self._file.read(struct.calcsize(form))
        if len(data) < struct.calcsize(form):
            raise ValueError("its header is cut off")
        (value,) = struct.unpack(form, data)
        return int(value)

    def _skip(self, num_bytes: int) -> None:
        if self._file.tell() + num_bytes > self._size:
            raise ValueError("its header is cut off")
        self._file.seek(num_bytes, os.SEEK_CUR)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / (1 << 20):.1f} MiB"
