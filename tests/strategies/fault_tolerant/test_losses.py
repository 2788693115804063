"""Ranks of ft_ddp that are lost, and come back."""

from __future__ import annotations

import copy
import itertools
import json
import math
import os
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_multigpu._torchft import start_lighthouse
from lightning_multigpu.emulation import EmulatedHosts
from lightning_multigpu.job.supervisor import LIGHTHOUSE
from lightning_multigpu.report import document
from tests.launch import job as launch_job
from tests.strategies.fault_tolerant import program
from tests.strategies.fault_tolerant.job import Job
from tests.strategies.fault_tolerant.program import LEARNING_RATE, MOMENTUM, Rows, first_layer, loss_of, unfreeze
from tests.world import free_port

SAMPLES = 40


def replayed(job: Job, samples: int = SAMPLES, *, unfreezes: int | None = None) -> list[float]:
    """The weights that one device has after the same samples in the same steps, as the ranks have noted them."""
    layer, rows = first_layer(), Rows(samples)
    layer.bias.requires_grad_(unfreezes is None)
    optimizer = torch.optim.SGD(layer.parameters() if unfreezes is None else [layer.weight], LEARNING_RATE, MOMENTUM)
    scheduler = program.schedule(optimizer)
    steps: dict[int, tuple[int, dict[int, list[int]]]] = {}
    for rank in range(job.ranks):
        for note in job.notes(rank):
            if "step" in note:
                epoch, ids = steps.setdefault(note["step"], (note["epoch"], {}))
                assert epoch == note["epoch"]
                assert ids.setdefault(rank, note["ids"]) == note["ids"], "another batch after a loss of all"
    assert sorted(steps) == [*range(1, len(steps) + 1)]
    epoch = 0
    for step in sorted(steps):
        if steps[step][0] > epoch:
            epoch += 1
            scheduler.step()
        if step == unfreezes:
            unfreeze(layer, optimizer)
        ids = torch.tensor([*itertools.chain(*steps[step][1].values())])
        optimizer.zero_grad()
        loss_of(layer, rows.x[ids], rows.y[ids]).backward()
        optimizer.step()
    return [*layer.weight[0].tolist(), layer.bias.item()]


