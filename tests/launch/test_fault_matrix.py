"""A sample of what ``python -m benchmarks.fault_runs`` runs: faults and controls, under every launcher.

Within seconds every process on every host has ended, non-zero and with a message that names who failed, and nothing is
left; or, after a control, all is as if nothing had been.
"""

from __future__ import annotations

import re
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from benchmarks.fault_job import FaultJob, Outcome
from benchmarks.fault_runs import Combination
from tests.hosts import require_hosts

pytestmark = pytest.mark.launch

NOTHING = Combination("nothing", "training", 0, "popen")
Job = tuple[str, Combination]
ONE_HOST = [
    Combination("raise", "validation", 0, "spawn"),
    Combination("stop", "backward", 0, "external"),
    Combination("stop-guardian", "training", 1, "popen"),
    Combination("hold", "training", 1, "popen"),
    Combination("kill", "training", 0, "popen"),
    Combination("kill", "training", 1, "spawn"),
]
SEVERAL_HOSTS = [
    Combination("kill", "saving", 1, "hosts"),
    Combination("drop", "training", 1, "hosts"),
    Combination("vanish", "validation", 0, "hosts"),
    Combination("sever", "training", 1, "hosts"),
    Combination("stop-guardian", "training", 1, "hosts"),
    Combination("pause", "training", 0, "hosts"),
]
STAGES = [
    Combination("stop", "backward", 1, "popen"),
    Combination("terminate", "validation", 0, "external"),  # between batches, where only one stage has heard of it
    Combination("kill", "saving", 1, "popen"),  # the rank whose layers rank 0 waits for
]


SHARDS = [
    Combination("kill", "backward", 1, "popen"),
    Combination("kill", "saving", 1, "popen"),  # the rank whose states rank 0 waits for
]


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[Job, Future[Outcome]]:
    """Of the runs that are asked for, two at a time: most of a job is waiting. All have ended when this returns."""
    cases = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]
    asked = [case.params["job"] for case in cases if case is not None]
    asked += sorted({(strategy, NOTHING) for strategy, _ in asked})

    def run(asked: Job) -> Outcome:
        strategy, combination = asked
        directory = tmp_path_factory.mktemp("job")
        variables = {"JOIN_TIMEOUT_S": "90"}  # a busy machine
        job = FaultJob(directory, combination.arguments(strategy), combination.launcher, variables, forked=True)
        return job.run(rank=combination.rank, kind=combination.kind, deadline_s=60)

    with ThreadPoolExecutor(2) as pool:
        return {job: pool.submit(run, job) for job in asked}


@pytest.mark.parametrize(
    "job",
    [
        *(("ring_ddp", each) for each in ONE_HOST),
        *(("pipeline_1f1b", each) for each in STAGES),
        *(("ddp_sharded", each) for each in SHARDS),
        ("hybrid", Combination("kill", "backward", 1, "popen")),  # rank 0 waits for it within a layer
        *(pytest.param(("ring_ddp", each), marks=pytest.mark.hosts) for each in SEVERAL_HOSTS),
    ],
    ids=lambda job: f"{job[0]}-{job[1].kind}-{job[1].where}-{job[1].launcher}",
)
def test_every_process_ends_with_a_message_or_nothing_happens(job: Job, outcomes: dict[Job, Future[Outcome]]) -> None:
    strategy, combination = job
    if combination.launcher == "hosts":
        require_hosts()
    outcome, weights = outcomes[job].result(), outcomes[strategy, NOTHING].result().weights
    assert weights is not None
    assert outcome.is_right(weights), f"{outcome.verdict()}, left: {outcome.leaks}\n{outcome.output[-6000:]}"
    if combination.kind == "sever":  # neither of the two is node 0, whose terminal it is
        assert re.search(r"node (1|2) \(host .*\) has received nothing from node (1|2) ", outcome.of_process(0))
    if (combination.kind, combination.where) == ("kill", "training"):
        assert re.search(r"^Resume with ckpt_path='.*\.ckpt'$", outcome.output, re.MULTILINE), (
            "also where rank 0 is gone"
        )
    if combination.kind in ("kill", "stop") and combination.where == "training":
        assert "last completed step 5" in outcome.output
    if combination.kind in ("drop", "sever"):
        assert "has received nothing from" in outcome.of_process(1), "whoever is cut off says so by itself"
