"""A figure: a table with its title and what has to be said about it, as text and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

Cell = str | float | None


@dataclass(frozen=True)
class Figure:
    """``rows`` have a cell for each of ``columns``; ``sizes`` is what was measured, ``notes`` what the table does not
    say."""

    name: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()
    sizes: Mapping[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        """The table in Markdown, under its title and over its notes."""
        lines = [self.columns, *([cell_text(cell) for cell in row] for row in self.rows)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        written = [
            "| " + " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) + " |"
            for line in lines
        ]
        written.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
        return "\n".join([f"{self.name}: {self.title}", "", *written, "", *self.notes]).rstrip()

    def write(self, folder: Path) -> Path:
        """Put the figure into ``folder`` as JSON, numbers unrounded."""
        path = folder / f"{self.name}.json"
        path.write_text(json.dumps(asdict(self), indent=1) + "\n")
        return path


def cell_text(cell: Cell) -> str:
    """A number with three digits, or all digits before its point if there are more; nothing for None."""
    if cell is None:
        return ""
    if isinstance(cell, float):
        return f"{cell:.0f}" if abs(cell) >= 100 else f"{cell:.3g}"
    return str(cell)
