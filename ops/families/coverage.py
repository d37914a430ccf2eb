"""What every family of mlx-lm gets from this server, found by trying: ``python -m ops.families.coverage [FAMILY ...]``
writes coverage.json, anew or for these families."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import mlx.core as mx

from app.engine.paths import DENSE_PATHS
from app.errors import StartError
from ops.families import parity
from ops.families.tiny import described

PINNED = Path(__file__).parent / "coverage.json"
RAGGED, REFUSED, UNTRIED = "ragged paged", "refused", "untried"
SERVED = (RAGGED, *DENSE_PATHS)
TOLERANCE = 1e-4


def modules() -> list[str]:
    """Every module of ``mlx_lm.models`` with a ``Model``, its own or another's. None is imported for it."""
    spec = importlib.util.find_spec("mlx_lm")
    assert spec is not None
    assert spec.origin is not None
    return sorted(path.stem for path in (Path(spec.origin).parent / "models").glob("*.py") if _has_model(path))


def classify(family: str) -> dict[str, Any]:
    """What is found of one family. Numbers are texts of one digit: how near two ways of computing come depends on the
    machine, and only on which side of ``TOLERANCE`` they are is compared."""
    if family in described()["untried"]:
        return {"path": UNTRIED, "why": described()["untried"][family]}
    # On a CPU a server does not compile either: it takes a C++ compiler and, for each new function, long.
    mx.disable_compile()
    try:
        with mx.stream(mx.cpu):
            return _classify(family)
    finally:
        mx.enable_compile()


def comparable(found: dict[str, Any]) -> dict[str, Any]:
    """What must not change unseen."""
    return {name: _side(value) if name == "parity" else value for name, value in found.items()}


def document(families: dict[str, dict[str, Any]]) -> str:
    """The text of coverage.json."""
    whole = {"mlx_lm": metadata.version("mlx-lm"), "families": families}
    return json.dumps(whole, indent=1) + "\n"


def pinned() -> dict[str, Any]:
    return dict(json.loads(PINNED.read_text()))


def names() -> list[str]:
    """Every family there is a config for, and every one that is untried."""
    return sorted([*described()["families"], *described()["untried"]], key=str.lower)


def _classify(family: str) -> dict[str, Any]:
    """``why`` has what keeps it from each better path."""
    found: dict[str, Any] = {"path": REFUSED, "caches": _counted([_name(cache) for cache in parity.kept(family)])}
    why = {}
    for path in SERVED:
        try:
            difference = parity.staggered(family, path)
        except StartError as error:
            why[path] = _reason(str(error))
        else:
            found |= {"path": path, "parity": _digit(difference)}
            break
    return found | ({"why": why} if why else {})


def _reason(refusal: str) -> str:
    """The line without the family's name, and without a number that depends on the machine."""
    return re.sub(r" by \S+ of the largest.*", "", refusal.partition("cannot be served yet: ")[2])


def _has_model(path: Path) -> bool:
    return any(
        (isinstance(node, ast.ClassDef) and node.name == "Model")
        or (isinstance(node, ast.ImportFrom) and any((name.asname or name.name) == "Model" for name in node.names))
        for node in ast.parse(path.read_text()).body
    )


def _name(cache: Any) -> str:
    parts = getattr(cache, "caches", ())
    return type(cache).__name__ + (f" of {', '.join(map(_name, parts))}" if parts else "")


def _counted(names: list[str]) -> list[str]:
    return [f"{names.count(name)} {name}" for name in dict.fromkeys(names)]


def _digit(difference: float) -> str:
    return f"{difference:.0e}"


def _side(digit: str) -> str:
    return "equal" if float(digit) <= TOLERANCE else "apart"


def main(*asked: str) -> None:
    families = pinned()["families"] if asked else {}
    for family in asked or names():
        families[family] = classify(family)
        print(family, families[family])
    PINNED.write_text(document({name: families[name] for name in names()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
