"""Processes that the system refuses to start: the user is told why, and nothing of the job is left.

EAGAIN is raised in place of the system call. ENOMEM is the kernel's own: whoever forks into a PID namespace whose first
process has ended gets it. Only the calling thread forks there from then on.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lightning_multigpu import find_last_checkpoint
from lightning_multigpu.emulation import EmulatedHosts, Host, HostsUnavailable
from lightning_multigpu.emulation.job import HostsJob
from lightning_multigpu.job.guardian import Guardian, GuardianError, start
from tests.launch import job
from tests.launch.without_memory import without_memory

pytestmark = pytest.mark.launch

as_root = pytest.mark.skipif(os.getuid() != 0, reason="making a PID namespace needs root")
PROCESSES = "no more processes are allowed: see `ulimit -u`, and pids.max of the container"
MEMORY = "there is no memory for another process: see `free`, and memory.max of the container"
ERRORS = {
    "EAGAIN": f"[Errno 11] Resource temporarily unavailable: {PROCESSES}",
    "ENOMEM": f"[Errno 12] Cannot allocate memory: {MEMORY}",
}

# The second of the further ranks cannot be started; the program catches that and goes on, as a notebook does.
SCRIPT = """
import errno, multiprocessing.util, os, subprocess, sys, time
from lightning_multigpu import RingDDPStrategy
from tests.launch.job import marked
from tests.launch.without_memory import without_memory
from tests.strategies.tasks import Case, Classifier, make_trainer, train_loader

def refusing(start, is_rank):
    begun = []
    def start_or_refuse(*arguments, **options):
        begun.append(is_rank(*arguments))
        if begun[-1] and sum(begun) > 1:
            if sys.argv[2] == "EAGAIN":
                raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            without_memory()
        return start(*arguments, **options)
    return start_or_refuse

if __name__ == "__main__":
    trainer = make_trainer(Case(), RingDDPStrategy(start_method=sys.argv[1]), 3)
    if sys.argv[1] == "popen":
        starts = subprocess.Popen.__init__
        subprocess.Popen.__init__ = refusing(starts, lambda self, command, *rest: "guardian" not in str(command))
    elif sys.argv[1] == "fork":
        fork = os.fork
        os.fork = refusing(fork, lambda: sys._getframe(2).f_code.co_name == "_launch")
    else:
        starts = multiprocessing.util.spawnv_passfds
        multiprocessing.util.spawnv_passfds = refusing(starts, lambda *given: "spawn_main" in str(given))
    try:
        trainer.fit(Classifier(), train_loader(Case(), trainer))
    except OSError as error:
        print(f"raised {error}: {error.__notes__}")
    until = time.monotonic() + 5  # the guardian is no child: nobody can wait until SIGKILL has ended it
    while (left := others()) and time.monotonic() < until:
        time.sleep(0.02)
    print("left", left)
""".replace(
    'if __name__ == "__main__":',
    """def is_tracker(process):  # multiprocessing's own: it ends with the program
    return "resource_tracker" in " ".join(process.cmdline())

def others():
    return [p.pid for p in marked(os.environ["JOB_MARK"]) if p.pid != os.getpid() and not is_tracker(p)]

if __name__ == "__main__":""",
)


@pytest.mark.parametrize(
    ("method", "rank", "error"),
    [
        ("popen", 2, "EAGAIN"),
        ("fork", 1, "EAGAIN"),
        pytest.param("popen", 2, "ENOMEM", marks=as_root),
        pytest.param("fork", 1, "ENOMEM", marks=as_root),
        pytest.param("spawn", 1, "ENOMEM", marks=as_root),
    ],
)
def test_a_rank_that_cannot_be_started(method: str, rank: int, error: str, tmp_path: Path) -> None:
    """With popen, the ranks that had been started and the guardian waited on, for as long as the program lived."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    finished = job.run(str(tmp_path), str(script), method, error)
    raised, left = finished.stdout.strip().splitlines()[-2:]
    what, _, hint = ERRORS[error].partition(": ")
    assert raised == f"raised {what}: ['rank {rank} of 3 on this host cannot start: {hint}']", finished.stderr[-2000:]
    assert left == "left []"
    assert "The job failed" not in finished.stderr, "the guardian would call the ranks that are ended the cause"


