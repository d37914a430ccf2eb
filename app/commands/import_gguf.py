"""Turn a .gguf file into a model folder in the cache folder.

The server does the same when MLXCEL_MODEL names the file, and finds this import. The folder's path goes to stdout.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from app.errors import StartError
from app.settings import load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument("file", type=Path, metavar="FILE.gguf", help="the file, which is left as it is")


def run(arguments: argparse.Namespace) -> int:
    """Raises StartError: the file cannot be imported, or the cache folder not be written."""
    from app.engine import preflight

    settings, file = load(), arguments.file
    if not file.exists():
        raise StartError(f"{file}: there is no such file")
    if file.is_dir():
        raise StartError(f"{file} is a folder, which needs no import: name it in MLXCEL_MODEL")
    if file.suffix != ".gguf" or not file.is_file():
        raise StartError(f"{file} is no .gguf file")
    preflight.check_files(str(file))
    from app.engine import gguf  # only now: MLX may crash on a broken header

    target = gguf.imported_directory(file, settings.cache_dir)
    gguf.import_gguf(file, target, _tell)
    print(target)
    return 0


def _tell(step: str) -> None:
    if sys.stderr.isatty():
        print(step, file=sys.stderr)
