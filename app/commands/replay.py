"""Run a recording through the scheduler again, and draw its timeline.

Exit code 0: the same decisions; 3: another one, which is named.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from app import charts
from app.scheduler.recording import BadRecording, Recording, read
from app.scheduler.replay import Replayed, TickView, replay

EXIT_DIFFERENT = 3
BARS = " ▁▂▃▄▅▆▇█"

LINES: tuple[tuple[str, Callable[[TickView], float]], ...] = (
    ("decode rows", lambda tick: sum(1 for row in tick.rows if row[2] == 1)),
    ("chunk tokens", lambda tick: sum(row[2] for row in tick.rows if row[2] > 1)),
    ("waiting", lambda tick: tick.num_waiting),
    ("requeued", lambda tick: tick.num_requeued),
    ("blocks held", lambda tick: tick.live_blocks),
    ("milliseconds", lambda tick: tick.seconds * 1000),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, help="a recording: from MLXCEL_RECORD_DIR, or GET /v1/recording")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the requests over time (.svg, .png, .pdf)")
    parser.add_argument("--width", type=int, default=100, metavar="N", help="columns of the timeline; 100")


def run(arguments: argparse.Namespace) -> int:
    """Raises BadRecording and NoPlots."""
    recording = read(arguments.file)
    try:
        replayed = replay(recording)
        lines = describe(recording, replayed, max(arguments.width, 1))
    except Exception as error:  # what it holds has the right form and makes no sense
        raise BadRecording(f"{arguments.file} is damaged: {type(error).__name__}: {error}") from error
    print("\n".join(lines))
    if arguments.plot and replayed.ticks:
        charts.draw_recording(replayed.ticks, arguments.plot)
    return EXIT_DIFFERENT if replayed.difference else 0


def describe(recording: Recording, replayed: Replayed, width: int) -> list[str]:
    """The verdict and the timeline, as lines of text."""
    ticks = replayed.ticks
    last = recording.first_tick + recording.num_ticks - 1
    books = recording.checkpoint.books
    lines = [
        f"ticks {recording.first_tick} to {last}, {len(recording.requests)} requests,"
        f" {books.num_blocks} blocks of {books.block_size} tokens",
    ]
    if replayed.difference:
        lines.append(f"the first decision that differs: {replayed.difference}")
    else:
        lines.append("replayed to the same decisions")
    if not ticks:
        return lines
    lines += [f"{tick.tick}: lost with the whole pool" for tick in ticks if tick.outcome == "lost"]
    if ticks[-1].outcome == "open":
        lines.append(f"{ticks[-1].tick}: had not ended")
    per_column = -(-len(ticks) // width)
    seconds = ticks[-1].began_s + ticks[-1].seconds - ticks[0].began_s
    lines.append(
        f"\n{seconds:.2f} s, {per_column} ticks a column, the highest value of each; at the right the highest of all"
    )
    for name, read_value in LINES:
        lines.append(_line(name, [read_value(tick) for tick in ticks], per_column))
    return lines


def _line(name: str, values: Sequence[float], per_column: int) -> str:
    peaks = [max(values[i : i + per_column]) for i in range(0, len(values), per_column)]
    most = max(peaks)
    bars = "".join(BARS[math.ceil(peak * (len(BARS) - 1) / most)] if most else BARS[0] for peak in peaks)
    return f"{name:>12} |{bars}| {most:.0f}"
