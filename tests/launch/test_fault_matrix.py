"""A sample of what ``python -m benchmarks.fault_runs`` runs: faults and controls, under every launcher.

Within seconds every process on every host has ended, non-zero and with a message that names who failed, and nothing is
left; or, after a control, all is as if nothing had been. A failed run goes on from its last checkpoint to the weights
of one that never failed.
"""

from __future__ import annotations

import re
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from benchmarks.fault_job import FaultJob, Outcome
from benchmarks.fault_runs import STEP, Combination
from lightning_multigpu.job.checkpoint_files.last_checkpoint import complete_checkpoints, find_last_checkpoint
from tests.hosts import require_hosts
from tests.strategies.tasks import Case, Classifier, assert_same_weights, eval_loader, fit, fit_module, state
from tests.world import World

pytestmark = pytest.mark.launch

Job = tuple[str, Combination]
CASE = Case(num_samples=96)  # the job's
EVERY_STEPS = 4  # it saves a checkpoint
ONE_HOST = [
    Combination("kill", "training", 0, "popen"),
    Combination("kill", "training", 1, "spawn"),
    Combination("stop", "backward", 0, "external"),
    Combination("interrupt", "training", 1, "popen"),
    Combination("terminate", "training", 0, "spawn"),  # rank 0 has no result, for which Lightning's launcher waits
    Combination("hold", "training", 1, "popen"),
]
# Of the job, whose rank 0 saves when it stops: where the ranks have agreed to, or at the last step that all of them
# have completed.
STATUSES = {"interrupt": 1, "terminate": 143}
SEVERAL_HOSTS = [
    Combination("kill", "saving", 1, "hosts"),
    Combination("drop", "training", 1, "hosts"),
    Combination("vanish", "validation", 0, "hosts"),
    Combination("sever", "training", 1, "hosts"),
    Combination("pause", "training", 0, "hosts"),
]
STAGES = [
    Combination("terminate", "validation", 0, "external"),  # between batches, where only one stage has heard of it
    Combination("kill", "saving", 1, "popen"),  # the rank whose layers rank 0 waits for
]


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[Job, Future[tuple[Outcome, Path]]]:
    """Of the runs that are asked for, with the directories of their checkpoints.

    Three run at a time: most of a job is waiting. All have ended when this returns.
    """
    cases = [getattr(item, "callspec", None) for item in request.session.items if item.path == request.path]

    def run(asked: Job) -> tuple[Outcome, Path]:
        strategy, combination = asked
        directory = tmp_path_factory.mktemp("job")
        variables = {"JOIN_TIMEOUT_S": "90"}  # a busy machine
        job = FaultJob(directory, combination.arguments(strategy), combination.launcher, variables, forked=True)
        return job.run(rank=combination.rank, kind=combination.kind, deadline_s=60), directory / "saved"

    with ThreadPoolExecutor(3) as pool:
        return {case.params["job"]: pool.submit(run, case.params["job"]) for case in cases if case is not None}


@pytest.fixture(scope="module")
def one_device() -> dict[str, Any]:
    return fit(CASE, None, 1)


def resume(saved: Path) -> dict[str, Any]:
    module = Classifier()
    options: dict[str, Any] = {"val_check_interval": 6, "ckpt_path": find_last_checkpoint(saved)}
    trainer = fit_module(module, "ring_ddp", 2, CASE, validation=eval_loader(), **options)
    return {"weights": state(module), "resumed": len(module.seen), "global_step": trainer.global_step}


@pytest.mark.parametrize(
    "job",
    [
        *(("ring_ddp", each) for each in ONE_HOST),
        *(("pipeline_1f1b", each) for each in STAGES),
        ("ddp_sharded", Combination("kill", "saving", 1, "popen")),  # the rank whose states rank 0 waits for
        # torch's spawned process swallows it and ends with status 0, and the others wait for half an hour.
        ("ring_ddp", Combination("interrupt", "joining", 1, "spawn")),
        ("hybrid", Combination("kill", "backward", 1, "popen")),  # rank 0 waits for it within a layer
        *(pytest.param(("ring_ddp", each), marks=pytest.mark.hosts) for each in SEVERAL_HOSTS),
    ],
    ids=lambda job: f"{job[0]}-{job[1].kind}-{job[1].where}-{job[1].launcher}",
)
def test_every_process_ends_with_a_message_or_nothing_happens(
    job: Job, outcomes: dict[Job, Future[tuple[Outcome, Path]]], one_device: dict[str, Any], world2: World
) -> None:
    combination = job[1]
    if combination.launcher == "hosts":
        require_hosts()
    outcome, saved = outcomes[job].result()
    weights = sum(float(weight.double().abs().sum()) for weight in one_device["weights"].values())
    assert outcome.is_right(weights), f"{outcome.verdict()}, left: {outcome.leaks}\n{outcome.output[-6000:]}"
    if combination.kind == "sever":  # neither of the two is node 0, whose terminal it is
        assert re.search(r"node (1|2) \(host .*\) has received nothing from node (1|2) ", outcome.of_process(0))
    if (combination.kind, combination.where) == ("kill", "training"):
        assert re.search(r"^Resume with ckpt_path='.*\.ckpt'$", outcome.output, re.MULTILINE), (
            "also where rank 0 is gone"
        )
        assert f"last completed step {STEP}" in outcome.output
    if combination.kind in ("drop", "sever"):
        assert "has received nothing from" in outcome.of_process(1), "whoever is cut off says so by itself"
    if (combination.kind, combination.where) == ("interrupt", "joining"):
        assert re.search(r"rank 1 \(host .* was interrupted \(SIGINT\)", outcome.output)
    if combination in ONE_HOST and not outcome.is_control:
        newest = max(file.global_step for file in complete_checkpoints(saved))
        if combination.kind in STATUSES:
            assert outcome.statuses == (STATUSES[combination.kind],)
            assert newest >= STEP
        else:
            assert newest == EVERY_STEPS
        for found in world2.run(resume, saved):
            assert found["global_step"] == one_device["global_step"]
            assert found["resumed"] == one_device["global_step"] - newest, "it has gone on, not begun again"
            assert_same_weights(found, one_device)
