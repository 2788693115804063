"""``lightning-multigpu emulate``: one command on every host, as root and as anybody else, with one exit status."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from lightning_multigpu.cli import main
from lightning_multigpu.emulation import HostsUnavailable, namespaces
from tests.hosts import require_hosts

# Root's rights are left behind: what follows is user 1000, and owns nothing but its files.
NOT_ROOT = ["unshare", "--user", "--map-user=1000", "--map-group=1000"]
EMULATE = [*NOT_ROOT, sys.executable, "-m", "lightning_multigpu", "emulate"]


def emulate(*arguments: str) -> subprocess.CompletedProcess[str]:
    require_hosts()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run([*EMULATE, *arguments], env=environment, capture_output=True, text=True, timeout=400)


@pytest.mark.hosts
def test_every_host_runs_the_command_and_knows_its_place() -> None:
    command = "echo node $NODE_RANK of $PL_TRAINER_NUM_NODES x $PL_TRAINER_DEVICES, first $MASTER_ADDR:$MASTER_PORT"
    done = emulate("--nodes", "2", "--devices", "3", "--", "sh", "-c", f"{command}; exit $((NODE_RANK * 7))")
    assert done.returncode == 7, "that of the host that failed"
    lines = set(done.stdout.splitlines())
    assert {"node 0 of 2 x 3, first 10.77.0.1:29500", "[host1] node 1 of 2 x 3, first 10.77.0.1:29500"} == lines
    assert "host1: sent" in done.stderr


@pytest.mark.hosts
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_the_command_on_all_hosts_and_leaves_nothing(number: signal.Signals, tmp_path: Path) -> None:
    """After SIGKILL of ``emulate`` its commands went on, and the processes that they had started."""
    require_hosts()
    mark = {**os.environ, "EMULATE_MARK": tmp_path.name}
    command = "sleep 1000 >/dev/null 2>&1 & echo started; wait"
    with subprocess.Popen(
        [*EMULATE, "--nodes", "2", "--", "sh", "-c", command], env=mark, stdout=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout is not None
        lines = sorted(running.stdout.readline() for _ in range(2))
        assert lines == ["[host1] started\n", "started\n"]
        running.send_signal(number)
        assert running.wait(timeout=30) == (-number if number == signal.SIGKILL else 128 + number)
    deadline = time.monotonic() + 10
    while (left := _marked(tmp_path.name)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def _marked(mark: str) -> list[int]:
    left = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("EMULATE_MARK") == mark and process.status() != psutil.STATUS_ZOMBIE:
                left.append(process.pid)
        except psutil.Error:
            continue
    return left


def test_a_kernel_without_user_namespaces_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    monkeypatch.setattr(namespaces, "_UNSHARE", ("sh", "-c", "echo Operation not permitted >&2; exit 1"))
    assert main(["emulate", "--", "true"]) == 2
    error = capsys.readouterr().err
    assert "user 1000 may not make user namespaces (Operation not permitted): run it with sudo" in error


def test_a_machine_without_unshare_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces.shutil, "which", lambda program: None)
    with pytest.raises(HostsUnavailable, match="install util-linux"):
        namespaces.become_root_of_a_user_namespace(["true"])
