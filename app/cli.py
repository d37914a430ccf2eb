"""The ``mlxcel`` command: argv in, exit code out. What a command does lives elsewhere."""

from __future__ import annotations

import argparse
import json
import logging
import shlex
import shutil
import sys
from collections.abc import Sequence
from typing import NoReturn

from app import logs, replay, simulate
from app.errors import MlxcelError, StartError
from app.serve import leave, serve
from app.setting_types import nearest
from app.settings import Settings, flags_of, load

EXIT_START = 1
# Commands that need no model and read no variables.
TOOLS = {"simulate": simulate, "replay": replay}


class _Parser(argparse.ArgumentParser):
    """An argument parser whose every complaint is one line, as for a bad variable."""

    def error(self, message: str) -> NoReturn:
        raise StartError(f"{message}; see {self.prog} --help")


def entry() -> NoReturn:
    """The installed command: run ``main`` and end the process with its exit code."""
    leave(main())


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. ``argv`` defaults to the process's own."""
    parser = _build_parser()
    try:
        arguments, unknown = parser.parse_known_args(argv)
        if unknown:
            known = [flag for field in Settings.model_fields for flag in flags_of(field)]
            near = nearest(unknown[0], known) if arguments.command == "serve" else ""
            raise StartError(f"{unknown[0]} is not a known flag{near}; see {parser.prog} {arguments.command} --help")
        if arguments.command in TOOLS:
            return int(TOOLS[arguments.command].run(arguments))
        flags = {name: value for name, value in vars(arguments).items() if name in Settings.model_fields and value}
        settings = load(flags=flags)
        if arguments.check:
            _print_settings(settings)
            return 0
        return _serve(settings)
    except MlxcelError as error:
        print(f"mlxcel: {error}", file=sys.stderr)
        return EXIT_START
    except KeyboardInterrupt:
        return 0


def _build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="mlxcel", description="OpenAI-compatible inference server on MLX.", allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", parser_class=_Parser)
    command = commands.add_parser(
        "serve",
        help="answer HTTP requests",
        description="Serve a model over HTTP. Every flag is also a variable: --port is MLXCEL_PORT. A flag wins.",
        allow_abbrev=False,
    )
    command.add_argument("--check", action="store_true", help="print every setting and its source, then exit")
    for name, field in Settings.model_fields.items():
        if flags := flags_of(name):
            # A switch may stand alone: --enable-preemption is --enable-preemption true.
            alone = {"nargs": "?", "const": "true"} if field.annotation is bool else {}
            help_text = (field.description or "").replace("%", "%%")
            command.add_argument(*flags, dest=name, metavar="VALUE", help=help_text, **alone)  # type: ignore[arg-type]
    for name, tool in TOOLS.items():
        about = (tool.__doc__ or "").splitlines()[0]
        tool.add_arguments(commands.add_parser(name, help=about, description=about, allow_abbrev=False))
    return parser


def _print_settings(settings: Settings) -> None:
    rows = settings.describe()
    widths = [max(len(row[column]) for row in rows) for column in (0, 1)]
    for variable, value, source in rows:
        print(f"{variable:{widths[0]}}  {value:{widths[1]}}  {source}")
    for name in settings.unused:
        print(f"{name} has no counterpart here and does nothing", file=sys.stderr)
    print(f"fingerprint {settings.fingerprint}")


def _serve(settings: Settings) -> int:
    from app.runtime import Runtime  # here, so that --check and --help do not wait for it

    logs.configure(settings)
    for name in settings.unused:
        logging.getLogger("mlxcel").warning("%s is set and has no counterpart here: it does nothing", name)

    def announce() -> None:
        logging.getLogger("mlxcel").info("ready on %s; try:", _root_url(settings))
        print(f"\n{try_line(settings)}\n", flush=True)

    return serve(settings, Runtime, announce)


def _root_url(settings: Settings) -> str:
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(settings.host, settings.host)
    scheme = "https" if settings.ssl_cert_file else "http"
    return f"{scheme}://[{host}]:{settings.port}" if ":" in host else f"{scheme}://{host}:{settings.port}"


def try_line(settings: Settings) -> str:
    """A shell line that asks this server a question, with curl where it is installed, else with Python alone.

    It does not check a certificate: that is made out to a name, and the line asks this machine by its number.
    """
    url = f"{_root_url(settings)}/v1/chat/completions"
    model = next((name for name in settings.model_alias if name != "*"), None)
    body = json.dumps(
        ({"model": model} if model else {})
        | {"messages": [{"role": "user", "content": "What is the capital of France?"}], "temperature": 0}
    )
    headers = {"Content-Type": "application/json"}
    if settings.api_keys or settings.api_key_file:
        headers["Authorization"] = "Bearer YOUR_KEY"
    if shutil.which("curl"):
        words = ["curl", "-sk" if settings.ssl_cert_file else "-s", url, "-d", body]
        for name, value in headers.items():
            words += ["-H", f"{name}: {value}"]
        return shlex.join(words)
    request = f"Request({json.dumps(url)}, {json.dumps(body)}.encode(), {json.dumps(headers)})"
    unchecked = ", context=__import__('ssl')._create_unverified_context()" if settings.ssl_cert_file else ""
    program = f"from urllib.request import *; print(urlopen({request}{unchecked}).read().decode())"
    return shlex.join(["python3", "-c", program])
