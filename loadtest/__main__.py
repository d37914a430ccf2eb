"""``python -m loadtest run NAME...|all|smoke`` judges a server, ``... compare NAME`` sets two side by side.

Without ``--host`` the server is started here, with the settings of each scenario. Results go to ``--out``: report.html,
junit.xml, and a folder for each scenario. Exit code 0: all passed; 1: one failed; 2: one was invalid, or could not run.
"""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path

from loadtest.contestants import ROOT
from loadtest.junit import junit_xml
from loadtest.report import page, table
from loadtest.run import Options, keep, perform
from loadtest.scenario import Scenario, names, scenario
from loadtest.verdict import Outcome, Verdict

EXIT_CODES = {Outcome.PASSED: 0, Outcome.FAILED: 1, Outcome.INVALID: 2}


def main(argv: list[str] | None = None) -> int:
    parser = _parser()
    given = parser.parse_args(argv)
    try:
        chosen = _chosen(given.names)
    except KeyError as error:
        parser.error(str(error.args[0]))
    options = Options(
        out=given.out,
        time=given.time,
        load=given.load,
        small=given.small or given.names == ["smoke"],
        host=given.host,
        api_key=given.api_key,
        model=given.model,
        baseline=given.baseline,
        settings=dict(pair.split("=", 1) for pair in given.set),
    )
    options.out.mkdir(parents=True, exist_ok=True)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # unwinds, so that what was started is ended too
    try:
        if given.command == "compare":
            return _compare(chosen, options, given.peer)
        return _run(chosen, options, given.keep)
    except RuntimeError as error:
        print(f"loadtest: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m loadtest", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for command, text in (("run", "run scenarios and judge them"), ("compare", "run them against two servers")):
        one = commands.add_parser(command, help=text)
        one.add_argument("names", nargs="+", metavar="NAME", help=f"{', '.join(names())}; all; smoke: the small ones")
        one.add_argument("--host", help="URL of a server that runs already (unset: start one)")
        one.add_argument("--api-key", help="key for it")
        one.add_argument("--model", default="embedded", help="model of a server that is started")
        one.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="another MLXCEL_NAME for it")
        one.add_argument("--time", type=float, default=1.0, help="factor on durations")
        one.add_argument("--load", type=float, default=1.0, help="factor on users and arrival rates")
        one.add_argument("--small", action="store_true", help="the short shapes of the smoke test")
        one.add_argument("--out", type=Path, default=ROOT / "build" / "loadtest")
        one.add_argument("--baseline", type=Path, help="folder of kept runs to judge against")
    commands.choices["run"].add_argument("--keep", action="store_true", help="keep runs that pass as that baseline")
    commands.choices["compare"].add_argument("--peer", help="URL of the other server (unset: start mlx-lm's own)")
    return parser


def _chosen(given: list[str]) -> list[Scenario]:
    if given == ["all"]:
        given = names()
    if given == ["smoke"]:
        return [one for one in map(scenario, names()) if one.small]
    return [scenario(name) for name in given]


def _run(chosen: list[Scenario], options: Options, keeps: bool) -> int:
    from loadtest.plots import plots

    verdicts: list[Verdict] = []
    drawn: dict[str, dict[str, str]] = {}
    for one in chosen:
        print(f"{one.name}: {one.proves}", file=sys.stderr, flush=True)
        run, verdict = perform(one, options)
        print(f"{one.name}: {verdict.outcome.value}", file=sys.stderr, flush=True)
        verdicts.append(verdict)
        drawn[one.name] = plots(run, one.small_one() if options.small else one, verdict.measures)
        # After each: what has been run is there to be read if the rest is broken off.
        (options.out / "report.html").write_text(page(verdicts, drawn, {one.name: one.proves for one in chosen}))
        (options.out / "junit.xml").write_bytes(junit_xml(verdicts))
        if keeps and verdict.outcome is Outcome.PASSED:
            keep(verdict, options)
    print(table(verdicts))
    print(f"\nwritten: {options.out / 'report.html'}, {options.out / 'junit.xml'}")
    return max(EXIT_CODES[verdict.outcome] for verdict in verdicts)


def _compare(chosen: list[Scenario], options: Options, peer_url: str | None) -> int:
    from loadtest.compare import compare

    for one in chosen:
        print(f"{one.name}: {one.proves}\n{compare(one, options, peer_url)}\n", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
