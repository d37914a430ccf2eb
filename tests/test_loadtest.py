"""The load test's judgement: percentiles, agreement, invalid runs, limits, JUnit; no server and no locust."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import httpx
import pytest

from loadtest import record
from loadtest.agreement import compare
from loadtest.exchange import BUSY, client, send
from loadtest.junit import junit_xml
from loadtest.measures import beside, fairness, in_turn, measure, rates, recovery, waits
from loadtest.plots import plots
from loadtest.record import ClientLook, Exchange, Run, ServerLook, StageBegin
from loadtest.report import page, table
from loadtest.scenario import EXPECTED, Kind, Scenario, Stage, names, scenario
from loadtest.scrape import samples
from loadtest.validity import ClientLimits, faults
from loadtest.verdict import Objectives, Outcome, Verdict, judge, objectives

LIMITS = ClientLimits(cpu=0.9, late_p95_s=0.1)
ASKER = Kind("asker", num_prompt=20, num_new=4)
TWO = Scenario("two", "", (ASKER,), (Stage("only", 10.0, 2),), server={"N_PARALLEL": "2"})
OPEN = replace(TWO, kinds=(replace(ASKER, rate_per_s=4.0),), shape=(Stage("only", 10.0, 1),))
POOL = {
    "mlxcel_slots": 2.0,
    "mlxcel_slots_available": 2.0,
    "mlxcel_queue_depth": 0.0,
    "mlxcel_batch_current_size": 0.0,
    "mlxcel_cache_pool_paged_blocks_live": 0.0,
    "mlxcel_cache_pool_paged_blocks_allocated": 8.0,
}


def answer(user: str, at_s: float, ttft_s: float = 1.0, num_new: int = 4, took_s: float = 5.0, **more: Any) -> Exchange:
    """A whole answer whose tokens come evenly from TTFT to the end."""
    step_s = (took_s - ttft_s) / max(num_new - 1, 1)
    moments_s = [ttft_s + i * step_s for i in range(num_new)]
    whole = Exchange("asker", user, at_s, status=200, is_whole=True, num_prompt=20, num_new=num_new)
    return replace(whole, **({"moments_s": moments_s, "end_s": took_s, "prompt_s": 0.5} | more))


def counted(num: int, refused: int = 0, ttft_s: float = 1.0) -> dict[str, float]:
    """What a server has counted after ``num`` such answers, one scrape and ``refused`` refusals."""
    return POOL | {
        "mlxcel_batch_sequences_completed_total{reason=length}": float(num),
        "mlxcel_batch_sequences_completed_total{reason=cancelled}": 7.0 if num else 0.0,
        "mlxcel_prompt_tokens_total": 20.0 * num,
        "mlxcel_completion_tokens_total": 4.0 * num,
        "mlxcel_requests_total{status=2xx}": num + (1.0 if num else 0.0),
        "mlxcel_requests_total{status=4xx}": 0.0,
        "mlxcel_requests_total{status=5xx}": float(refused),
        "mlxcel_request_ttft_seconds_sum": ttft_s * num,
        "mlxcel_request_ttft_seconds_count": float(num),
    }


def full_run() -> Run:
    """Two users who ask twice each in ten seconds; the server counted the same."""
    return Run().add(
        [
            StageBegin("only", 100.0, 2),
            StageBegin("end", 110.0, 0),
            *(answer(user, at_s) for user in ("a", "b") for at_s in (100.0, 105.0)),
            ClientLook(105.0, 0.2, 0.001),
            ServerLook(99.0, counted(0)),
            ServerLook(111.0, counted(4)),
        ]
    )


def wanted(**at_most: float) -> Objectives:
    return replace(objectives("steady", small=False), at_most=at_most, at_least={})


# ---- measures ----


def test_percentiles_are_of_raw_samples() -> None:
    values = [i / 100 for i in range(1, 101)]
    random.Random(1).shuffle(values)
    got = waits([answer("a", 0.0, ttft_s=value, num_new=1, took_s=value) for value in values])
    assert (got["ttft_p50_s"], got["ttft_p95_s"], got["ttft_p99_s"]) == (0.50, 0.95, 0.99)
    assert got["e2e_p95_s"] == 0.95
    assert "itl_p50_s" not in got, "a single token has no gap"


def test_only_whole_answers_have_waits() -> None:
    ones = [answer("a", 0.0), answer("a", 0.0, ttft_s=9.0, is_whole=False), Exchange("asker", "b", status=503)]
    assert waits(ones)["ttft_p99_s"] == 1.0
    assert waits(ones[1:]) == {}


def test_queue_time_is_ttft_less_what_the_prompt_took() -> None:
    assert answer("a", 0.0, ttft_s=1.5, prompt_s=0.5).queue_s == 1.0
    assert answer("a", 0.0, ttft_s=1.5, prompt_s=None).queue_s is None


def test_tokens_are_counted_when_they_came() -> None:
    one = answer("a", 100.0)  # tokens at 101, 102.33, 103.67, 105
    assert rates([one], 100.0, 104.0)["tokens_out_per_s"] == pytest.approx(3 / 4)
    assert rates([one], 101.5, 105.0)["tokens_in_per_s"] == 0.0
    halved = replace(one, moments_s=one.moments_s[:2])  # two pieces of text for four tokens
    assert rates([halved], 100.0, 104.0)["tokens_out_per_s"] == pytest.approx(4 / 4)


def test_fairness_is_over_users() -> None:
    assert fairness([answer("a", 0), answer("b", 0)]) == 1.0
    assert fairness([answer("a", 0, ttft_s=0.0), answer("b", 0, ttft_s=2.0)]) == 0.5


def test_in_turn_is_the_order_of_first_tokens() -> None:
    assert in_turn([answer("a", i, ttft_s=1.0 + i) for i in range(9)]) == pytest.approx(1.0)
    assert in_turn([answer("a", i, ttft_s=100.0 - 2 * i) for i in range(9)]) == pytest.approx(-1.0)


def test_gaps_beside_an_intruder_are_told_from_those_apart() -> None:
    live = answer("a", 0.0)
    intruder = answer("b", 2.0, ttft_s=0.2, kind="long")
    got = beside([replace(live, moments_s=[1.0, 1.5, 2.5, 2.6]), intruder], "long")
    assert got["itl_p99_s.beside"] == pytest.approx(1.0)
    assert got["itl_p99_s.apart"] == pytest.approx(0.5)


def test_recovery_is_until_first_tokens_are_as_before() -> None:
    begins = {"before": 0.0, "burst": 10.0, "after": 20.0, "end": 40.0}
    stages = [StageBegin(name, at_s, 1) for name, at_s in begins.items()]
    asked = [answer("a", 1.0), answer("b", 12.0, ttft_s=8.0), answer("a", 21.0, ttft_s=3.0), answer("a", 27.0)]
    assert recovery(Run().add([*stages, *asked])) == 7.0
    assert recovery(Run().add([*stages, *asked[:3]])) == 20.0, "it never came: all the time there was"
    assert recovery(full_run()) is None


def test_ratios_are_of_stages() -> None:
    one = replace(
        TWO,
        shape=(Stage("c1", 10, 1), Stage("c2", 10, 2)),
        ratios={"gain": ("tokens_out_per_s.c2", "tokens_out_per_s.c1")},
    )
    stages = [StageBegin("c1", 0.0, 1), StageBegin("c2", 10.0, 2), StageBegin("end", 20.0, 0)]
    asked = [answer("a", at_s) for at_s in (0.0, 5.0, 10.0, 15.0)] + [answer("b", at_s) for at_s in (10.0, 15.0)]
    assert measure(Run().add([*stages, *asked]), one)["gain"] == pytest.approx(2.0)


def test_what_is_lost_is_what_was_taken_in_or_asked_before_the_end() -> None:
    run = full_run()
    run.drained_s = 106.0
    run.add([Exchange("asker", "c", 105.5, error="ReadError"), Exchange("asker", "c", 107.0, error="ConnectError")])
    run.add([answer("d", 105.0, is_whole=False), Exchange("asker", "e", 105.0, left=True)])
    got = measure(run, TWO)
    assert (got["lost"], got["unreachable"], got["left"], got["failed"]) == (2, 1, 1, 1)


def test_raw_lines_come_back_as_they_were(tmp_path: Path) -> None:
    run = full_run()
    lines = [*run.exchanges, *run.stages, *run.clients, *run.servers]
    (tmp_path / "raw.jsonl").write_bytes(b"".join(map(record.to_json, lines)))
    assert Run().add(record.read(tmp_path / "raw.jsonl")) == run


# ---- agreement ----


def test_client_and_server_agree() -> None:
    compared = compare(full_run(), 0.1, 0.0, is_alone=True)
    assert {one.name for one in compared if one.agrees} == {one.name for one in compared}
    assert len(compared) == 7


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (lambda run: run.exchanges.pop(), "answers"),
        (lambda run: setattr(run.exchanges[0], "num_new", 5), "output tokens"),
        (lambda run: setattr(run.exchanges[0], "num_prompt", 21), "prompt tokens"),
        (lambda run: run.add([Exchange("asker", "c", 103.0, status=503)]), "5xx responses"),
        (lambda run: run.add([Exchange("asker", "c", 103.0, status=401)]), "4xx responses"),
        (lambda run: setattr(run.exchanges[0], "status", None), "2xx responses"),
        (lambda run: setattr(run.exchanges[0], "moments_s", [1.5, 2.0]), "mean TTFT (s)"),
    ],
)
def test_a_number_that_differs_fails_the_run(change: Callable[[Run], object], name: str) -> None:
    run = full_run()
    change(run)
    compared = compare(run, 0.1, 0.0, is_alone=True)
    assert name in {one.name for one in compared if not one.agrees}
    verdict = judge("two", {}, wanted(), [], compared, None)
    assert verdict.outcome is Outcome.FAILED
    assert any(name in reason for reason in verdict.reasons)


def test_mean_ttft_may_differ_by_a_tenth() -> None:
    for ttft_s, agrees in ((1.09, True), (1.12, False)):
        run = full_run()
        run.servers[-1].values.update(counted(4, ttft_s=1.0 / ttft_s))
        (mean,) = [one for one in compare(run, 0.1, 0.0, is_alone=True) if one.name == "mean TTFT (s)"]
        assert mean.agrees is agrees


def test_a_server_without_metrics_cannot_disagree() -> None:
    run = full_run()
    run.servers.clear()
    assert compare(run, 0.1, 0.0, is_alone=True) == []


def test_samples_leave_buckets_out() -> None:
    text = '# TYPE a histogram\na_bucket{le="1"} 3\na_sum 2.5\na_count 3\n# TYPE b counter\nb_total{status="5xx"} 4\n'
    assert samples(text) == {"a_sum": 2.5, "a_count": 3.0, "b_total{status=5xx}": 4.0}


# ---- validity ----


def test_a_run_that_reached_its_load_is_valid() -> None:
    assert faults(full_run(), TWO, LIMITS) == []


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda run: run.exchanges.clear(), "no request was answered"),
        (lambda run: [setattr(one, "user", "a") for one in run.exchanges], "1 users asked instead of 2"),
        (lambda run: run.exchanges.pop(), "1.5 requests were open on average instead of 2"),
        (lambda run: run.stages.pop(), "the stages were only instead of only, end"),
        (lambda run: run.clients.clear(), "left no record"),
        (lambda run: setattr(run.clients[0], "cpu", 0.95), "bottleneck: it used 0.95"),
        (lambda run: setattr(run.clients[0], "late_s", 0.3), "bottleneck: p95 of its own lateness was 0.300 s"),
    ],
)
def test_a_run_that_did_not_is_invalid_not_passed(change: Callable[[Run], object], fault: str) -> None:
    run = full_run()
    change(run)
    found = faults(run, TWO, LIMITS)
    assert any(fault in one for one in found), found
    verdict = judge("two", {}, wanted(), found, [], None)
    assert verdict.outcome is Outcome.INVALID
    assert fault in " ".join(verdict.reasons)


def arrivals(num: int, plan_s: float, sent_s: float) -> Run:
    """``num`` requests of one source, ``plan_s`` apart as planned and ``sent_s`` apart as sent."""
    run = full_run()
    run.exchanges = [answer("a", 100.0 + i * sent_s, planned_s=100.0 + i * plan_s) for i in range(num)]
    return run


def test_an_arrival_rate_that_was_not_reached_is_invalid() -> None:
    assert faults(arrivals(40, 0.25, 0.25), OPEN, LIMITS) == []
    assert "4/s had planned" in " ".join(faults(arrivals(30, 0.25, 0.3), OPEN, LIMITS))
    assert "10 requests were sent in 10 s instead of 40" in " ".join(faults(arrivals(10, 1.0, 1.0), OPEN, LIMITS))


def test_a_stage_that_was_too_short_for_an_answer_makes_no_ratio() -> None:
    one = replace(TWO, ratios={"gain": ("tokens_out_per_s.only", "tokens_out_per_s.only")})
    assert faults(full_run(), one, LIMITS) == []
    run = full_run()
    for slow in run.exchanges:
        slow.end_s = 15.0
    assert "only: 0 answers ended: too short for its 2 users" in faults(run, one, LIMITS)


def test_a_burst_that_was_not_refused_and_a_drain_that_never_came_are_invalid() -> None:
    assert "nothing was refused" in " ".join(faults(full_run(), replace(TWO, refuses=True), LIMITS))
    assert "not told to end" in " ".join(faults(full_run(), replace(TWO, drain_after_s=3.0), LIMITS))


# ---- verdict ----


@pytest.mark.parametrize(("value", "outcome"), [(2.0, Outcome.PASSED), (2.1, Outcome.FAILED), (None, Outcome.FAILED)])
def test_a_limit_holds_or_the_run_fails(value: float | None, outcome: Outcome) -> None:
    measures = {} if value is None else {"ttft_p95_s": value}
    assert judge("two", measures, wanted(ttft_p95_s=2.0), [], [], None).outcome is outcome


def test_a_floor_is_no_ceiling() -> None:
    floor = replace(wanted(), at_least={"gain_c8": 2.5})
    assert judge("two", {"gain_c8": 5.0}, floor, [], [], None).outcome is Outcome.PASSED
    assert judge("two", {"gain_c8": 2.4}, floor, [], [], None).reasons == ["gain_c8 is 2.4, wanted at least 2.5"]


def test_what_cannot_be_known_of_a_server_is_not_judged() -> None:
    assert judge("two", {}, wanted(slots_held=0), [], [], None).outcome is Outcome.FAILED
    assert judge("two", {}, wanted(slots_held=0), [], [], None, frozenset({"slots_held"})).outcome is Outcome.PASSED


def test_a_run_much_worse_than_its_baseline_fails() -> None:
    kept = {"ttft_p95_s": 1.0, "tokens_out_per_s": 100.0, "requests": 5.0}
    good = {"ttft_p95_s": 1.2, "tokens_out_per_s": 90.0, "requests": 50.0}
    assert judge("two", good, wanted(), [], [], kept).outcome is Outcome.PASSED
    assert judge("two", good | {"ttft_p95_s": 1.3}, wanted(), [], [], kept).outcome is Outcome.FAILED
    assert judge("two", good | {"tokens_out_per_s": 70.0}, wanted(), [], [], kept).outcome is Outcome.FAILED


@pytest.mark.parametrize("name", names())
def test_every_scenario_has_limits_that_it_can_meet(name: str) -> None:
    """A limit on a measure that no run of the scenario can have would fail every run of it."""
    one = scenario(name)
    assert one.name == name
    assert one.proves
    assert "N_PARALLEL" in one.server
    for shape, small in ((one, False), *([(one.small_one(), True)] if one.small else [])):
        limits = objectives(name, small)
        stages = {stage.name for stage in shape.shape} if len(shape.shape) > 1 else set()
        kinds = {kind.name for kind in one.kinds} if len(one.kinds) > 1 else set()
        known = set(one.ratios) | {
            "recovery_s",
            "in_turn",
            "rss_growth",
            "exit_code",
            "refused",
            *measure(full_run(), one),
        }
        for measured in {**limits.at_most, **limits.at_least}:
            plain, _, part = measured.partition(".")
            assert plain in known, measured
            assert not part or part in stages | kinds, measured
    wants_stages = {made.partition(".")[2] for pair in one.ratios.values() for made in pair}
    assert wants_stages <= {stage.name for stage in one.shape} | {kind.name for kind in one.kinds} | {"beside", "apart"}


def test_scaling_changes_durations_and_users_and_rates() -> None:
    scaled = scenario("burst").scaled(0.5, 0.1)
    assert [(stage.for_s, stage.num_users) for stage in scaled.shape] == [(15, 1), (30, 6), (22.5, 1)]
    arriving = scenario("arrivals").scaled(1, 2)
    assert arriving.kinds[0].rate_per_s == 1.5
    assert arriving.shape[0].num_users == 1


def test_an_unknown_scenario_is_told_with_those_there_are() -> None:
    with pytest.raises(KeyError, match="steady"):
        scenario("stedy")


# ---- what is written ----


def verdicts() -> list[Verdict]:
    passed = judge("one", {"requests": 4.0}, wanted(requests=5), [], [], None)
    failed = judge("two", {"requests": 9.0}, wanted(requests=5), [], [], None)
    invalid = judge("three", {"requests": 4.0}, wanted(requests=5), ["the client <was> the bottleneck"], [], None)
    return [passed, failed, invalid]


def test_junit_has_a_suite_a_scenario() -> None:
    suites = ElementTree.fromstring(junit_xml(verdicts()))
    assert suites.tag == "testsuites"
    got = {
        suite.get("name"): tuple(suite.get(count) for count in ("tests", "failures", "errors", "skipped"))
        for suite in suites
    }
    assert got == {
        "loadtest.one": ("2", "0", "0", "0"),
        "loadtest.two": ("2", "1", "0", "0"),
        "loadtest.three": ("2", "0", "1", "1"),
    }
    (failure,) = suites.iter("failure")
    assert failure.get("message") == "requests is 9, wanted at most 5"
    (error,) = suites.iter("error")
    assert error.get("message") == "the client <was> the bottleneck"


def test_table_and_page_tell_the_verdicts() -> None:
    text = table(verdicts())
    assert "two: requests is 9, wanted at most 5" in text
    drawn = plots(full_run(), TWO, {})
    assert set(drawn) == {"TTFT, share of requests", "ITL over time", "Block pool and requests"}
    html = page(verdicts(), {"one": drawn}, {"one": "it <works>"})
    assert html.count("<svg") == 3
    assert "it &lt;works&gt;" in html
    assert 'class="invalid">invalid' in html


# ---- one exchange ----


@pytest.mark.parametrize(
    ("body", "headers", "proper"),
    [
        (BUSY, {"retry-after": "1"}, True),
        (BUSY, {}, False),
        ({"error": BUSY["error"] | {"code": 1}}, {"retry-after": "1"}, False),
        ({"error": {"message": "Draining", "type": "unavailable_error"}}, {"retry-after": "1"}, True),
        ([], {"retry-after": "1"}, False),
    ],
)
def test_a_refusal_has_to_be_as_documented(body: object, headers: dict[str, str], proper: bool) -> None:
    answering = httpx.MockTransport(lambda _: httpx.Response(503, content=json.dumps(body), headers=headers))
    one = Exchange("asker", "a")
    with httpx.Client(transport=answering, base_url="http://test") as http:
        send(http, "/v1/completions", b"{}", one)
    assert one.is_refused
    assert one.is_proper is proper


def test_nobody_there_is_written_down() -> None:
    one = Exchange("asker", "a")
    with client("http://127.0.0.1:9") as http:
        send(http, "/v1/completions", b"{}", one)
    assert (one.status, one.error, one.has_failed) == (None, "ConnectError", False)


def test_every_deed_has_a_status_to_expect() -> None:
    assert {Kind("a", 1, 1, does=deed).expects for deed in EXPECTED} == {400, 401, 413}
    assert ASKER.expects == 200