def replayed_rounds(job: Job, every: int) -> list[float]:
    """The same under an outer optimizer, for optimizers of the ranks without momentum."""
    layer, rows = first_layer(), Rows(SAMPLES)
    outer = torch.optim.SGD(layer.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    notes = [{note["step"]: note for note in job.notes(rank) if "step" in note} for rank in range(job.ranks)]
    for begin in range(0, max(map(max, notes)), every):
        round_ = range(begin + 1, begin + every + 1)
        changes = []
        for of_rank in notes:
            if not of_rank.keys() >= {*round_}:
                continue  # lost within the round, or not there
            own = copy.deepcopy(layer)
            for note in (of_rank[step] for step in round_):
                ids = torch.tensor(note["ids"])
                gradients = torch.autograd.grad(loss_of(own, rows.x[ids], rows.y[ids]), [*own.parameters()])
                with torch.no_grad():
                    for parameter, gradient in zip(own.parameters(), gradients, strict=True):
                        rate = LEARNING_RATE * (1 + math.cos(math.pi * note["epoch"] / program.EPOCHS)) / 2
                        parameter.sub_(rate * gradient)
            changes.append([a.detach() - b.detach() for a, b in zip(layer.parameters(), own.parameters(), strict=True)])
        for parameter, *of_ranks in zip(layer.parameters(), *changes, strict=True):
            parameter.grad = torch.stack(of_ranks).mean(0)
        outer.step()
    return [*layer.weight[0].tolist(), layer.bias.item()]


def samples_of_epochs(job: Job) -> list[Counter[int]]:
    """How often each sample was trained on, by epoch."""
    found: dict[int, Counter[int]] = {}
    for note in itertools.chain(*(job.notes(rank) for rank in range(job.ranks))):
        if "step" in note:
            found.setdefault(note["epoch"], Counter()).update(note["ids"])
    return [found[epoch] for epoch in sorted(found)]


def pause_of(job: Job, rank: int, lost: int) -> float:
    """The longest time between two steps of ``rank`` that ended after another rank was lost."""
    since = next(note["lost"] for note in job.notes(lost) if "lost" in note)
    times = [since, *(note["at"] for note in job.notes(rank) if note.get("at", 0) > since)]
    return max(b - a for a, b in itertools.pairwise(times[:3]))


def assert_alike(results: dict[int, dict[str, Any]], job: Job, rel: float = 1e-9) -> None:
    """All ranks have equal bits, and the weights of one device that has seen the same samples."""
    first = next(iter(results.values()))
    for result in results.values():
        assert result == first
    assert first["weights"] == pytest.approx(replayed(job), rel=rel)


def await_text(path: Path, text: str, job: launch_job.Job, timeout_s: float = 30.0) -> None:
    """Waits until a file has the text."""
    deadline = time.monotonic() + timeout_s
    while not path.exists() or text not in path.read_text():
        assert time.monotonic() < deadline, f"no {text!r} in {path}:\n{job.output(0)}\n{job.output(1)}"
        time.sleep(0.05)


def fault(rank: int, step: int, signal: str = "SIGKILL", **options: Any) -> dict[str, Any]:
    return {"rank": rank, "step": step, "signal": signal, **options}


@pytest.mark.parametrize(
    ("options", "rel"),
    # Of gradients in 8 bits; the errors of a step travel with the next one.
    [({}, 1e-9), ({"shared_memory": False, "compression": "int8"}, 1e-3)],
    ids=["exact", "compressed"],
)
def test_no_loss(options: dict[str, Any], rel: float, tmp_path: Path) -> None:
    """A rank that was started when the fit was over took all for lost, and trained alone from the newest checkpoint.

    One that is late in a validation is no loss, also between hosts, where a sum would not wait for so long.
    """
    late = [fault(1, 20, "hang", where="validation", seconds=3)] if options else []
    plan = {"trainer": {"max_epochs": 2}, "options": options, "pause_s": 0, "faults": late, "validate": True}
    with Job(tmp_path, plan) as job:
        assert job.run() == [0, 0]
        results = job.results()
        assert [result["step"] for result in results.values()] == [20, 20]
        assert_alike(results, job, rel)
        assert (results[0]["weights"] == pytest.approx(replayed(job), rel=1e-6)) == (not options)
        assert "ft_ddp:" not in job.output()
        job.start(0)
        assert job.processes[0].wait(60) == 0
        assert samples_of_epochs(job) == [Counter(range(SAMPLES))] * 2


def test_a_killed_rank(tmp_path: Path) -> None:
    """The others go on, with the samples that are left; the rank of the terminal is lost like another."""
    with Job(tmp_path, {"trainer": {"max_epochs": 3}, "faults": [fault(0, 4)], "report": True}, ranks=3) as job:
        job.run()
        results = job.results()
        assert [*results] == [1, 2]
        assert_alike(results, job)
        assert pause_of(job, 1, 0) < 3
        first, *others = samples_of_epochs(job)
        assert set(first.values()) == {1}
        assert len(first) == SAMPLES - 2, "the batch in flight is lost, and no other sample"
        assert others == [Counter(range(SAMPLES))] * 2
        assert "rank 0 is lost at step 4: 2 of 3 ranks go on" in job.output()
        [change] = document.read(tmp_path / document.FILE_NAME).member_changes or []
        assert (change.step, change.lost, change.joined, change.members) == (4, [0], [], 2)
        assert "Ranks that were lost, or came in:" in job.output()


def test_a_rank_that_is_started_again(tmp_path: Path) -> None:
    """Where a script validated before it fitted, the rank ended there, with status 0, and never came back.

    It takes its state for longer than a sum waits for a rank.
    """
    plan = {
        "takes_s": 3,
        "trainer": {"max_epochs": -1},
        "faults": [fault(1, 25)],
        "options": {"shared_memory": False},
        "steps_after": 20,
        "unfreezes": 3,
        "validate": True,
        "validates_first": True,
    }
    with Job(tmp_path, plan) as job:
        assert job.run(restarts=1) == [0, 0]
        results = job.results()
        assert results[0] == results[1]
        assert results[0]["weights"] == pytest.approx(replayed(job, unfreezes=3), rel=1e-9)
        assert "rank 1 is back" in job.output()
        assert "a collective has failed" not in job.output()
        for epoch in samples_of_epochs(job)[:-1]:
            assert set(epoch.values()) == {1}
            assert len(epoch) >= SAMPLES - 2


def test_ranks_that_step_alone(tmp_path: Path) -> None:
    """Under an outer optimizer a rank is missed at the next average, and comes in at one with its momentum."""
    plan = {
        "trainer": {"max_epochs": -1},
        "faults": [fault(1, 7)],
        "options": {"average_every": 5, "outer_optimizer": "nesterov"},
        "momentum": 0.0,
        "steps_after": 20,
    }
    with Job(tmp_path, plan) as job:
        assert job.run(restarts=1) == [0, 0]
        results = job.results()
        assert results[0]["weights"] == results[1]["weights"]
        assert results[0]["weights"] == pytest.approx(replayed_rounds(job, 5), rel=1e-9)
        assert results[0]["step"] == results[1]["step"]
        assert "rank 1 is lost at step 9" in job.output()
        assert "rank 1 is back" in job.output()


def test_a_stop_of_a_rank_that_steps_alone(tmp_path: Path) -> None:
    """All stop where they average next."""
    plan = {"trainer": {"max_epochs": 2}, "options": {"average_every": 5}, "pause_s": 0, "stops": 7}
    with Job(tmp_path, plan) as job:
        assert job.run() == [0, 0]
        assert [result["step"] for result in job.results().values()] == [10, 10]


def test_the_supervisor_starts_rank_0_again(tmp_path: Path) -> None:
    """The whole way, as a user goes it: a script, a lighthouse, ranks, and the script's end in them alone.

    A rank that hangs lives, and two of two ranks are no majority for the lighthouse until the supervisor has ended it.
    """
    plan = {
        "trainer": {"max_epochs": -1},
        "faults": [fault(0, 6, "hang")],
        "options": {"straggler_timeout_s": 2},
        "steps_after": 20,
        "report": True,
    }
    variables = {"PLAN": json.dumps(plan), "DIRECTORY": str(tmp_path)}
    done = launch_job.run(str(tmp_path), "-m", program.__name__, timeout_s=60.0, **variables)
    assert done.returncode == 0, done.stderr
    first, second = (json.loads((tmp_path / f"result{rank}.json").read_text()) for rank in range(2))
    assert first == second
    changes = document.read(tmp_path / document.FILE_NAME).member_changes or []
    assert [(change.lost, change.joined) for change in changes] == [([0], []), ([], [0])]
    assert "hung while the others waited for it, and is started again (1 of 10)" in done.stderr
    assert "rank 0 is back" in done.stderr


def test_a_rank_that_is_stopped(tmp_path: Path) -> None:
    """It comes in again when it goes on."""
    options = {"shared_memory": False}
    plan = {"trainer": {"max_epochs": -1}, "faults": [fault(1, 6, "SIGSTOP")], "options": options, "steps_after": 20}
    with Job(tmp_path, plan) as job:
        job.wait_for("rank 1 is lost")
        job.processes[1].send_signal(signal.SIGCONT)
        assert job.run() == [0, 0]
        assert_alike(job.results(), job)
        assert pause_of(job, 0, 1) < 3
        assert "rank 1 is back" in job.output()


def test_a_rank_that_is_stopped_in_a_validation(tmp_path: Path) -> None:
    """It waited for the others, which had gone on without it, and had their supervisor end them as if they hung."""
    plan = {
        "trainer": {"max_epochs": -1},
        "faults": [fault(1, 20, "SIGSTOP", where="validation")],
        "options": {"straggler_timeout_s": 2},
        "steps_after": 20,
        "validate": True,
    }
    with Job(tmp_path, plan) as job:
        while max((note.get("step", 0) for note in job.notes(0)), default=0) < 25:
            time.sleep(0.05)
        job.processes[1].send_signal(signal.SIGCONT)
        assert job.run(restarts=1) == [0, 0]
        assert_alike(job.results(), job)
        assert "rank 1 is behind, at another place of the program: it has to start again" in job.output()
        assert "rank 1 is back" in job.output()


def test_a_rank_that_is_overtaken(tmp_path: Path) -> None:
    """One that was stopped until the others had ended does not train alone."""
    plan = {"trainer": {"max_epochs": 2}, "faults": [fault(1, 6, "SIGSTOP")], "pause_s": 0}
    with Job(tmp_path, plan) as job:
        job.processes[0].wait(60)
        job.processes[1].send_signal(signal.SIGCONT)
        assert job.run() == [0, 0]
        assert [*job.results()] == [0]
        assert "rank 1 ends at step 6: the others have ended the fit without it" in job.output()


def test_too_few_replicas(tmp_path: Path) -> None:
    """The rank that is left waits, saves and ends with an error; a rank that comes in time ends the wait."""
    plan = {
        "trainer": {"max_epochs": 2},
        "faults": [fault(1, 6)],
        "options": {"min_replicas": 2, "wait_for_replicas_s": 3},
    }
    with Job(tmp_path, plan) as job:
        assert job.run() == [1, -9]
        assert "rank 0 waits at step 6: 1 of min_replicas=2 ranks are left" in job.output()
        assert "TimeoutError: 1 of min_replicas=2 ranks are left for wait_for_replicas_s=3 s" in job.output()
        assert torch.load(tmp_path / "ft_ddp-step=6.ckpt", weights_only=False)["global_step"] == 6


def test_the_lighthouse_is_away(tmp_path: Path) -> None:
    """All wait for it, also for longer than for a rank that is late, which none of them is."""
    plan = {"trainer": {"max_epochs": 8}, "options": {"straggler_timeout_s": 2}, "pause_s": 0.03}
    with Job(tmp_path, plan) as job:
        while not job.notes(0):
            time.sleep(0.02)
        port = int(job.lighthouse.address().rpartition(":")[2])
        job.lighthouse.shutdown()
        job.wait_for("no quorum of the lighthouse")
        time.sleep(2.5)
        job.start_lighthouse(port)
        assert job.run() == [0, 0]
        assert_alike(job.results(), job)
        assert not any(job.store.check([f"late/{rank}/{job.processes[rank].pid}"]) for rank in range(2))


def test_all_ranks_are_lost(tmp_path: Path) -> None:
    """Started again, they go on from the newest checkpoint."""
    faults = [fault(0, 25), fault(1, 25)]
    with Job(tmp_path, {"trainer": {"max_epochs": 4}, "faults": faults, "validate": True}) as job:
        assert job.run(restarts=2) == [0, 0]
        results = job.results()
        assert_alike(results, job)
        assert results[0]["step"] == 40
        assert "all ranks were lost, and begin from" in job.output()


def test_the_last_member_is_lost_while_a_rank_comes_in(tmp_path: Path) -> None:
    """Ranks that began anew waited for the one that came in, and that one for them."""
    faults = [fault(0, 4), fault(0, 0, "SIGSTOP", where="begin", start=1), fault(1, 6, "hang")]
    with Job(tmp_path, {"trainer": {"max_epochs": 1}, "faults": faults, "pause_s": 0}) as job:
        job.processes[0].wait(60)
        job.start(0)
        while sum("lost" in note for note in job.notes(0)) < 2:
            time.sleep(0.02)
        job.processes[1].kill()
        job.processes[1].wait()
        job.start(1)
        time.sleep(3)  # it now waits for all ranks
        job.processes[0].send_signal(signal.SIGCONT)
        assert job.run(restarts=1) == [0, 0]
        results = job.results()
        assert results[0] == results[1]
        assert results[0]["step"] == 10
        assert "the ranks that this one was to join have ended" in job.output()


@pytest.mark.parametrize("agents", [1, 2])
def test_torchrun(agents: int, tmp_path: Path) -> None:
    """An agent starts all of its ranks again when one is lost, and its store still had what the former ranks wrote."""
    trainer = {"max_epochs": 4 if agents == 1 else -1}
    plan = {"trainer": trainer, "faults": [fault(0, 25)], "validate": True, "steps_after": 20}
    lighthouse, url = start_lighthouse("127.0.0.1", straggler_timeout_s=60, heartbeat_timeout_s=1.5)
    variables = {"PLAN": json.dumps(plan), "DIRECTORY": str(tmp_path), **({LIGHTHOUSE: url} if agents > 1 else {})}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--max-restarts=1", "--master-addr=127.0.0.1"]
    torchrun += [f"--master-port={free_port()}", f"--nnodes={agents}", f"--nproc-per-node={2 // agents}"]
    with launch_job.Job(tmp_path) as job:
        for agent in range(agents):
            job.start(None, [*torchrun, f"--node-rank={agent}", "-m", program.__name__], variables)
        job.wait(60)
        output = "".join(map(job.output, range(agents)))
    lighthouse.shutdown()
    first, second = (json.loads((tmp_path / f"result{rank}.json").read_text()) for rank in range(2))
    assert first == second
    assert first["step"] >= 40
    for line in "all ranks were lost, and begin from", "rank 0 is back at step":
        assert (line in output) == ((agents == 1) == line.startswith("all"))


@pytest.mark.hosts
def test_a_host_that_is_cut_off(hosts: EmulatedHosts, tmp_path: Path) -> None:
    """Outside of a step, where ranks may be late, the other host waited until the link was back, or for a minute."""
    faults = [fault(1, 20, "hang", where="validation")]
    plan = {"trainer": {"max_epochs": 2}, "faults": faults, "validate": True, "pause_s": 0}
    variables = {"PLAN": json.dumps(plan), "DIRECTORY": str(tmp_path), "LOCAL_WORLD_SIZE": "1"}
    with launch_job.Job(tmp_path / "logs") as job:
        for host in hosts:
            job.start(host, [sys.executable, "-m", program.__name__], {**host.environment(), **variables})
        await_text(tmp_path / "notes1.jsonl", "lost", job)
        hosts.switch.run("ip", "link", "set", "port1", "down")
        try:
            await_text(tmp_path / "result0.json", "}", job)
        finally:
            hosts.switch.run("ip", "link", "set", "port1", "up")
        assert "rank 1 is lost at step 20: 1 of 2 ranks go on" in job.output(0)
    result = json.loads((tmp_path / "result0.json").read_text())
    assert (result["step"], result["metrics"]["val_samples"]) == (20, 15)


def test_slurm(tmp_path: Path) -> None:
    """Its signal ran Lightning's handler, which saves with all ranks, in one rank and within a step."""
    faults = [fault(1, 6, "SIGUSR1"), fault(0, 8, "SIGUSR1"), fault(1, 15)]
    plan = {"trainer": {"max_epochs": 3}, "faults": faults, "pause_s": 0.03}
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f"#!/bin/sh\necho $* >> {tmp_path}/requeued\n")
    scontrol.chmod(0o755)
    task = {"NTASKS": "2", "NTASKS_PER_NODE": "2", "JOB_NAME": "train", "JOB_ID": "7", "NODEID": "0", "NNODES": "1"}
    variables = {
        **{f"SLURM_{name}": value for name, value in task.items()},
        **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "PLAN": json.dumps(plan)},
        **{"DIRECTORY": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}"},
    }
    with launch_job.Job(tmp_path) as job:
        for rank in "01":
            command = [sys.executable, "-m", program.__name__]
            job.start(None, command, {**variables, "SLURM_PROCID": rank, "SLURM_LOCALID": rank})
        assert [process.wait(60) for process in job.processes] == [0, -signal.SIGKILL], job.output(0)
        assert "rank 1 is lost at step 15: 1 of 2 ranks go on" in job.output(0)
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    assert torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=False)["global_step"] == 7


