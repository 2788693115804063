"""``lightning-multigpu doctor``: the report of a host, what is broken there, and what differs between hosts."""

import os
import re
import socket
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

from lightning_multigpu.bench.collectives import collective_run
from lightning_multigpu.bench.collectives.collective_run import CollectivePlan, CollectiveResult
from lightning_multigpu.cli import main
from lightning_multigpu.commands.doctor import facts_of_host, problems_of, report, shown_variables
from lightning_multigpu.communication.job_secret import JOB_SECRET
from tests import preforked
from tests.commands.test_topology import gpus_are_there
from tests.world import free_port

SECRET = "0123456789abcdef" * 4
LAUNCHED = {"TORCHELASTIC_RUN_ID": "job", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "WORLD_SIZE": "2"}


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    limits: dict[str, Any] = {"open_files": 20_000, "processes": 4096}
    return {**facts_of_host("127.0.0.1", 2), **limits, "shm_free_bytes": 10**10}


def test_the_report_of_one_host(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(JOB_SECRET, SECRET)
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth 0")
    status = main(["doctor"])
    printed = capsys.readouterr().out
    assert SECRET not in printed
    rows = dict(line.split("  ", 1) for line in printed.splitlines() if "  " in line.strip())
    assert rows["torch"].strip() == torch.__version__
    assert rows["process groups through"].strip() == "lo"
    assert f"{JOB_SECRET}=set" in rows["launcher variables"]
    assert "NCCL_SOCKET_IFNAME='eth 0'" in rows["back end variables"]
    assert rows["all-reduce of 2 over gloo"] == "ok"
    if not torch.cuda.device_count():
        assert rows["all-reduce of 2 over nccl"] == "not tried: torch sees no GPU"
    assert status == ("PROBLEM" in printed)


def all_reduces_give(row: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The row that a bench of the all-reduce has, without ranks."""

    def measured(hosts: Any, plan: CollectivePlan) -> list[CollectiveResult]:
        assert (plan.timeout_s, plan.join_s) == (0.2, 0.0)
        return [CollectiveResult(operation=plan.operations[0], implementation="gloo", size_bytes=4096, **row)]

    monkeypatch.setattr(collective_run, "measure", measured)


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"status": "failed", "reason": "rank 1: it ended"}, "failed: rank 1: it ended\n  fix: check r"),
        ({"wrong": 1, "numel": 1024}, "failed: 1 of 2048 elements of the sums are wrong\n  fix: check routes"),
    ],
)
def test_a_back_end_that_fails_is_a_problem_with_a_fix(
    row: dict[str, Any], problem: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    all_reduces_give(row, monkeypatch)
    assert main(["doctor", "--timeout=0.2"]) == 1
    assert f"over gloo {problem}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "problem", "fix"),
    [
        ({"torch": "2.99.0.dev2+cpu"}, "torch 2.99.0.dev2+cpu is outside of what was run", "pip install 'torch<"),
        ({"shm_free_bytes": 67_108_864}, "67.1 MB are free in /dev/shm, too little", "docker run --shm-size=8g"),
        ({"open_files": 256}, "only 256 open files and connections are allowed", "ulimit -n 4096"),
        ({"processes": 100}, "only 100 processes and threads of this user", "ulimit -u 4096"),
        ({"process_groups_through": None, "main_address": "10.0.0.1"}, "no route to 10.0.0.1", "set MASTER_ADDR"),
        ({"gpus": ["H100"] * 2, "driver": "550.1", "cuda": "13.0"}, "none of 2 GPUs (driver 550.1)", "CUDA 13.0"),
        ({"gpus": ["H100"], "cuda": None}, "none of 1 GPUs", "install a torch that is built with CUDA"),
        ({"launcher_variables": {"WORLD_SIZE": "8"}}, "WORLD_SIZE=8", "start it by torchrun"),
        ({"lighthouse": "host7:1", "lighthouse_fails": "refused"}, "host7:1 does not answer: refused", "torchft_light"),
    ],
)
def test_what_is_broken(facts: dict[str, Any], changes: dict[str, Any], problem: str, fix: str) -> None:
    good = {**facts, "gpus_seen_by_torch": 0, "gpus": [], "launcher_variables": {}}
    assert problems_of(good) == []
    [(found, to_do)] = problems_of({**good, **changes})
    assert problem in found
    assert fix in to_do


def test_whether_the_lighthouse_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"HTTP/1.0 200 OK\r\n\r\n")

    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        answers = threading.Thread(target=answer)
        answers.start()
        monkeypatch.setenv("TORCHFT_LIGHTHOUSE", f"http://{address}")
        assert facts_of_host("127.0.0.1", 2)["lighthouse_fails"] is None
        answers.join()
    for given, reason in ((address, "refused"), ("host7:x", "could not be cast|Port")):
        monkeypatch.setenv("TORCHFT_LIGHTHOUSE", given)
        assert re.search(reason, facts_of_host("127.0.0.1", 2)["lighthouse_fails"])


def test_what_differs_between_hosts(facts: dict[str, Any]) -> None:
    facts = {**facts, "launcher_variables": {}, "shm_bytes": 10**10, "host": "a"}
    memory = {"shm_bytes": 67_108_864, "shm_free_bytes": 10**9}
    other = {**facts, **memory, "torch": "2.10.0", "interfaces": {}, "host": "b"}
    alike = "2 hosts; the facts above are those of node 0 (a). No differences were found."
    assert alike in report([facts] * 2, 2, {}, None)[0]
    text, is_good = report([facts, other, other], 3, {}, None)
    assert not is_good
    assert [line.split("  ")[-1].strip() for line in text[text.index("", 1) + 2 : text.index("", 30)]] == [
        f"{facts['torch']}: node 0 (a)",
        "2.10.0: node 1 (b), node 2 (b)",
        "10.0 GB: node 0 (a)",
        "67.1 MB: node 1 (b), node 2 (b)",
    ]
    assert any(f"torch differs between hosts: {facts['torch']}, 2.10.0" in line for line in text)


@pytest.mark.launch
def test_two_processes_of_a_launcher_make_one_report() -> None:
    job = {**os.environ, **LAUNCHED, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    own: dict[str, dict[str, str]] = {"0": {}, "1": {"NCCL_ALGO": "Ring"}}
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    started = [
        preforked.Process(
            [sys.executable, "-m", "lightning_multigpu", "doctor"],
            env={**job, "RANK": node, "GROUP_RANK": node, **variables},
            **options,
        )
        for node, variables in own.items()
    ]
    (first, _), (second, _) = (process.communicate(timeout=120) for process in started)
    assert "all-reduce of 2 over gloo  ok" in first
    assert "2 hosts; the facts above are those of node 0" in first
    rows = [line.split("  ")[-1].strip() for line in first.splitlines() if "back end variables" in line]
    assert [row.partition(":")[0] for row in rows] == ["none", "NCCL_ALGO=Ring"]
    assert [line for line in second.splitlines() if "[c10d]" not in line] == [], "c10d warns of hosts without names"
    assert [process.returncode for process in started] == [int("PROBLEM" in first)] * 2


def test_the_process_that_did_not_come_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    all_reduces_give({}, monkeypatch)
    for name, value in {**LAUNCHED, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}.items():
        monkeypatch.setenv(name, value)
    for node in "01":
        monkeypatch.setenv("RANK", node)
        monkeypatch.setenv("GROUP_RANK", node)
        assert main(["doctor", "--timeout=0.2"]) == 1
    captured = capsys.readouterr()
    assert ": rank 1 of 2 did not come within 0.2 s (--timeout). There are: rank 0" in captured.out
    assert "rank 1 on " in captured.err
    assert "cannot reach rank 0 at 127.0.0.1" in captured.err


def test_secrets_and_foreign_variables_are_not_shown() -> None:
    given = {JOB_SECRET: SECRET, "MASTER_PORT": "1", "SLURM_JWT": "a", "AWS_SECRET_ACCESS_KEY": "b", "HOME": "/root"}
    assert shown_variables(given) == {JOB_SECRET: "set", "MASTER_PORT": "1"}


def test_gpus_and_driver_by_nvidia_smi(monkeypatch: pytest.MonkeyPatch) -> None:
    gpus_are_there(monkeypatch)
    found = facts_of_host("127.0.0.1", 2)
    assert (found["gpus"], found["driver"]) == (["NVIDIA A100, 81920 MiB"] * 2, "580.65.06")
