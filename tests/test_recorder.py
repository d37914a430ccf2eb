"""The flight recorder and its replay: the same decisions, or the first that differs; bounded; and no text in it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from app.kv.books import capture, restore
from app.request import Request
from app.scheduler.cost import Load, Sample
from app.scheduler.plan import Draw, Plan, Result
from app.scheduler.recorder import RecordedScheduler
from app.scheduler.recording import BadRecording, from_json, read, samples, to_json
from app.scheduler.replay import rebuild, replay
from app.scheduler.speculation import PromptLookup
from tests.recorded import drive, recorded_scheduler, saved


def step(scheduler: RecordedScheduler, began_s: float, ended_s: float, token: int = 5) -> Plan:
    plan = scheduler.plan(began_s)
    scheduler.apply(plan, Result({row.request_id: (Draw(token),) for row in plan.rows if row.draws}), ended_s)
    return plan


@pytest.mark.parametrize("seed", range(30))
def test_a_recording_replays_to_the_same_decisions(seed: int) -> None:
    recording = saved(drive(seed, num_ticks=150, ticks_kept=40))
    replayed = replay(recording)
    assert replayed.difference is None
    # A segment ends with its fortieth tick, or after the steps ahead that follow it: at most 8, the longest block.
    assert 80 <= recording.first_tick <= 80 + 2 * 8
    assert 150 <= recording.first_tick + recording.num_ticks <= 151
    assert [tick.tick for tick in replayed.ticks] == [recording.first_tick + i for i in range(recording.num_ticks)]


def test_the_end_of_a_replay_is_the_end_of_the_run() -> None:
    """Not only the plans: every block is where it was."""
    scheduler = drive(7, num_ticks=200, ticks_kept=1000)
    recording = saved(scheduler)
    again, requests = rebuild(recording)
    assert again.is_idle
    assert replay(recording).difference is None
    assert len(requests) == len(recording.requests) > 20


@pytest.mark.parametrize("seed", range(12))
def test_books_that_are_restored_are_the_same_books(seed: int) -> None:
    books = capture(drive(seed, num_ticks=97, ticks_kept=10)._tables)
    assert capture(restore(books)) == books


def test_the_first_decision_that_differs_is_named() -> None:
    scheduler = recorded_scheduler(num_slots=2, max_batch_size=2, prefill_chunk=8)
    for number in range(3):
        scheduler.add(Request(number, [number] * 20, 20, 4))
    for tick in range(6):
        step(scheduler, tick, tick + 0.5)
    recording = saved(scheduler)
    assert replay(recording).difference is None
    changed = dataclasses.replace(recording, config=dataclasses.replace(recording.config, prefill_chunk=6))
    difference = replay(changed).difference
    assert (
        str(difference) == "tick 0: row 0: request 0, 8 tokens from 0 was recorded, request 0, 6 tokens from 0 came out"
    )
    alone = dataclasses.replace(recording, config=dataclasses.replace(recording.config, max_batch_prefill=1))
    difference = replay(alone).difference
    assert str(difference) == "tick 0: row 1: request 1, 8 tokens from 0 was recorded, no row came out"


def test_blocks_that_differ_are_named() -> None:
    scheduler = recorded_scheduler()
    scheduler.add(Request(0, [1] * 10, 10, 4))
    step(scheduler, 0.0, 1.0)
    recording = saved(scheduler)
    place = next(i for i, entry in enumerate(recording.entries) if entry[0] == "plan")
    *entry, live, waiting = recording.entries[place]
    recording.entries[place] = (*entry, live + 1, waiting)
    assert str(replay(recording).difference) == f"tick 0: blocks held: {live + 1} was recorded, {live} came out"


def test_no_token_is_in_a_recording() -> None:
    secret = [31337, 27182, 31415, 16180, 14142, 57721]
    scheduler = recorded_scheduler(num_ticks=4)
    for number in range(4):
        scheduler.add(Request(number, secret + [60000 + number] * 3, 9, 12, cache_salt="salted"))
        step(scheduler, number, number + 0.5, token=54321)
    text = json.dumps(to_json(scheduler))
    assert not [word for word in (*map(str, secret), "60000", "54321", "salted") if word in text]
    assert replay(saved(scheduler)).difference is None


def test_of_drafts_only_their_lengths_are_kept() -> None:
    scheduler = recorded_scheduler(num_ticks=40, drafter=PromptLookup())
    scheduler.add(Request(0, [31337, 27182, 31415] * 3, 9, 12))
    began_s = 0.0
    while not scheduler.is_idle:
        plan = scheduler.plan(began_s)
        text = [*plan.rows[0].tokens, *plan.rows[0].draft, 31337]
        right = [(31337, 27182, 31415)[end % 3] for end in range(len(text))]
        draws = [Draw(right[one.start + one.num_new]) for one in plan.rows[0].each_draw()]
        scheduler.apply(plan, Result({0: tuple(draws)}), began_s + 0.5)
        began_s += 1.0
    recording = saved(scheduler)
    drafts, checks = ([entry[1:] for entry in recording.entries if entry[0] == kind] for kind in ("draft", "check"))
    assert drafts == [(0, 1), (0, 3), (0, 7)]
    assert checks == [(0, 1), (0, 3), (0, 4)]  # the last one was cut to what the answer had left
    assert not [token for token in ("31337", "27182", "31415") if token in json.dumps(to_json(scheduler))]
    assert replay(recording).difference is None
    changed = dataclasses.replace(recording, entries=[entry for entry in recording.entries if entry[:1] != ("check",)])
    assert str(replay(changed).difference) == (
        "tick 2: row 0: request 0, 4 tokens from 11, drawing was recorded,"
        " request 0, 4 tokens from 10, drawing came out"
    )


def test_alike_beginnings_have_alike_numbers_and_nothing_more() -> None:
    scheduler = recorded_scheduler()
    scheduler.add(Request(0, [8, 8, 8, 8, 7], 5, 2))
    scheduler.add(Request(1, [8, 8, 3, 8, 7], 5, 2))
    one, two = (list(request.tokens) for request in saved(scheduler).requests.values())
    assert one[:2] == two[:2]
    assert not set(one[2:]) & set(two[2:])
    assert len(set(one)) == 5, "not even that a token repeats can be seen"


def test_the_ring_is_bounded_and_starts_where_it_can_be_replayed() -> None:
    scheduler = recorded_scheduler(num_ticks=10, num_blocks=400)
    scheduler.add(Request(0, [1] * 8, 8, 1000))
    for tick in range(95):
        step(scheduler, tick, tick + 0.5)
        assert tick < 20 or 10 <= saved(scheduler).num_ticks <= 20
    recording = saved(scheduler)
    assert (recording.first_tick, recording.num_ticks) == (80, 15)
    assert replay(recording).difference is None
    assert list(recording.requests) == [0]


def test_steps_ahead_are_replayed_and_a_decision_about_them_that_differs_is_named() -> None:
    recordings = [saved(drive(seed, num_ticks=150, ticks_kept=1000)) for seed in range(10)]
    assert sum(1 for recording in recordings for entry in recording.entries if entry[0] == "ahead") > 100
    assert any(entry[0] == "apply" and entry[3] for recording in recordings for entry in recording.entries)
    recording = next(one for one in recordings if any(entry[0] == "ahead" for entry in one.entries))
    without = dataclasses.replace(recording, config=dataclasses.replace(recording.config, lookahead=False))
    assert str(replay(without).difference).endswith("was recorded, no row came out")


def test_a_tick_that_has_not_ended_is_in_it() -> None:
    scheduler = recorded_scheduler()
    scheduler.add(Request(0, [1] * 8, 8, 5))
    step(scheduler, 0.0, 1.0)
    scheduler.plan(1.5)
    assert [tick.outcome for tick in replay(saved(scheduler)).ticks] == ["applied", "open"]


def test_measured_ticks() -> None:
    scheduler = recorded_scheduler()
    scheduler.add(Request(0, [1] * 9, 9, 3))
    step(scheduler, 10.0, 10.5)
    step(scheduler, 10.6, 10.7)
    step(scheduler, 10.8, 10.9)
    assert scheduler.is_idle
    scheduler.add(Request(1, [2] * 3, 3, 1))
    step(scheduler, 90.0, 90.25)
    found = samples(saved(scheduler))
    # A tick that another follows lasts until that one begins; one before a pause lasts until its own end.
    assert [sample.load for sample in found] == [Load(0, 9, 3), Load(1, 0, 3), Load(1, 0, 3), Load(0, 3, 1)]
    assert [sample.seconds for sample in found] == pytest.approx([0.6, 0.2, 0.1, 0.25])
    assert isinstance(found[0], Sample)
    assert saved(scheduler).next_tick == 4
    assert samples(saved(scheduler), first_tick=2) == found[2:]


def test_a_step_ahead_is_measured_from_the_end_of_the_one_before() -> None:
    scheduler = recorded_scheduler(lookahead=True)
    scheduler.add(Request(0, [1] * 9, 9, 4))
    step(scheduler, 10.0, 10.5)
    plan, following = scheduler.plan(10.6), None
    for ended_s in (10.75, 10.85):
        following = scheduler.ahead(plan)
        scheduler.apply(plan, Result({0: (Draw(5),)}), ended_s)
        plan = following or plan
    scheduler.apply(plan, Result({0: (Draw(5),)}), 10.95)
    assert scheduler.is_idle
    assert [sample.seconds for sample in samples(saved(scheduler))] == pytest.approx([0.6, 0.15, 0.1, 0.1])


@pytest.mark.parametrize("data", [{}, {"format": 99}, {"format": 3}, {"format": 3, "books": {}, "requests": []}])
def test_what_is_no_recording_is_refused(data: dict[str, object]) -> None:
    with pytest.raises(BadRecording):
        from_json(data)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(BadRecording, match="cannot be read"):
        read(tmp_path / "none.json")
    (tmp_path / "half.json").write_text('{"format": 1')
    with pytest.raises(BadRecording, match=r"half\.json is no recording: it is not JSON"):
        read(tmp_path / "half.json")
    (tmp_path / "list.json").write_text("[]")
    with pytest.raises(BadRecording, match=r"list\.json: not a recording: it has no format"):
        read(tmp_path / "list.json")
