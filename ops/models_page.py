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
| ragged paged | {num_ragged} | one forward a tick over rows of any length, prompts in chunks, shared prefixes |
| dense native batched | {num_batched} | one forward a tick for all rows that draw, prompts in chunks, each on its own |
| per-row fallback | {num_rows} | a forward for each row: many requests make no more tokens together than one |
| one row at a time | {num_alone} | one request at a time: what a model has read is not in its caches alone |
| refused | {num_refused} | the server does not start, and says why in one line |
| untried | {num_untried} | there is no tiny model, for the reason given |

## What can be loaded

* **Folders** with `config.json`, safetensors and a tokenizer, as MLX and Hugging Face have them, also quantised ones
  with different bits in different layers. On a CPU all of it is unpacked to float32 (`MLXCEL_WEIGHT_DTYPE`), or refused
  with the sum where that does not fit.
* **GGUF files** of the architectures llama, qwen2, qwen3 and gemma, with the tensor types MLX reads (F32, F16, Q4_0,
  Q4_1 and Q8_0 as they are, some others unpacked), and vocabularies of byte-level BPE (gpt-2, smollm, llama-bpe,
  qwen2) or of SentencePiece. Rotary embeddings that are scaled, and parts of split files, are refused by name.
* **Adapters** that mlx-lm's training has written: `MLXCEL_ADAPTER`.
* **Models that see**: their text part, on the path of its family. A picture in a message is refused by name.

## Families

All differences are the largest of any logit, as a part of the largest logit, in float32 on a CPU. What is above
{tolerance:g} is in bold.

The difference is that of a path from the model's own forward of a whole prompt, with four prompts that join one after
the other and are read one to four tokens at a time.

### Ragged paged

A layer with a sliding window keeps a `RotatingKVCache` in mlx-lm, which drops what lies behind the window. Here such
layers have blocks of their own where the context may be more than twice the window, and those behind it are given
back while the request runs; prefixes are shared as in any other model. A prompt takes the blocks of its whole length
when it is admitted, and the KV budget counts it so. What metrics and `/v1/cache/stats` count as blocks are those of
all groups. Where full and sliding layers keep different shapes (mimo_v2_flash), all blocks stay until the request
ends. Where mask and cache of a model disagree on its window, by a token in plamo3, the mask counts.

{ragged}
### From mlx-lm's own caches

Families whose layers keep a state that is not keys and values of single tokens, or that attend without asking for the
function which this server takes the place of. Each request has mlx-lm's caches of its own while its prompt is read.
Where those can be merged, all rows that draw then share one forward; their caches are padded to the longest, and the
longest rows stay outside where that would take more than the whole pool. Prefixes are not shared on these two paths; a
chat that goes on begins from a snapshot of the whole state at the end of its history, before the answer's own turn is
opened. Snapshots come on top of the pool, as much as a fifth of it and a state for each slot, and go by
`MLXCEL_PROMPT_CACHE_TTL`. What a request held is freed with the next step, so the last one's stays while a server is
idle. Nothing is speculated, no step is submitted ahead, and deterministic mode is refused. Blocks are counted all the
same, for admission: what a token takes, and what a request takes besides, is looked at when the model is loaded.
`MLXCEL_DECODE_STORAGE_BACKEND=dense` chooses this way for any model, `paged` rules it out.

{dense}
### Refused

{refused}
### Untried

{untried}"""


def render_page() -> str:
    """The text of docs/models.md."""
    document = json.loads(COVERAGE.read_text())
    entries = document["families"].items()
    ragged, batched, rows, alone, refused, untried = (
        {name: entry for name, entry in entries if entry["path"] == path}
        for path in (
            "ragged paged",
            "dense native batched",
            "per-row fallback",
            "one row at a time",
            "refused",
            "untried",
        )
    )
    return PAGE_TEXT.format(
        version=document["mlx_lm"],
        num_ragged=len(ragged),
        num_batched=len(batched),
        num_rows=len(rows),
        num_alone=len(alone),
        num_refused=len(refused),
        num_untried=len(untried),
        tolerance=TOLERANCE,
        ragged=_table(
            ("family", "layers keep", "difference"),
            [(name, _caches(entry), _number(entry["parity"])) for name, entry in ragged.items()],
        ),
        dense=_table(
            ("family", "layers keep", "path", "difference", "not on a better path because"),
            [
                (name, _caches(entry), entry["path"], _number(entry["parity"]), _why(entry))
                for name, entry in sorted((batched | rows).items(), key=lambda item: item[0].lower())
            ],
        ),
        refused=_table(
            ("family", "layers keep", "because"),
            [(name, _caches(entry), _why(entry)) for name, entry in refused.items()],
        ),
        untried=_table(("family", "why"), [(name, entry["why"]) for name, entry in untried.items()]),
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    rule = ["---"] * len(head)
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, rule, *rows))


def _caches(entry: dict[str, Any]) -> str:
    return ", ".join(entry["caches"])


def _why(entry: dict[str, Any]) -> str:
    return "; ".join(f"{path}: {why}" for path, why in entry["why"].items())


def _number(digit: str) -> str:
    return digit if float(digit) <= TOLERANCE else f"**{digit}**"


if __name__ == "__main__":
    PAGE.write_text(render_page())
