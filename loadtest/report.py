"""Verdicts for people: a table for the terminal, and one HTML page with the plots in it."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from string import Template

from loadtest.verdict import Verdict

TABLE = ("requests", "answers", "refused", "tokens_out_per_s", "ttft_p50_s", "ttft_p95_s", "itl_p50_s", "itl_p95_s")
PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Load test</title><style>
body { font: 15px/1.4 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; margin: 1em 0 } td, th { border: 1px solid #ccc; padding: .2em .6em }
.passed { color: #17692b } .failed { color: #b00020 } .invalid { color: #9a5b00 } svg { max-width: 100%; height: auto }
</style></head><body><h1>Load test</h1>
$sections
</body></html>
""")


def table(verdicts: Sequence[Verdict]) -> str:
    """One line a scenario, then what is against each of them."""
    rows = [["scenario", "verdict", *TABLE]]
    rows += [
        [one.scenario, one.outcome.value, *(_number(one.measures.get(name)) for name in TABLE)] for one in verdicts
    ]
    lines = [columns(rows)]
    for one in verdicts:
        lines += [f"{one.scenario}: {reason}" for reason in one.reasons]
        lines += [f"{one.scenario}: note: {note}" for note in one.notes]
    return "\n".join(lines)


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Cells in columns as wide as they must be."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def page(verdicts: Sequence[Verdict], plots: Mapping[str, Mapping[str, str]], proves: Mapping[str, str]) -> str:
    """The HTML report. ``plots`` are SVG elements by scenario and title, ``proves`` what each scenario is for."""
    sections = [_section(one, plots.get(one.scenario, {}), proves.get(one.scenario, "")) for one in verdicts]
    return PAGE.substitute(sections="\n".join(sections))


def _section(verdict: Verdict, plots: Mapping[str, str], proves: str) -> str:
    outcome = verdict.outcome.value
    parts = [f'<h2>{html.escape(verdict.scenario)}: <span class="{outcome}">{outcome}</span></h2>']
    parts.append(f"<p>{html.escape(proves)}</p>")
    texts = [*verdict.reasons, *verdict.notes]
    parts += ["<ul>", *(f"<li>{html.escape(text)}</li>" for text in texts), "</ul>"] if texts else []
    checks = [
        [check.name, _number(check.value), check.limit, "yes" if check.holds else "NO"] for check in verdict.checks
    ]
    parts.append(_html_table(["check", "value", "wanted", "holds"], checks))
    parts += [f"<h3>{html.escape(title)}</h3>{svg}" for title, svg in plots.items()]
    measures = [[name, _number(value)] for name, value in sorted(verdict.measures.items())]
    parts.append(f"<details><summary>All measures</summary>{_html_table(['measure', 'value'], measures)}</details>")
    return "\n".join(parts)


def _html_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["<tr>" + "".join(f"<th>{html.escape(cell)}</th>" for cell in header) + "</tr>"]
    lines += ["<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows]
    return f"<table>{''.join(lines)}</table>"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
