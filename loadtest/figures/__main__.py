"""``make figures``: what single mechanisms cost or bring on the embedded model, one table each.

Run nothing else meanwhile. Columns that name another model or machine repeat figures published for a server of the same
design there: the shape is to be compared, not the numbers. Writes JSON, and each server's log, to a folder.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from loadtest.contestants import ROOT
from loadtest.figures import attention, behind, chunk, lookahead, prefix, scheduler, speculation, watermark
from loadtest.figures.figure import Figure

FIGURES: dict[str, Callable[[Path, bool], Figure]] = {
    "watermark": watermark.measure,
    "chunk": chunk.measure,
    "behind": behind.measure,
    "prefix": prefix.measure,
    "attention": attention.measure,
    "scheduler": scheduler.measure,
    "speculation": speculation.measure,
    "lookahead": lookahead.measure,
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m loadtest.figures", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(FIGURES)}; none: all of them")
    parser.add_argument("--small", action="store_true", help="small sizes, to see that everything works")
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "figures")
    options = parser.parse_args()
    if unknown := set(options.names) - FIGURES.keys():
        parser.error(f"no such figure: {', '.join(sorted(unknown))}")
    options.out.mkdir(parents=True, exist_ok=True)
    for name in options.names or FIGURES:
        began_s = time.monotonic()
        figure = FIGURES[name](options.out.resolve(), options.small)
        path = figure.write(options.out)
        print(f"{figure.text()}\n", flush=True)
        print(f"{path} after {time.monotonic() - began_s:.0f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
