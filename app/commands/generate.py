"""Continue a text in this process, without a server.

The prompt goes to the model as it stands, without its chat template: what comes is how the text goes on.
"""

from __future__ import annotations

import argparse

from app.commands import options
from app.errors import StartError

DEFAULT_TOKENS = 100  # as mlx_lm.generate has it


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    options.add_arguments(parser)
    parser.add_argument(
        "--max-tokens", type=int, default=DEFAULT_TOKENS, metavar="N", help=f"most new tokens; {DEFAULT_TOKENS}"
    )


def run(arguments: argparse.Namespace) -> int:
    """Raises MlxcelError as ``once.answer_once`` does."""
    from app.api.parse import parse  # here, so that --help does not wait for it
    from app.api.protocol import CompletionBody
    from app.once import answer_once

    settings, prompt = options.settings(arguments), options.prompt(arguments)
    if prompt is None:
        raise StartError("there is no text to continue: give it with -p, or pipe it in")
    answer_once(settings, parse(CompletionBody, {**options.fields(arguments), "prompt": prompt}), arguments.json)
    return 0
