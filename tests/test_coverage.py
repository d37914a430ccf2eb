"""What docs/models.md says of every family mlx-lm has, tried again: one that a new mlx-lm changes fails by name."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import pytest

from ops import models_page
from ops.families import coverage
from ops.families.tiny import described

FAMILIES: dict[str, dict[str, Any]] = coverage.pinned()["families"]


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


def test_no_family_is_served_with_other_logits_than_its_own() -> None:
    served = {name: entry for name, entry in FAMILIES.items() if entry["path"] in coverage.SERVED}
    assert [name for name, entry in served.items() if not float(entry["parity"]) <= coverage.TOLERANCE] == []
    assert [name for name, entry in FAMILIES.items() if name not in served and not entry["why"]] == []
