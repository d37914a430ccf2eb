"""The figures' pure parts: percentiles, gaps, counters of a scrape, tables; and the one that needs no model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtest.figures.figure import Cell, Figure, cell_text
from loadtest.figures.scheduler import Sizes, figure
from loadtest.figures.served import gaps_between, totals
from loadtest.waves import percentile


@pytest.mark.parametrize(
    ("values", "share", "want"),
    [
        ([3.0, 1.0, 2.0], 0.5, 2.0),
        ([4.0, 3.0, 2.0, 1.0], 0.5, 2.0),
        (range(1, 101), 0.95, 95),
        (range(1, 101), 0.99, 99),
        (range(1, 101), 1.0, 100),
        ([7.0], 0.95, 7.0),
        ([1.0, 2.0], 0.0, 1.0),
    ],
)
def test_a_percentile_is_a_value_that_was_measured(values: list[float], share: float, want: float) -> None:
    assert percentile(values, share) == want


def test_a_gap_belongs_to_the_span_that_holds_its_middle() -> None:
    moments = [0.0, 1.0, 3.0, 7.0, 7.5]
    assert gaps_between(moments, 0.0, 10.0) == [1.0, 2.0, 4.0, 0.5]
    assert gaps_between(moments, 1.9, 7.0) == [2.0, 4.0]
    assert gaps_between(moments, 2.1, 4.9) == []
    assert gaps_between(moments[:1], 0.0, 10.0) == []


def test_totals_are_those_of_the_named_counter() -> None:
    exposition = (
        "# TYPE mlxcel_batch_preemptions_total counter\n"
        'mlxcel_batch_preemptions_total{cause="priority"} 2.0\n'
        'mlxcel_batch_preemptions_total{cause="reclaim"} 13.0\n'
        "# TYPE mlxcel_prompt_cache_hits_total counter\n"
        "mlxcel_prompt_cache_hits_total 4.0\n"
    )
    assert totals(exposition, "mlxcel_batch_preemptions_total") == {"priority": 2, "reclaim": 13}
    assert totals(exposition, "mlxcel_batch_preemptions") == {}
    assert totals(exposition, "mlxcel_prompt_cache_hits_total") == {"": 4}


@pytest.mark.parametrize(
    ("cell", "want"),
    [(None, ""), (8, "8"), (10000, "10000"), ("9 / 9", "9 / 9"), (0.1, "0.1"), (1.2345, "1.23"), (1234.5, "1234")],
)
def test_a_cell_has_three_digits(cell: Cell, want: str) -> None:
    assert cell_text(cell) == want


def test_a_figure_is_a_markdown_table_and_json(tmp_path: Path) -> None:
    one = Figure("chunk", "two sizes", ("chunk", "ms"), ((512, 1.2345), (2048, None)), ("A note.",), {"rounds": 3})
    assert one.text().splitlines() == [
        "chunk: two sizes",
        "",
        "| chunk | ms   |",
        "|-------|------|",
        "| 512   | 1.23 |",
        "| 2048  |      |",
        "",
        "A note.",
    ]
    written = json.loads(one.write(tmp_path).read_text())
    assert written["rows"] == [[512, 1.2345], [2048, None]]
    assert written["sizes"] == {"rounds": 3}


def test_a_row_without_a_cell_for_each_column_is_no_table() -> None:
    with pytest.raises(ValueError, match="zip"):
        Figure("chunk", "", ("chunk", "ms"), ((512, 1.0, 2.0),)).text()


def test_the_scheduler_runs_under_a_queue() -> None:
    got = figure(Sizes(num_rows=4, num_queued=30, num_ticks=12, num_prompt=5))
    assert [row[0] for row in got.rows] == ["plan", "apply", "snapshot", "together"]
    assert all(isinstance(cell, float) and cell > 0 for row in got.rows for cell in row[1:])
    assert got.title == "4 rows, 30 requests in the queue, no engine, 12 ticks"
    assert got.notes == ("3.2 rows decode in a tick, 9 requests are admitted in all.",)
