"""Recordings on their way out: files, the route, and the commands that read them."""

from __future__ import annotations

import asyncio
import json
import logging
from pathlib import Path

import pytest

from app.cli import main
from app.errors import EngineFault, FeatureOff
from app.recordings import MAX_FILES, Recordings
from app.request import Request
from app.scheduler.recording import from_json, read, to_json
from app.scheduler.replay import replay
from app.worker import Worker
from tests.driving import greedy_request
from tests.played import PATIENCE_S, Mailbox, PlayedEngine, until
from tests.recorded import drive, recorded_scheduler
from tests.scripted import ScriptedService, call, make_app
from tests.test_recorder import step


def test_a_dump_is_a_file_that_replays(tmp_path: Path) -> None:
    recordings = Recordings(tmp_path / "deep" / "folder")
    recordings.scheduler = drive(3, num_ticks=60, ticks_kept=100)
    recordings.dump("asked")
    (path,) = (tmp_path / "deep" / "folder").iterdir()
    assert path.name.endswith("-asked.json")
    assert replay(read(path)).difference is None


def test_old_files_go_and_strange_ones_stay(tmp_path: Path) -> None:
    recordings = Recordings(tmp_path)
    recordings.scheduler = recorded_scheduler()
    (tmp_path / "notes.txt").write_text("mine")
    for _ in range(MAX_FILES + 3):
        recordings.dump("fault")
    assert len(list(tmp_path.glob("*.json"))) == MAX_FILES
    assert (tmp_path / "notes.txt").exists()


