"""Checksums of a model's folder: ``sums.py write FOLDER`` makes SHA256SUMS, ``sums.py check FOLDER FILE`` compares."""

import hashlib
import sys
from pathlib import Path

NAME = "SHA256SUMS"


def sums_of(folder: Path) -> str:
    """One line a file, as sha256sum writes them."""
    lines = []
    for file in sorted(path for path in folder.rglob("*") if path.is_file() and path.name != NAME):
        with file.open("rb") as data:
            lines.append(f"{hashlib.file_digest(data, 'sha256').hexdigest()}  {file.relative_to(folder).as_posix()}\n")
    return "".join(lines)


def main(command: str, folder: str, wanted: str = "") -> None:
    found = sums_of(Path(folder).expanduser())
    if command == "write":
        (Path(folder).expanduser() / NAME).write_text(found)
    elif found != Path(wanted).read_text():
        raise SystemExit(f"sums: {folder} is not what {wanted} says: copied badly, or changed since")


if __name__ == "__main__":
    main(*sys.argv[1:])
