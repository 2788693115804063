"""A SLURM of two nodes on this machine: controller and nodes are real, and end with the block that starts them."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.launch.job import MARK, marked
from tests.world import free_port

_PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scancel", "scontrol", "sinfo")
_CONFIG = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SlurmdSpoolDir={folder}/%n
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SchedulerType=sched/builtin
ReturnToService=2
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[0]} CPUs=4
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=4
PartitionName=all Nodes=n1,n2 Default=YES State=UP
"""


class Slurm:
    """A cluster; close it. The folder is that of the configuration, states and logs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.environment = {**os.environ, "PATH": _path(), "SLURM_CONF": f"{folder}/slurm.conf", MARK: str(folder)}

    def start(self) -> None:
        key, munge = self.folder / "munge.key", self.folder / "munge"
        key.write_bytes(secrets.token_bytes(64))
        key.chmod(0o600)
        ports = free_port(), free_port()
        config = _CONFIG.format(folder=self.folder, host=socket.gethostname(), port=free_port(), ports=ports)
        (self.folder / "slurm.conf").write_text(config)
        files = [f"--{name}-file={munge}.{name}" for name in ("key", "pid", "log", "seed")]
        self._daemon("munged", "--foreground", "--force", f"--socket={munge}.socket", *files)
        self.wait_until(Path(f"{munge}.socket").exists, "munged")
        self._daemon("slurmctld", "-D")
        for node in ("n1", "n2"):
            self._daemon("slurmd", "-D", "-N", node)
        self.wait_until(lambda: self.run("sinfo", "-h", "-o", "%T %D") == "idle 2\n", "two nodes")

    def _daemon(self, program: str, *arguments: str) -> None:
        with (self.folder / "daemons.log").open("ab") as log:
            command = [program, *arguments]
            self._daemons.append(subprocess.Popen(command, env=self.environment, stdout=log, stderr=log))

    def run(self, *command: str, cwd: Path | None = None, **variables: str) -> str:
        options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "timeout": 60}
        return subprocess.run(command, env={**self.environment, **variables}, cwd=cwd, **options).stdout

    def state(self, number: str) -> str:
        """Of a batch job: RUNNING, FAILED, ..."""
        return self.run("scontrol", "show", "job", number).partition("JobState=")[2].partition(" ")[0]

    def wait_until(self, condition: Callable[[], bool], what: str, *outputs: Path, timeout_s: float = 120.0) -> None:
        """Waits; fails with the end of the outputs, and of what the daemons say."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if time.monotonic() > deadline:
                shown = [path.read_text()[-4000:] for path in (*outputs, self.folder / "daemons.log") if path.exists()]
                pytest.fail("\n---\n".join([f"{what} did not come within {timeout_s} s", *shown]), pytrace=False)
            time.sleep(0.1)

    def close(self) -> None:
        """Ends the daemons, the last first, and whatever they have left."""
        for daemon in reversed(self._daemons):
            daemon.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
        for process in [*marked(str(self.folder)), *self._daemons]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        for daemon in self._daemons:
            daemon.wait()


def _path() -> str:
    return os.pathsep.join([os.environ["PATH"], "/usr/sbin"])


@contextlib.contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """The cluster within the block; without SLURM the test is skipped, and fails in CI."""
    if missing := [each for each in _PROGRAMS if shutil.which(each, path=_path()) is None]:
        why = f"no {', '.join(missing)}: apt-get install slurm-wlm munge"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(why)
    cluster = Slurm(folder)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.close()
