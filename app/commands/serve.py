"""Answer HTTP requests.

Every flag is also a variable: --port is MLXCEL_PORT. A flag wins.
"""

from __future__ import annotations

import argparse
import json
import logging
import shlex
import shutil
import sys

from app import logs
from app.serve import serve
from app.settings import Settings, flags_of, load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = __doc__
    parser.add_argument("--check", action="store_true", help="print every setting and its source, then exit")
    for name, field in Settings.model_fields.items():
        if flags := flags_of(name):
            # A switch may stand alone: --enable-preemption is --enable-preemption true.
            alone = {"nargs": "?", "const": "true"} if field.annotation is bool else {}
            help_text = (field.description or "").replace("%", "%%")
            parser.add_argument(*flags, dest=name, metavar="VALUE", help=help_text, **alone)  # type: ignore[arg-type]


def run(arguments: argparse.Namespace) -> int:
    """Raises StartError as ``settings.load`` and ``serve`` do."""
    settings = load(flags={name: value for name, value in vars(arguments).items() if name in Settings.model_fields})
    if arguments.check:
        _print_settings(settings)
        return 0
    try:
        return _serve(settings)
    except KeyboardInterrupt:  # before the server has taken its signals over
        return 0


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
