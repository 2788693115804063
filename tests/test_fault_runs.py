"""Which faults are planted, and what counts as a good end; the runs themselves take an hour."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.fault_job import Outcome
from benchmarks.fault_runs import (
    LAUNCHERS,
    append_result,
    combinations,
    read_results,
    repeated,
    summary,
    without,
)
from tests.faults import PLACES
from tests.launch.fault_script import CONTROLS, HOST_KINDS, KINDS, RANKS, must_survive

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
    assert len(set(every)) == len(every) > 200
    kinds = {(c.kind, c.where, c.rank, c.launcher) for c in every if c.kind in ("kill", "raise", "hang")}
    assert kinds == set(itertools.product(("kill", "raise", "hang"), PLACES, range(RANKS), LAUNCHERS))
    assert {c.kind for c in every} == {*KINDS, *HOST_KINDS, *CONTROLS}
    assert {c.launcher for c in every if c.kind in HOST_KINDS} == {"hosts"}
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
    survived = replace(GOOD, kind="pause", is_control=True, statuses=(0, 0), weights=3.5, names_rank=False)
    assert survived.is_right(3.5)
    assert not survived.is_right(3.6)
    assert not replace(survived, statuses=(0, 1)).is_right(3.5)
    hang = replace(GOOD, kind="hang", survivors=("pid 7",), statuses=(None, None), reported=True)
    assert hang.is_right()
    assert not replace(hang, reported=False).is_right()
    assert replace(hang, reported=False).verdict() == "NOT REPORTED"
    limited = replace(hang, survivors=(), statuses=(1, 1), reported=False)
    assert limited.is_right()
    assert limited.verdict() == "ended (1,1)", "joining has its own limit"


def test_what_a_job_has_to_survive() -> None:
    assert must_survive("interrupt", "data"), "a worker of a loader leaves Ctrl-C to its rank"
    assert must_survive("nothing", "training")
    assert all(must_survive(kind, "training") for kind in CONTROLS)
    assert not any(must_survive(kind, "data") for kind in KINDS if kind != "interrupt")


@pytest.mark.parametrize(
    "bad",
    [
        replace(GOOD, struck=False),
        replace(GOOD, statuses=(1, 0)),
        replace(GOOD, kind="terminate", statuses=(0, 0)),
        replace(GOOD, statuses=(1, None), survivors=("pid 7, stopped",), ended_after_s=None),
        replace(GOOD, leaks=("/dev/shm/ring",)),
        replace(GOOD, names_rank=False),
        replace(GOOD, resumed=False),
    ],
)
def test_a_bad_end(bad: Outcome) -> None:
    assert not bad.is_right()


def test_a_bench_that_was_ended_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """It began anew, or had to be told by hand how many runs to leave out, and its table held the last part only."""
    path = tmp_path / "runs.jsonl"
    assert read_results(path, "ring_ddp") == []
    every = combinations([], None)
    assert repeated(every, len(every) + 2) == [*every, *every[:2]]
    good = replace(GOOD, kind=every[0].kind)
    orphaned = replace(GOOD, kind=every[2].kind, orphans=1)
    append_result(path, "ring_ddp", every[0], good)
    append_result(path, "ddp", every[1], GOOD)
    with path.open("a") as file:
        file.write('{"strategy": "ring_ddp", "kind": "ki')  # the machine was switched off here
    assert read_results(path, "ring_ddp") == [(every[0], good)]
    append_result(path, "ring_ddp", every[2], orphaned)
    kept = read_results(path, "ring_ddp")
    assert kept == [(every[0], good), (every[2], orphaned)]
    done = [combination for combination, _ in kept]
    assert without([*every[:3], every[0]], done) == [every[1], every[0]], "each as often as it is asked for"
    assert summary([outcome for _, outcome in kept])["all"]["orphans"] == 1
