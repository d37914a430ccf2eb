"""Writes docs/models.md out of what ops/families/coverage.json has: ``python -m ops.models_page``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "models.md"
COVERAGE = ROOT / "ops" / "families" / "coverage.json"
TOLERANCE = 1e-4

PAGE_TEXT = """# Models

<!-- Written by `make docs` from ops/families/coverage.json. Tests keep it equal to that, and that to what is found. -->

Every family of mlx-lm {version}, tried on a model of about three layers with random weights (`ops/families`). A second
word in a name is another config of the same module. Which path a model takes is decided when it is loaded, by looking
at its caches and by a probe, and never by this table; the log and `decode_path` in `/props` say it.

| path | families | |
|---|---|---|
| ragged paged | {num_served} | one forward a tick over rows of any length, prompts in chunks, shared prefixes |
| refused | {num_refused} | the server does not start, and says why in one line |
| untried | {num_untried} | there is no tiny model, for the reason given |

All differences are the largest of any logit, as a part of the largest logit, in float32 on a CPU. What is above
{tolerance:g} is in bold.

## Served

The difference is that of the ragged step from the model's own forward, with four prompts that join one after the other
and are read one to four tokens at a time.

A layer with a sliding window keeps a `RotatingKVCache` in mlx-lm, which drops what lies behind the window. Here the
blocks behind it stay until the request ends, like those of other layers, and attention skips them: such a layer costs
the time of its window and the memory of the whole context, and prefixes are shared as in any other model. Where mask
and cache of a model disagree on its window, by a token in plamo3, the mask counts.

{served}
## Refused

What mlx-lm itself can do with these is what there is to build on. *Batch*: the difference of its own batches from each
row alone, while rows are merged, join, leave and go on alone; or the operation on caches that failed. *Chunks*: the
difference of a prompt read three tokens at a time from the same read at once. *Prefix*: what a later request could take
over: caches that can be trimmed to where two prompts part, or only the whole state at the end of one.

{refused}
What the caches of these can do in a batch:

{operations}
## Untried

{untried}"""


def render_page() -> str:
    """The text of docs/models.md."""
    document = json.loads(COVERAGE.read_text())
    served, refused, untried = (
        {name: entry for name, entry in document["families"].items() if entry["path"] == path}
        for path in ("ragged paged", "refused", "untried")
    )
    operations = dict(sorted(pair for entry in refused.values() for pair in entry["operations"].items()))
    return PAGE_TEXT.format(
        version=document["mlx_lm"],
        num_served=len(served),
        num_refused=len(refused),
        num_untried=len(untried),
        tolerance=TOLERANCE,
        served=_table(
            ("family", "layers keep", "difference"),
            [(name, _caches(entry), _number(entry["parity"])) for name, entry in served.items()],
        ),
        refused=_table(
            ("family", "layers keep", "refused because", "batch", "chunks", "prefix"),
            [
                (name, _caches(entry), entry["why"], _batch(entry), _number(entry["chunks"]), entry["prefix"])
                for name, entry in refused.items()
            ],
        ),
        operations=_table(
            ("cache", "operations"), [(cache, ", ".join(each) or "none") for cache, each in operations.items()]
        ),
        untried=_table(("family", "why"), [(name, entry["why"]) for name, entry in untried.items()]),
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---"] * len(head)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, rule, *rows))


def _caches(entry: dict[str, Any]) -> str:
    return ", ".join(entry["caches"])


def _batch(entry: dict[str, Any]) -> str:
    return _number(entry["parity"]) if "parity" in entry else entry["unbatchable"]


def _number(digit: str) -> str:
    return digit if float(digit) <= TOLERANCE else f"**{digit}**"


if __name__ == "__main__":
    PAGE.write_text(render_page())
