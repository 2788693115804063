"""A few hundred bad messages to servers; benchmarks.server_fuzz sends up to 100,000 of each kind."""

from __future__ import annotations

import pytest

from benchmarks.server_fuzz import TARGETS


@pytest.mark.parametrize("target", TARGETS)
def test_bad_messages_do_no_harm(target: str) -> None:
    assert TARGETS[target](400, seed=1).problem == ""
