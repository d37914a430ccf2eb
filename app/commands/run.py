"""Chat with a model in this process, without a server.

With -p, or with a prompt that is piped in, there is one answer; on a terminal a conversation.
"""

from __future__ import annotations

import argparse
import sys

from app.commands import options
from app.errors import StartError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    options.add_arguments(parser)
    parser.add_argument("--max-tokens", type=int, metavar="N", help="length of an answer; unset: to the window's end")
    parser.add_argument("--system", metavar="TEXT", help="the system message that the conversation begins with")


def run(arguments: argparse.Namespace) -> int:
    """Raises MlxcelError as ``once.answer_once`` and ``repl.talk`` do."""
    from app.conversation import Conversation  # here and below, so that --help does not wait for it

    settings, prompt = options.settings(arguments), options.prompt(arguments)
    conversation = Conversation(arguments.system, options.fields(arguments))
    body = conversation.asked(prompt or "")  # refuses bad fields before anything is loaded
    if prompt is not None:
        from app.once import answer_once

        answer_once(settings, body, arguments.json)
        return 0
    if arguments.json or not sys.stdout.isatty():
        raise StartError(
            "no prompt: give one with -p, or pipe it in; a conversation needs a terminal and takes no --json"
        )
    from app.local import opened
    from app.repl import Lines, talk
    from app.settings import foreign_variables

    is_plain = foreign_variables("TERM").get("TERM", "dumb") == "dumb"
    with opened(settings) as model:
        talk(model, conversation, Lines(settings.cache_dir / "history", is_plain))
    return 0
