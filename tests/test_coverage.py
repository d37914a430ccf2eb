"""What docs/models.md says of every family mlx-lm has, tried again: one that a new mlx-lm changes fails by name."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import mlx.core as mx
import pytest

from app.engine.paths import open_engine
from app.request import FinishReason
from app.scheduler.scheduler import Scheduler
from ops import models_page
from ops.families import coverage
from ops.families.parity import PROMPTS
from ops.families.tiny import build, described, loaded
from tests.driving import assert_same_tokens, build_scheduler, greedy_request, plain_greedy, run

FAMILIES: dict[str, dict[str, Any]] = coverage.pinned()["families"]
SERVED = [name for name, entry in FAMILIES.items() if entry["path"] in coverage.SERVED]
NUM_NEW = 8
DISAGREES = {
    "plamo3": pytest.mark.xfail(
        reason="mlx-lm's mask and its cache differ by a token, and here the mask counts", strict=True
    )
}


def test_no_module_is_left_out() -> None:
    tried, untried = ({name.split()[0] for name in described()[kind]} for kind in ("families", "untried"))
    assert sorted(tried | untried) == coverage.modules(), "ops/families/configs.yaml has other modules than mlx-lm"
    assert not tried & untried
    assert list(FAMILIES) == coverage.names(), "python -m ops.families.coverage"
    assert coverage.pinned()["mlx_lm"] == metadata.version("mlx-lm"), "python -m ops.families.coverage"


def test_the_page_is_what_was_found() -> None:
    assert models_page.PAGE.read_text() == models_page.render_page(), "python -m ops.models_page"


@pytest.mark.parametrize("family", coverage.names())
def test_a_family_is_as_it_was_found(family: str) -> None:
    found = coverage.classify(family)
    assert coverage.comparable(found) == coverage.comparable(FAMILIES[family]), (
        f"python -m ops.families.coverage {family!r}, and read what changed"
    )


@pytest.mark.parametrize("family", [pytest.param(name, marks=DISAGREES.get(name, ())) for name in SERVED])
def test_greedy_tokens_are_its_own_in_any_company(family: str) -> None:
    """Four unequal prompts that join one after the other, in a pool too small for them; one more is cancelled."""
    mx.disable_compile()
    want = [plain_greedy(build(family), prompt, NUM_NEW) for prompt in PROMPTS]
    engine = open_engine(loaded(family, build(family)), 64, 4)
    assert engine.decode_path.partition(",")[0] == FAMILIES[family]["path"]

    def leave(tick: int, scheduler: Scheduler) -> None:
        if tick == 3:
            (event,) = scheduler.cancel(9, 3.0)
            assert event.reason is FinishReason.CANCELLED

    for chunk in (3, 64):
        scheduler = build_scheduler(12, 4, num_slots=5, max_batch_size=5, prefill_chunk=chunk)
        requests = [greedy_request(i, prompt, NUM_NEW) for i, prompt in enumerate(PROMPTS)]
        cancelled = greedy_request(9, PROMPTS[3], NUM_NEW)
        arrivals = {0: [requests[2], cancelled], 1: [requests[1]], 2: [requests[0], requests[3]]}
        got = run(engine, scheduler, arrivals, leave)
        assert scheduler.snapshot().counters.preemptions["reclaim"] >= 1
        for i, (tokens, logits) in enumerate(want):
            assert_same_tokens(got[i], tokens, logits)


def test_no_family_is_served_with_other_logits_than_its_own() -> None:
    served = {name: entry for name, entry in FAMILIES.items() if entry["path"] in coverage.SERVED}
    assert [name for name, entry in served.items() if not float(entry["parity"]) <= coverage.TOLERANCE] == []
    assert [name for name, entry in FAMILIES.items() if name not in served and not entry["why"]] == []