def test_sigterm(tmp_path: Path) -> None:
    """The rank ends its step, and nobody waits for it."""
    plan = {"trainer": {"max_epochs": 4}, "faults": [fault(0, 6, "SIGTERM")]}
    with Job(tmp_path, plan) as job:
        assert job.run() == [143, 0]
        assert_alike(job.results(), job)
        assert pause_of(job, 1, 0) < 1
        assert samples_of_epochs(job) == [Counter(range(SAMPLES))] * 4
        assert "rank 0 has left at step 6" in job.output()


def test_losses_outside_of_steps(tmp_path: Path) -> None:
    """In a save, of the rank that writes, and in the next validation, which is repeated."""
    faults = [fault(0, 14, where="save"), fault(1, 24, where="validation")]
    with Job(tmp_path, {"trainer": {"max_epochs": 4}, "faults": faults, "validate": True}, ranks=3) as job:
        assert job.run() == [-9, -9, 0]
        results = job.results()
        assert_alike(results, job)
        validated = [note["validated"] for note in job.notes(2) if "validated" in note]
        assert validated == [15.0] * 4, "one an epoch, also where that has more batches, of all samples"
        assert Path(results[2]["best"][0]).exists()
        assert len(list((tmp_path / "checkpoints").iterdir())) == 3
