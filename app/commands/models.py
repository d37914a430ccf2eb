"""List the models in the cache folder.

Models that mlx-lm or the hub keeps elsewhere are not among them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from app.errors import StartError
from app.screen import printable
from app.settings import load

IMPORTED = re.compile(r"(?P<name>.+)-[0-9a-f]{12}")  # as the import of a .gguf file names its folder


@dataclass(frozen=True, slots=True)
class Model:
    """``kind`` is its family and, where its weights are packed, with how many bits: "llama, 4 bits"."""

    name: str
    path: str
    size_bytes: int
    kind: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument("--json", action="store_true", help="as a JSON list")


def run(arguments: argparse.Namespace) -> int:
    """Raises StartError: the cache folder cannot be read."""
    folder = load().cache_dir
    try:
        models = list(found(folder))
    except OSError as error:
        raise StartError(f"MLXCEL_CACHE_DIR={folder} cannot be read: {error.strerror}") from None
    if arguments.json:
        print(json.dumps([asdict(model) for model in models], indent=1))
    elif models:
        widths = [max(len(text) for text in column) for column in zip(*map(_cells, models), strict=True)]
        for model in models:
            cells = zip(_cells(model), widths, strict=True)
            print("  ".join(f"{text:{width}}" for text, width in cells).rstrip())
    else:
        print(f"no models in {folder}", file=sys.stderr)
    return 0


def found(folder: Path) -> Iterator[Model]:
    """The models in ``folder`` by name, imports that were broken off among them: they take room."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        is_whole = (path / "config.json").is_file()
        if path.is_dir() and (is_whole or path.suffix == ".partial"):
            match = IMPORTED.fullmatch(path.name.removesuffix(".partial"))
            size_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
            kind = "import not finished" if path.suffix == ".partial" else _kind(path / "config.json")
            yield Model(match["name"] if match else path.name, str(path), size_bytes, kind)


def _kind(config: Path) -> str:
    try:
        known = json.loads(config.read_text(encoding="utf-8"))
        bits = known.get("quantization", {}).get("bits")
        return f"{known.get('model_type', 'unknown')}" + (f", {bits} bits" if bits else "")
    except (OSError, ValueError, AttributeError):
        return "broken config.json"


def _cells(model: Model) -> list[str]:
    return [printable(model.name), f"{model.size_bytes / 2**20:.1f} MiB", printable(model.kind), printable(model.path)]