def test_a_dump_that_fails_is_logged_and_harms_nobody(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    recordings = Recordings(tmp_path / "file")
    recordings.scheduler = recorded_scheduler()
    with caplog.at_level(logging.INFO, "mlxcel.recordings"):
        recordings.dump("fault")
        Recordings(tmp_path).dump("asked")
    assert "could not be written" in caplog.messages[0]
    assert "MLXCEL_RECORD_TICKS=0" in caplog.messages[1]


def test_the_route_wants_a_key_and_says_when_it_is_off() -> None:
    assert call(make_app(), "GET", "/v1/recording").json() == {"format": 1}
    assert call(make_app(api_keys=("k",)), "GET", "/v1/recording").status_code == 401
    allowed = call(make_app(api_keys=("k",)), "GET", "/v1/recording", headers={"Authorization": "Bearer k"})
    assert allowed.status_code == 200
    assert call(make_app(ScriptedService(refused=FeatureOff("off"))), "GET", "/v1/recording").status_code == 501
    with pytest.raises(FeatureOff):
        Recordings(Path()).read()


@pytest.mark.parametrize(("failure", "why"), [(EngineFault("out of memory"), "fault"), (ValueError("x"), "dead")])
def test_a_worker_dumps_when_a_step_or_its_loop_fails(tmp_path: Path, failure: Exception, why: str) -> None:
    async def body() -> None:
        engine, scheduler, recordings = PlayedEngine(), recorded_scheduler(), Recordings(tmp_path)
        recordings.scheduler = scheduler
        engine.failures.append(failure)
        worker = Worker(lambda: (engine, scheduler), 4, 600.0, lambda kind, seconds: None, dump=recordings.dump)
        await worker.start()
        worker.submit([greedy_request(1, range(5), 3)], Mailbox())
        await until(lambda: list(tmp_path.glob(f"*-{why}.json")))
        await worker.stop(PATIENCE_S)

    asyncio.run(asyncio.wait_for(body(), 3 * PATIENCE_S))
    (path,) = tmp_path.iterdir()
    outcomes = [tick.outcome for tick in replay(read(path)).ticks]
    assert outcomes == [{"fault": "lost", "dead": "open"}[why]]


# ---- the commands ----


def test_replay_says_that_it_is_the_same_and_draws(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(to_json(drive(5, num_ticks=120, ticks_kept=1000))))
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: it is in the extra `load`")
    assert main(["replay", str(path), "--width", "40", "--plot", str(tmp_path / "r.svg")]) == 0
    said = capsys.readouterr().out
    assert "ticks 0 to 119" in said
    assert "replayed to the same decisions" in said
    bars = [line.split("|")[1] for line in said.splitlines() if line.count("|") == 2]
    assert len(bars) == 6
    assert {len(bar) for bar in bars} == {40}
    assert "<svg" in (tmp_path / "r.svg").read_text()


def test_replay_names_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scheduler = recorded_scheduler(prefill_chunk=8)
    scheduler.add(Request(0, [1] * 20, 20, 4))
    for tick in range(5):
        step(scheduler, tick, tick + 0.5)
    data = to_json(scheduler)
    data["config"]["prefill_chunk"] = 16
    (tmp_path / "r.json").write_text(json.dumps(data))
    assert main(["replay", str(tmp_path / "r.json")]) == 3
    assert "the first decision that differs: tick 0: row 0: request 0, 8 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("lost", ["requests", "entries", "running"])
def test_a_damaged_recording_is_one_line(lost: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = to_json(drive(5, num_ticks=120, ticks_kept=1000))
    data[lost] = {"requests": [], "entries": [["plan"], ["?"]], "running": [[1, 2]]}[lost]
    (tmp_path / "r.json").write_text(json.dumps(data))
    assert main(["replay", str(tmp_path / "r.json")]) == 1
    said = capsys.readouterr().err
    assert "recording" in said or "damaged" in said
    assert "Traceback" not in said
    assert said.count("\n") == 1


def test_simulate_answers_how_many_hosts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: it is in the extra `load`")
    command = "simulate --generate bursty --requests 200 --rate 3 --hosts 1-16 --slots 8 --ttft 2"
    assert main([*command.split(), "--json", str(tmp_path / "o.json"), "--plot", str(tmp_path / "o.svg")]) == 0
    said = capsys.readouterr().out
    runs = json.loads((tmp_path / "o.json").read_text())["runs"]
    enough = [run["hosts"] for run in runs if run["ttft_s"]["p95"] <= 2 and not run["refused"]]
    assert said.splitlines()[-1] == f"TTFT p95 within 2 s and nobody refused: {min(enough)} hosts"
    assert max(run["hosts"] for run in runs if run["hosts"] not in enough) == min(enough) - 1
    assert all(0 <= span["pool_share"] <= 1 for run in runs for span in run["occupancy"])
    assert "<svg" in (tmp_path / "o.svg").read_text()
    assert main(["simulate", "--requests", "60", "--rate", "20", "--hosts", "1-2"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("more than 2 hosts")


def test_simulate_fits_a_recording_and_plays_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r.json").write_text(json.dumps(to_json(drive(5, num_ticks=120, ticks_kept=1000))))
    (tmp_path / "t.csv").write_text("arrival_s,prompt_tokens,output_tokens\n0,10,3\n1,10,3\n")
    cost = str(tmp_path / "cost.json")
    assert main(["simulate", "--fit", str(tmp_path / "r.json"), "--save-cost", cost]) == 0
    fitted = capsys.readouterr().out
    assert "R²" in fitted
    assert "median" in fitted
    assert main(["simulate", "--cost", cost, "--trace", str(tmp_path / "t.csv")]) == 0
    table = capsys.readouterr().out.splitlines()
    assert table[0].split()[:2] == ["hosts", "TTFT"]
    assert len(table) == 2


@pytest.mark.parametrize(
    "words",
    [
        "simulate --trace none.csv",
        "simulate --cost none",
        "simulate --fit none.json",
        "simulate --hosts 0",
        "simulate --hosts 3-1",
        "simulate --prompt x",
        "simulate --port 1",
        "simulate --generate other",
        "simulate --requests 0",
        "simulate --rate 0",
        "replay none.json",
        "replay",
    ],
)
def test_what_cannot_be_is_one_line(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words.split()) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("mlxcel: ")
    assert said.err.count("\n") == 1


def test_plots_say_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib", None)
    assert main(["simulate", "--requests", "5", "--plot", "x.svg"]) == 1
    assert "mlxcel[load]" in capsys.readouterr().err


def test_a_recording_is_read_back_as_it_was_written() -> None:
    data = json.loads(json.dumps(to_json(drive(2, num_ticks=50, ticks_kept=30))))
    recording = from_json(data)
    assert recording.first_tick == data["first_tick"]
    assert [list(entry) for entry in recording.entries] == data["entries"]
