"""A few hundred bad messages to servers; benchmarks.server_fuzz sends up to 100,000 of each kind."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from benchmarks import guardian_flood, server_flood
from benchmarks.server_fuzz import TARGETS


@pytest.mark.parametrize("target", TARGETS)
def test_bad_messages_do_no_harm(target: str) -> None:
    assert TARGETS[target](400, seed=1).problem == ""


@pytest.mark.parametrize(("flood", "number"), [(server_flood, 1000), (guardian_flood, 1250)])
def test_a_flood_too_short_for_quartiles_is_refused(
    flood: ModuleType, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended in a StatisticsError after the training."""
    monkeypatch.setattr(sys, "argv", ["flood", "--connections", str(number)])
    with pytest.raises(SystemExit, match=r"^1000 connections .* at --rate 200: quartiles take two windows of 5 s"):
        flood.main()
