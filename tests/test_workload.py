"""Workloads: generators keep their rate and shape, traces come back as they were written, bad lines are named."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from app.scheduler.workload import (
    COLUMNS,
    Arrival,
    BadTrace,
    Lengths,
    Shape,
    bursty,
    multi_turn,
    poisson,
    read_trace,
    tokens_of,
)

SHAPE = Shape(Lengths(10, 30), Lengths(5, 6), num_prefixes=2, num_shared=100)


def test_poisson_keeps_rate_and_shape_and_repeats_itself() -> None:
    arrivals = list(poisson(4000, 5.0, SHAPE, seed=1))
    assert arrivals == list(poisson(4000, 5.0, SHAPE, seed=1))
    assert arrivals != list(poisson(4000, 5.0, SHAPE, seed=2))
    assert 4000 / arrivals[-1].at_s == pytest.approx(5.0, rel=0.1)
    assert {arrival.num_prompt for arrival in arrivals} == set(range(110, 131))
    assert {arrival.prefix for arrival in arrivals} == {1, 2}


def test_bursts_come_in_one_moment_at_the_same_rate() -> None:
    arrivals = list(bursty(4000, 5.0, SHAPE, seed=1, burst=10))
    assert len({arrival.at_s for arrival in arrivals}) == 400
    assert 4000 / arrivals[-1].at_s == pytest.approx(5.0, rel=0.2)


def test_a_turn_has_all_that_was_said_before() -> None:
    arrivals = list(multi_turn(6, 1.0, SHAPE, seed=1, turns=3, think_s=1.0))
    assert [arrival.after for arrival in arrivals] == [None, 0, 1, None, 3, 4]
    assert arrivals[2].num_prompt > arrivals[1].num_prompt + arrivals[1].num_output
    first, second = tokens_of(0, arrivals[0]), tokens_of(1, arrivals[1])
    answer = list(range(len(first), len(first) + arrivals[0].num_output))
    assert second[: len(first) + len(answer)] == first + answer
    assert second[0] != tokens_of(3, arrivals[3])[0], "another conversation begins otherwise"


def test_only_the_shared_part_is_shared() -> None:
    one, two = Arrival(0.0, 8, 1, prefix=1, num_shared=5), Arrival(0.0, 9, 1, prefix=1, num_shared=5)
    first, second, strange = tokens_of(0, one), tokens_of(1, two), tokens_of(2, two._replace(prefix=2))
    assert (len(first), len(second)) == (8, 9)
    assert first[:5] == second[:5]
    assert first[5] != second[5]
    assert first[0] != strange[0]
    alone = [tokens_of(index, Arrival(0.0, 3, 1)) for index in range(3)]
    assert len({tokens[0] for tokens in [*alone, first, strange]}) == 5


def test_a_trace_is_read_as_it_was_written(tmp_path: Path) -> None:
    arrivals = [*poisson(50, 1.0, SHAPE, seed=1), Arrival(99.5, 7, 3, priority=-2)]
    with (tmp_path / "trace.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(COLUMNS)
        for at_s, num_prompt, num_output, prefix, num_shared, priority, _ in arrivals:
            writer.writerow((at_s, num_prompt, f"p{prefix}" if prefix else "", num_shared, num_output, priority))
    read = read_trace(tmp_path / "trace.csv")
    assert [arrival._replace(prefix=0) for arrival in read] == [arrival._replace(prefix=0) for arrival in arrivals]
    pairs = {(ours.prefix, theirs.prefix) for ours, theirs in zip(read, arrivals, strict=True)}
    assert len(pairs) == 3


def test_columns_may_be_missing(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("output_tokens,arrival_s,prompt_tokens\n4,0.5,10\n")
    assert read_trace(tmp_path / "t.csv") == [Arrival(0.5, 10, 4)]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("x,1,1,,,", "line 2: could not convert"),
        ("1,,1,,,", "line 2: invalid literal"),
        ("-1,1,1,,,", "line 2: the arrival is negative"),
        ("1,0,1,,,", "line 2: .* no tokens"),
        ("1,5,1,a,6,", "line 2: shared_tokens"),
        ("1,5,1,a,,", "line 2: shared_tokens"),
        ("1,5,1,,3,", "line 2: shared_tokens"),
        ("nan,5,1,,,", "line 2: arrival_s must be a number"),
        ("inf,5,1,,,", "line 2: arrival_s must be a number, at most 1e\\+09"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    header = "arrival_s,prompt_tokens,output_tokens,shared_prefix,shared_tokens,priority"
    (tmp_path / "t.csv").write_text(f"{header}\n{line}\n")
    with pytest.raises(BadTrace, match=said):
        read_trace(tmp_path / "t.csv")


def test_an_unknown_column_and_a_missing_file(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens,colour\n1,1,1,red\n")
    with pytest.raises(BadTrace, match="colour is not a column"):
        read_trace(tmp_path / "t.csv")
    with pytest.raises(BadTrace, match="cannot be read"):
        read_trace(tmp_path / "none.csv")
