"""Checks of ends on a card: a rank that fails within a collective, one that hangs, and ranks that a process spawns."""

from __future__ import annotations

import re
from functools import partial

from benchmarks.fault_job import FaultJob, Outcome
from benchmarks.fault_runs import Combination
from benchmarks.gpu.table import Check, Place
from tests.launch.test_hangs import HangingJob

_ENDS_WITHIN_S = 15.0
_JOB_S = 120.0  # with the start of its processes
_JOINS_WITHIN_S = 90.0  # with the start of CUDA and of NCCL
_MOST_REPORTS = 5


def _run(place: Place, name: str, combination: Combination) -> Outcome:
    variables = {**place.card.variables, "JOIN_TIMEOUT_S": f"{_JOINS_WITHIN_S:g}"}
    job = FaultJob(place.directory, combination.arguments(name), combination.launcher, variables, forked=True)
    return job.run(rank=combination.rank, kind=combination.kind, deadline_s=30.0)


def ends(place: Place, *, name: str, kind: str) -> str:
    """The other rank waits in a collective for the one that fails; the job ends in time, and names it."""
    outcome = _run(place, name, Combination(kind, "backward", 1, "popen"))
    told = f"{outcome.verdict()}, left: {[*outcome.leaks, *outcome.survivors]}"
    assert outcome.is_right(), f"{told}\n{outcome.output[-6000:]}"
    assert outcome.ended_after_s is not None
    assert outcome.ended_after_s <= _ENDS_WITHIN_S, (
        f"ended after {outcome.ended_after_s:.1f} s\n{outcome.output[-6000:]}"
    )
    return f"{outcome.verdict()} after {outcome.ended_after_s:.1f} s"


def spawned(place: Place, *, name: str) -> str:
    """Ranks spawned by a running interpreter come to the weights of one process."""
    outcome = _run(place, name.removesuffix("_spawn"), Combination("nothing", "training", 0, "spawn"))
    weights = place.reference(_weights_of_one, place.card.kind)
    assert outcome.is_right(weights), f"{outcome.verdict()}, {outcome.weights} {weights}\n{outcome.output[-6000:]}"
    return ""


def _weights_of_one(kind: str) -> float:
    """What the job's script tells of the weights, trained by one process on a card of this kind."""
    from benchmarks.gpu.card import Card
    from benchmarks.gpu.training import train
    from tests.strategies.tasks import Case

    trained = train(Card.found(kind), None, Case(num_samples=96))
    return sum(float(value.double().abs().sum()) for value in trained.weights.values())


def hang_report(place: Place) -> str:
    """Rank 0's host waits behind an all-reduce to which rank 1 never comes: on a GPU it spins in ``.item()``."""
    with HangingJob(place.directory / "job", "popen", "behind", place.card.variables) as job:
        for number in range(1, _MOST_REPORTS + 1):  # a first collective of NCCL may take long enough for one of its own
            report = job.reports(number)[number - 1]
            if "Rank 1 never came" in report:
                break
        assert re.search(r"^  0 .*all_reduce #\d+ of group data", report, re.MULTILINE), report
        assert "Rank 1 never came" in report, report
        assert "rank 1" in job.ends_when_rank_1_is_killed()
    return ""


def checks() -> list[Check]:
    found = [
        Check(
            row=name,
            column=f"a rank {what} in a collective",
            function=partial(ends, name=name, kind=kind),
            deadline_s=_JOB_S,
        )
        for name, kinds in (
            ("ring_ddp", {"kill": "killed", "stop": "stopped", "raise": "raising"}),
            ("ddp_sharded", {"kill": "killed", "raise": "raising"}),
            ("pipeline_1f1b", {"kill": "killed", "raise": "raising"}),
            ("tensor_split", {"kill": "killed"}),
            ("sync_ps", {"kill": "killed"}),
        )
        for kind, what in kinds.items()
    ]
    found += [
        Check(row=name, column="spawned ranks", function=partial(spawned, name=name), ranks=1, deadline_s=_JOB_S)
        for name in ("ring_ddp_spawn", "ddp_sharded_spawn")
    ]
    found.append(Check(row="ring_ddp", column="hang report", function=hang_report, deadline_s=_JOB_S))
    return found
