"""The flags that ``run`` and ``generate`` share, and where their prompt comes from."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from app.errors import StartError
from app.settings import Settings, load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-p", "--prompt", metavar="TEXT", help="the prompt; - or none: what is piped in")
    parser.add_argument("--model", metavar="NAME", help="embedded, a folder, a .gguf file or a hub id; MLXCEL_MODEL")
    parser.add_argument(
        "--temperature", type=float, metavar="X", help="0: the likeliest token; unset: as the model says"
    )
    parser.add_argument("--seed", type=int, metavar="N", help="the same seed, the same draws; unset: a random one")
    parser.add_argument("--json", action="store_true", help="one JSON object: text, finish_reason, usage, timings")


def settings(arguments: argparse.Namespace) -> Settings:
    """Those of the environment, and of the flags. Raises StartError."""
    return load({"model": arguments.model})


def fields(arguments: argparse.Namespace) -> dict[str, Any]:
    """The fields of a request that the flags stand for; None where a flag was not given."""
    return {name: getattr(arguments, name) for name in ("max_tokens", "temperature", "seed")}


def prompt(arguments: argparse.Namespace) -> str | None:
    """The prompt that was given or piped in, without the newline that ends a file; None where a person sits at the
    terminal instead.

    Raises:
        StartError: it is empty, or no text.
    """
    text = arguments.prompt
    if text is None and sys.stdin is not None and sys.stdin.isatty():
        return None
    if text in (None, "-"):
        try:
            text = sys.stdin.buffer.read().decode().removesuffix("\n") if sys.stdin is not None else ""
        except UnicodeDecodeError as error:
            raise StartError(f"what is piped in is no UTF-8 text: {error.reason} at byte {error.start}") from None
    if not text:
        raise StartError("the prompt is empty: give one with -p, or pipe it in")
    return str(text)
