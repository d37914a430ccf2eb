"""The ``mlxcel`` command: argv in, exit code out. Each command is a module of ``app.commands``."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import NoReturn

from app.commands import doctor, generate, import_gguf, models, replay, run, serve, simulate
from app.errors import MlxcelError, StartError
from app.screen import printable
from app.serve import leave
from app.setting_types import nearest

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130  # as shells have it: 128 and the number of the signal
EXIT_PIPE = 141

# Each has ``add_arguments(parser)`` and ``run(arguments)``, which gives the exit code; its first line is its help.
COMMANDS = {
    "serve": serve,
    "run": run,
    "generate": generate,
    "import": import_gguf,
    "models": models,
    "doctor": doctor,
    "simulate": simulate,
    "replay": replay,
}


class _Parser(argparse.ArgumentParser):
    """An argument parser whose every complaint is one line, as for a bad variable."""

    def error(self, message: str) -> NoReturn:
        raise StartError(f"{message}; see {self.prog} --help")


def entry() -> NoReturn:
    """The installed command: run ``main`` and end the process with its exit code."""
    if sys.stdout is None:  # the shell has closed it (>&-): nobody wants to read
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # what the locale cannot show must not cost the rest
    leave(main())


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. ``argv`` defaults to the process's own."""
    parser = _build_parser()
    try:
        arguments, unknown = parser.parse_known_args(argv)
        if unknown:
            if not unknown[0].startswith("-"):
                raise StartError(f"unexpected argument {unknown[0]}; see {parser.prog} {arguments.command} --help")
            near = nearest(unknown[0], arguments.flags)
            raise StartError(f"{unknown[0]} is not a known flag{near}; see {parser.prog} {arguments.command} --help")
        code = int(COMMANDS[arguments.command].run(arguments))
        sys.stdout.flush()
        return code
    except MlxcelError as error:
        print(f"mlxcel: {printable(str(error))}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        return EXIT_PIPE
    except OSError as error:  # a full disk, a folder that is not there: what it was written to is named
        where = "" if error.filename is None else f"{error.filename}: "
        print(f"mlxcel: {printable(where + (error.strerror or str(error)))}", file=sys.stderr)
        return EXIT_FAILED


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="mlxcel", description="OpenAI-compatible inference server on MLX.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"mlxcel {metadata.version('mlxcel')}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    for name, command in COMMANDS.items():
        about = (command.__doc__ or "").splitlines()[0]
        own = commands.add_parser(name, help=about, description=about, allow_abbrev=False)
        command.add_arguments(own)
        own.set_defaults(flags=[flag for action in own._actions for flag in action.option_strings])
    return parser
