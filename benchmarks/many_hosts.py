"""Many emulated hosts train together: connections of a rank, and the way a job ends when a rank is killed.

One rank a host, forked from a process that has imported Lightning, so that memory and processor suffice::

    python -m benchmarks.many_hosts --hosts 33
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import re
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from lightning.pytorch import Callback

from lightning_multigpu.emulation import EmulatedHosts, Host

_STEPS = 6
_READY = "connections of rank"
_DEADLINE_S = 900.0


class TellsConnections(Callback):
    """Each rank prints its TCP connections after the first step."""

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 1:
            ports = [c for c in psutil.Process().net_connections("tcp") if c.status == psutil.CONN_ESTABLISHED]
            print(f"\n{_READY} {trainer.global_rank}: {len(ports)}", flush=True)


def rank(num_hosts: int, directory: str) -> None:
    """One rank of the job."""
    from lightning_multigpu import RingDDPStrategy
    from tests.strategies.tasks import Case, Classifier, make_trainer, train_loader

    case = Case(num_samples=num_hosts * _STEPS, global_batch_size=num_hosts, max_epochs=1)
    strategy = RingDDPStrategy(failure_timeout_s=60.0)
    trainer = make_trainer(
        case, strategy, 1, num_nodes=num_hosts, callbacks=[TellsConnections()], default_root_dir=directory
    )
    trainer.fit(Classifier(), train_loader(case, num_hosts))
    print(f"\nfinished as rank {trainer.global_rank} after {trainer.global_step} steps", flush=True)


def run(num_hosts: int, *, kill: bool) -> None:
    """Runs the job once and prints what came of it."""
    from tests.launch.job import Job

    with (
        tempfile.TemporaryDirectory() as directory,
        EmulatedHosts(num_hosts, bandwidth=None) as hosts,
        Job(Path(directory) / "logs") as job,
    ):
        start_s = time.monotonic()
        for host in hosts:
            command = [sys.executable, "-m", "benchmarks.many_hosts", "--rank", str(num_hosts), directory]
            job.start(host, command, host.environment())
        outputs = [job.output(index) for index in range(num_hosts)]
        while not all(_READY in output for output in outputs) and time.monotonic() - start_s < _DEADLINE_S:
            if any(process.poll() for process in job.processes):
                break
            time.sleep(0.5)
            outputs = [job.output(index) for index in range(num_hosts)]
        print(f"{num_hosts} hosts: first step of all ranks after {time.monotonic() - start_s:.0f} s")
        counts = sorted(int(n) for output in outputs for n in re.findall(rf"{_READY} \d+: (\d+)", output))
        if counts:
            print(f"  TCP connections of a rank: {counts[0]} to {counts[-1]}")
        if kill:
            start_s = time.monotonic()
            kill_all_on(hosts[num_hosts - 1])
        while any(process.poll() is None for process in job.processes) and time.monotonic() - start_s < _DEADLINE_S:
            time.sleep(0.1)
        codes = [process.poll() for process in job.processes]
        print(f"  ended {time.monotonic() - start_s:.1f} s after the {'kill' if kill else 'start'}")
        print(f"  exit statuses: {sorted((str(code), codes.count(code)) for code in set(codes))}")
        outputs = [job.output(index) for index in range(num_hosts)]
        print(f"  ranks that finished: {sum('finished as rank' in output for output in outputs)}")
        if any(codes):
            lines = [line for line in outputs[0].splitlines() if "rank" in line or "node" in line]
            print("  the last such line of rank 0:", lines[-1] if lines else outputs[0][-500:])
            named = re.compile(rf"node {num_hosts - 1}\b|rank {num_hosts - 1}\b")
            print(f"  ranks that name the killed host: {sum(bool(named.search(output)) for output in outputs[:-1])}")


def kill_all_on(host: Host) -> None:
    """Kills every process of the host but the one that holds its namespace."""
    own = os.readlink(f"/proc/{host.namespace.pid}/ns/net")
    for process in psutil.process_iter():
        with contextlib.suppress(OSError):
            if process.pid != host.namespace.pid and os.readlink(f"/proc/{process.pid}/ns/net") == own:
                os.kill(process.pid, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hosts", type=int, nargs="+", default=[33])
    parser.add_argument("--rank", nargs=2, metavar=("HOSTS", "DIRECTORY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank(int(arguments.rank[0]), arguments.rank[1])
        return
    print(
        f"$ python -m benchmarks.many_hosts --hosts {' '.join(map(str, arguments.hosts))}\n"
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}; "
        "ring_ddp, one rank a host"
    )
    for number in arguments.hosts:
        for kill in (False, True):
            run(number, kill=kill)


if __name__ == "__main__":
    main()
