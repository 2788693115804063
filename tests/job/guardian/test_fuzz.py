"""A few hundred bad messages to every target of benchmarks.guardian_fuzz, which sends 100,000 to each."""

from __future__ import annotations

import sys

import pytest

from benchmarks import guardian_flood
from benchmarks.guardian_fuzz import TARGETS

pytestmark = pytest.mark.launch


@pytest.mark.parametrize("target", TARGETS)
def test_bad_messages_do_no_harm(target: str) -> None:
    assert TARGETS[target](300, seed=1).problem == ""


def test_a_flood_too_short_for_quartiles_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended in a StatisticsError after the training."""
    monkeypatch.setattr(sys, "argv", ["flood", "--connections", "1250"])
    with pytest.raises(SystemExit, match=r"^1000 connections .* at --rate 200: quartiles take two windows of 5 s"):
        guardian_flood.main()
