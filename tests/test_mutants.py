"""The tables of mutants still fit the package and its tests; ``python -m tests.mutants`` runs the mutants."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from tests.mutants import Mutant, load
from tests.mutants.__main__ import BROKEN, CAUGHT, SURVIVED, _outcome


def test_every_mutant_still_applies() -> None:
    stale = {mutant.title: problem for mutant in load() if (problem := mutant.problem())}
    assert not stale, "\n".join(f"{title}: {problem}" for title, problem in stale.items())


def test_every_mutant_has_a_name_of_its_own() -> None:
    assert [name for name, count in Counter(mutant.title for mutant in load()).items() if count > 1] == []


@pytest.mark.parametrize(
    ("status", "output", "verdict"),
    [
        (1, "FAILED tests/a.py::test_sum - assert 3 == 4\n1 failed", CAUGHT),
        (70, "FAILED tests/a.py::test_sum[2 ranks] - assert 3 == 4\nResourceWarning: unclosed file", CAUGHT),
        (-9, "", CAUGHT),
        (None, "", CAUGHT),
        (0, "1 passed", SURVIVED),
        (2, "ERROR tests/a.py - SyntaxError\nInterrupted: 1 error during collection", BROKEN),
        (4, "ERROR: found no collectors for tests/a.py::test_sum", BROKEN),
    ],
)
def test_a_test_that_failed_has_caught_its_mutant(status: int | None, output: str, verdict: str) -> None:
    """Where the test had left a file open, pytest ended with another status, and the mutant was called broken."""
    mutant = Mutant("ring", "sums nothing", "ring.py", "old", "new", "a.py::test_sum")
    run: Any = SimpleNamespace(status=status, seconds=1.0, scratch=SimpleNamespace(output=lambda: output))
    assert _outcome(mutant, run).verdict == verdict
