"""Which faults are planted, and what counts as a good end; the runs themselves take an hour."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_multigpu.faults import PLACES
from tests.benchmarks.fault_job import Outcome
from tests.benchmarks.fault_runs import LAUNCHERS, combinations
from tests.launch.fault_script import KINDS, RANKS

GOOD = Outcome(
    kind="kill",
    struck=True,
    statuses=(1, -9),
    ended_after_s=2.0,
    survivors=(),
    orphans=0,
    leaks=(),
    names_rank=True,
    output="",
)


def test_every_combination_once_and_always_in_the_same_order() -> None:
    every = combinations([], None)
    assert len(set(every)) == len(every) == len(KINDS) * len(PLACES) * RANKS * len(LAUNCHERS) > 200
    assert combinations([], 15) == every[:15]


def test_only() -> None:
    found = combinations(["kill,stop", "end of fit", "rank1"], None)
    assert {(c.kind, c.where, c.rank) for c in found} == {("kill", "end of fit", 1), ("stop", "end of fit", 1)}
    assert len(found) == 2 * len(LAUNCHERS)
    with pytest.raises(SystemExit, match=r"--only: train is none of: .*training"):
        combinations(["train"], None)


def test_a_good_end() -> None:
    assert GOOD.is_right()
    assert GOOD.verdict() == "ended (1,-9)"
    assert replace(GOOD, kind="terminate", statuses=(143, 143)).is_right()


@pytest.mark.parametrize(
    "bad",
    [
        replace(GOOD, struck=False),
        replace(GOOD, statuses=(1, 0)),
        replace(GOOD, kind="terminate", statuses=(0, 0)),
        replace(GOOD, statuses=(1, None), survivors=("pid 7, stopped",), ended_after_s=None),
        replace(GOOD, leaks=("/dev/shm/ring",)),
    ],
)
def test_a_bad_end(bad: Outcome) -> None:
    assert not bad.is_right()
