"""Processes that the system refuses to start: nothing of the job is left."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.context import ForkProcess
from typing import Any, NoReturn

import pytest

from lightning_multigpu.emulation import EmulatedHosts, Host, HostsUnavailable
from lightning_multigpu.emulation.job import HostsJob
from lightning_multigpu.job.failure_watch import FailureWatch
from lightning_multigpu.job.guardian import Guardian, GuardianError, start
from lightning_multigpu.job.joining import Joining
from lightning_multigpu.job.launchers.script_launcher import ScriptLauncher
from lightning_multigpu.job.launchers.spawn_launcher import _Ranks
from lightning_multigpu.job.run_signals import RunSignals
from tests.job.guardian.job import eventually, is_alive
from tests.job.test_failure_watch import RUN

pytestmark = pytest.mark.launch


def refuse(*_: Any, **__: Any) -> NoReturn:
    raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))


def refusing_the_second(function: Callable[..., Any], done: list[Any]) -> Callable[..., Any]:
    """``function`` once, whose arguments and result go into ``done``; then the system's refusal."""

    def call(*args: Any, **options: Any) -> Any:
        if done:
            refuse()
        done.append((args, result := function(*args, **options)))
        return result

    return call


@pytest.mark.parametrize("method", ["popen", "fork"])
def test_a_rank_that_cannot_be_started(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With popen, the ranks that had been started and the guardian waited on, for as long as the program lived."""
    guardian, done = Guardian.start(num_ranks=3), []
    if method == "popen":
        launcher = ScriptLauncher(RUN, Joining(FailureWatch(RunSignals())), lambda trainer: None)

        def start_ranks() -> None:
            begin = refusing_the_second(subprocess.Popen, done)
            for _ in range(2):
                launcher.procs.append(begin([sys.executable, "-c", "import time; time.sleep(600)"]))

        monkeypatch.setattr(launcher, "_call_children_scripts", start_ranks)
        with pytest.raises(OSError, match="Cannot allocate memory"):
            launcher._start_ranks(guardian)
        pid = done[0][1].pid
    else:
        monkeypatch.setattr(ForkProcess, "start", refusing_the_second(ForkProcess.start, done))
        with pytest.raises(OSError, match="Cannot allocate memory"):
            _Ranks(RUN, "fork", lambda *_: time.sleep(600), guardian)  # type: ignore[arg-type]
        pid = done[0][0][0].pid
    assert eventually(lambda: not is_alive(pid) and not is_alive(guardian.pid))


def test_a_guardian_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(start.subprocess, "run", refuse)
    descriptors = len(os.listdir("/proc/self/fd"))
    with pytest.raises(GuardianError, match=r"^the guardian does not start: \[Errno 12\] Cannot allocate memory"):
        Guardian.start(num_ranks=1)
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert start.ADDRESS not in os.environ


@pytest.mark.hosts
def test_a_command_on_a_host_that_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command on the hosts before it went on, and was ended only with the hosts."""
    done: list[Any] = []
    with EmulatedHosts(2) as hosts:
        monkeypatch.setattr(Host, "popen", refusing_the_second(Host.popen, done))
        with pytest.raises(HostsUnavailable, match=r"the command on host1 .*: \[Errno 12\] "):
            HostsJob(hosts, ["sleep", "600"], env={})
        assert [process.returncode for _, process in done] == [-9]
