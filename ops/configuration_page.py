"""Writes docs/configuration.md out of the settings themselves: ``python -m ops.configuration_page``."""

from __future__ import annotations

import sys

from app.settings import ALIASES, Settings, shown, variable
from app.variables import LLAMA_NAMES


def render_docs() -> str:
    """The text of docs/configuration.md."""
    lines = [
        "# Configuration",
        "",
        "<!-- Written by `make docs`; a test keeps it equal to app/settings.py. -->",
        "",
        "Everything is set by environment variables. `mlxcel serve` takes each one as a flag too, keys apart:",
        "`MLXCEL_MAX_BATCH_SIZE=8` is `--max-batch-size 8`, and a flag beats the environment. An empty value is unset,",
        "except for keys: a secret that came out empty stops the start.",
        "A name that is not listed here, a value that is not allowed, or two settings at odds with each other stop the",
        "start with one line. `mlxcel serve --check` prints what every setting resolved to, and where from.",
        "",
        "`LLAMA_ARG_...` and `LLAMA_API_KEY` are llama-server's names. They take the values that they take there, and",
        "count where the `MLXCEL_` name is unset. One that is not listed is named in a warning at the start.",
        "",
        "| variable | default | meaning |",
        "|---|---|---|",
    ]
    for name, field in Settings.model_fields.items():
        default = "unset" if field.default_factory or name == "cache_dir" else shown(name, field.default)
        llama = [alias for alias, (field_name, _) in LLAMA_NAMES.items() if field_name == name]
        also = "".join(f"; also `{alias}`" for alias in (*ALIASES.get(name, ()), *llama))
        lines.append(f"| `{variable(name)}` | {default} | {field.description}{also} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(render_docs())