def in_a_thread(function: Callable[[], Any]) -> Any:
    """Only this thread's processes are refused."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@as_root
@pytest.mark.parametrize("fork", ["first", "second"])
def test_a_guardian_that_cannot_be_started(fork: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The guardian leaves its parent by a fork of its own, of whose failure only a traceback told."""
    expected = rf"the guardian does not start: \[Errno 12\] Cannot allocate memory; {re.escape(MEMORY)}"

    def begin() -> None:
        if fork == "first":
            without_memory()
        Guardian.start(num_ranks=1)

    if fork == "second":
        monkeypatch.setattr(start.subprocess, "run", partial(subprocess.run, preexec_fn=without_memory))
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(GuardianError, match=f"^{expected}$"):
        in_a_thread(begin)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert start.ADDRESS not in os.environ


LOADER_SCRIPT = """
import os, sys
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from lightning_multigpu import RingDDPStrategy
from tests.launch.without_memory import without_memory
from tests.strategies.tasks import Case, Classifier, make_trainer, train_loader

class Loader(DataLoader):
    def __iter__(self):
        if os.environ.get("LOCAL_RANK") == "1" and trainer.current_epoch == 1:
            without_memory()
        return super().__iter__()

if __name__ == "__main__":
    trainer = make_trainer(
        Case(), RingDDPStrategy(failure_timeout_s=10.0), 2, max_steps=-1, max_epochs=3, default_root_dir=sys.argv[1],
        enable_checkpointing=True, callbacks=[ModelCheckpoint(sys.argv[1], save_top_k=-1)],
    )
    trainer.fit(Classifier(), Loader(train_loader(Case(), trainer).dataset, batch_size=4, num_workers=2))
"""


@as_root
def test_a_worker_of_a_loader_that_cannot_be_started(tmp_path: Path) -> None:
    """The rank's error is torch's, with what to do; the job ends, and its last checkpoint is there and named."""
    script = tmp_path / "script.py"
    script.write_text(LOADER_SCRIPT)
    finished = job.run(str(tmp_path), str(script), str(tmp_path / "saved"))
    assert finished.returncode != 0
    assert "rank 1 " in finished.stderr
    assert "raised OSError: [Errno 12] Cannot allocate memory" in finished.stderr
    assert f"rank 1 cannot start a worker process: {MEMORY}; or lower the loader's num_workers" in finished.stderr
    last = find_last_checkpoint(tmp_path / "saved")
    assert last is not None
    assert f"Resume with ckpt_path='{last}'" in finished.stderr


@pytest.mark.hosts
@pytest.mark.parametrize("method", ["_build", "_connect"])
def test_emulated_hosts_that_cannot_be_put_up(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a process that holds a namespace, nor one that connects it."""
    build = getattr(EmulatedHosts, method)

    def build_or_refuse(*arguments: Any) -> None:
        without_memory()
        build(*arguments)

    def enter() -> None:
        with EmulatedHosts(2):
            pass

    monkeypatch.setattr(EmulatedHosts, method, build_or_refuse)
    with pytest.raises(HostsUnavailable, match=rf"`.*` cannot be started: \[Errno 12\] .*; {re.escape(MEMORY)}"):
        in_a_thread(enter)


@pytest.mark.hosts
def test_a_command_on_a_host_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command on the hosts before it went on, and was ended only with the hosts."""
    started: list[subprocess.Popen[str]] = []
    popen = Host.popen

    def popen_or_refuse(host: Host, *arguments: Any, **options: Any) -> subprocess.Popen[str]:
        if host.node_rank == 1:
            without_memory()
        started.append(popen(host, *arguments, **options))
        return started[-1]

    monkeypatch.setattr(Host, "popen", popen_or_refuse)
    with EmulatedHosts(2) as hosts:
        with pytest.raises(HostsUnavailable, match=rf"the command on host1 .*: \[Errno 12\] .*; {re.escape(MEMORY)}"):
            in_a_thread(lambda: HostsJob(hosts, ["sleep", "600"], env={}))
        assert [process.returncode for process in started] == [-9]
