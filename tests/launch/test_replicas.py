"""Servers and replicas on several hosts, of which a server ends."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import pytest
import torch

from lightning_multigpu.communication.job_secret import JOB_SECRET
from lightning_multigpu.emulation import EmulatedHosts
from tests.hosts import require_hosts
from tests.launch import replicated_script, train_script
from tests.launch.job import Job
from tests.launch.test_multi_node import assert_same_weights

pytestmark = [pytest.mark.hosts, pytest.mark.launch]


def test_the_replica_on_another_host_takes_over(tmp_path: Path) -> None:
    require_hosts()
    secret = {JOB_SECRET: "0123456789abcdef" * 4}
    with EmulatedHosts(3) as hosts, Job(tmp_path / "logs") as job:
        *nodes, apart = hosts
        address = [re.escape(host.address) for host in hosts]
        servers = [f"{apart.address}:{port}" for port in (7000, 7001)]
        for host in nodes:
            command = [sys.executable, replicated_script.__file__, str(tmp_path), *servers]
            job.start(host, command, {**host.environment(), **secret})
        for port in ("7000", "7001"):
            serve = ["serve", "--host", apart.address, "--port", port, "--threads", "1"]
            job.start(apart, [sys.executable, "-m", "lightning_multigpu", *serve], secret)
        job.wait_until(lambda: (tmp_path / "sync" / "weights-0.pt").exists(), "the end of the first fit", 120)
        first = len(job.output(0))
        job.wait_until(lambda: "step 2" in job.output(0)[first:], "steps of the second fit", 120)
        job.processes[2].send_signal(signal.SIGINT)  # Ctrl-C: the replica goes on with the job
        assert job.processes[2].wait(30) == 130
        statuses = [job.processes[index].wait(120) for index in (0, 1, 3)]
        output = job.output(0)
        assert statuses == [0, 0, 0], output[-3000:]
    one_device = train_script.train(tmp_path, strategy="auto", devices=1)
    assert_same_weights(tmp_path / "sync", one_device)
    killed = (
        rf"parameter server 0 of 2 \({address[0]} port \d+\) has ended: .*; the replica of parameter server 0 of 2 "
        rf"\({address[1]} port \d+\) has taken over, and the job ends if that ends too \(pid \d+, which was ended by "
        "SIGKILL"
    )
    interrupted = (
        rf"parameter server 0 of 1 \({address[2]} port 7000\) has ended: the server was interrupted; the replica of "
        rf"parameter server 0 of 1 \({address[2]} port 7001\) has taken over"
    )
    for words in (killed, interrupted):
        assert len(re.findall(words, output)) == 1, output[-3000:]
    first_weights, second_weights = (torch.load(tmp_path / "async" / f"weights-{rank}.pt") for rank in (0, 1))
    for name, value in first_weights.items():
        assert torch.equal(value, second_weights[name])
        assert not torch.equal(value, train_script.MLP().state_dict()[name])
