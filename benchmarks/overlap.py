"""Share of the gradients' communication between two hosts that hides behind backward.

    python -m benchmarks.overlap [--bandwidth 1gbit] [--batch-size 512] [--bucket-mb 4 25]

Two emulated hosts with one rank each (needs root and iproute2), one thread a rank; the MLP of 6.3 M parameters. Each
way to average gradients is measured twice, in turns: during backward, and behind it, bucket after bucket with nothing
else to do. What is hidden is the time of a step with the communication behind backward less that with both at once; the
most that can be is the shorter one of backward and communication, since forward has no gradients to hide::

    behind    |-- forward --|-- backward --|---- communication ----|
    at once   |-- forward --|-- backward --|            |
                            | [---- communication ------]
                                           |-- exposed -|- hidden -|
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from benchmarks.heading import heading
from lightning_multigpu.bench.strategies.models import BenchMLP
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.emulation import EmulatedHosts
from lightning_multigpu.engine.data_parallel.reducer import GradientReducer

STEPS = 3  # a turn, after one that is not timed


class Way:
    """A model of its own, and one way to average its gradients."""

    def __init__(self, name: str, group: dist.ProcessGroup, bucket_mb: float, *, own: bool, at_once: bool) -> None:
        self.name = name
        self.at_once = at_once
        self.step_ms: list[float] = []
        self.backward_ms: list[float] = []
        self.module = DistributedDataParallel(BenchMLP().layers, process_group=group, bucket_cap_mb=bucket_mb)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.01)
        self.group = group
        self.buckets: list[Tensor] = []
        self.reducer = GradientReducer(group, Meter()) if own else None
        if at_once and self.reducer is not None:
            self.reducer.attach(self.module)

    def step(self, batch: Tensor) -> tuple[float, float]:
        """Milliseconds of a step and of its backward."""
        start = time.perf_counter()
        self.optimizer.zero_grad()
        loss = self.module(batch).square().mean() if self.at_once else self.module.module(batch).square().mean()
        forward = time.perf_counter()
        loss.backward()
        if self.at_once and self.reducer is not None:
            self.reducer.finish()
        backward = time.perf_counter()
        for bucket in () if self.at_once else self.buckets:
            if self.reducer is not None:
                self.reducer.average(bucket)
            else:
                dist.all_reduce(bucket, group=self.group)
        self.optimizer.step()
        end = time.perf_counter()
        return 1e3 * (end - start), 1e3 * (backward - forward)

    def close(self) -> None:
        if self.reducer is not None:
            self.reducer.close()


def ways(group: dist.ProcessGroup, buckets_mb: list[float]) -> list[Way]:
    """Torch's own and the ring, at once and behind, for each size of buckets."""
    found = [Way("no communication", group, 25, own=False, at_once=False)]
    for bucket_mb in buckets_mb:
        for name, own in (("torch's DDP", False), ("ring", True)):
            at_once = Way(f"{name}, {bucket_mb:g} MiB", group, bucket_mb, own=own, at_once=True)
            behind = Way(f"{name}, {bucket_mb:g} MiB, behind", group, bucket_mb, own=own, at_once=False)
            found += [at_once, behind]
    return found


def bucket_sizes(way: Way, batch: Tensor) -> list[int]:
    """Elements of each bucket that backward fills, in the order in which they travel."""
    sizes: list[int] = []

    def note(state, bucket):  # torch reads the annotations of a hook as objects
        sizes.append(bucket.buffer().numel())
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    cap_mb = way.module.bucket_bytes_cap / 2**20
    model = DistributedDataParallel(way.module.module, process_group=way.group, bucket_cap_mb=cap_mb)
    model.register_comm_hook(None, note)
    for _ in range(2):  # the first backward tells torch in which order gradients come
        sizes.clear()
        model(batch).square().mean().backward()
    return list(sizes)


def measure(group: dist.ProcessGroup, given: argparse.Namespace) -> list[dict[str, Any]]:
    """Medians of each way."""
    batch = torch.randn(given.batch_size, 1024)
    candidates = ways(group, given.bucket_mb)
    for way in candidates[1:]:
        if not way.at_once:
            way.buckets = [torch.zeros(numel) for numel in bucket_sizes(way, batch)]
    for turn in range(given.rounds + 1):
        for way in candidates:
            dist.barrier(group)
            for step in range(STEPS + 1):
                step_ms, backward_ms = way.step(batch)
                if turn and step:
                    way.step_ms.append(step_ms)
                    way.backward_ms.append(backward_ms)
    for way in candidates:
        way.close()
    return [
        {
            "name": way.name,
            "at_once": way.at_once,
            "buckets": len(way.buckets),
            "step_ms": statistics.median(way.step_ms),
            "backward_ms": statistics.median(way.backward_ms),
        }
        for way in candidates
    ]


def show(results: list[dict[str, Any]]) -> None:
    """One line for each way that works during backward."""
    none, *pairs = results
    print(f"no communication: {none['step_ms']:.1f} ms a step, of which backward {none['backward_ms']:.1f} ms")
    for at_once, behind in zip(pairs[::2], pairs[1::2], strict=True):
        communication_ms = behind["step_ms"] - none["step_ms"]
        hidden_ms = behind["step_ms"] - at_once["step_ms"]
        most_ms = min(none["backward_ms"], communication_ms)
        print(
            f"{at_once['name']:22} {behind['buckets']:2} buckets: {at_once['step_ms']:6.1f} ms a step, communication "
            f"{communication_ms:6.1f} ms, hidden {hidden_ms:6.1f} of {most_ms:6.1f} ms = {hidden_ms / most_ms:.2f}"
        )


def run_rank(given: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo")
    results = measure(group, given)
    if dist.get_rank() == 0:
        Path(given.rank_writes).write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


def between_hosts(given: argparse.Namespace) -> list[dict[str, Any]]:
    """The medians of rank 0 of two."""
    with (
        tempfile.TemporaryDirectory() as folder,
        EmulatedHosts(2, bandwidth=given.bandwidth, burst=given.burst) as hosts,
    ):
        path = Path(folder) / "results.json"
        ranks: list[subprocess.Popen[Any]] = []
        try:
            for host in hosts:
                place = {"RANK": str(host.node_rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
                environment = {**host.environment(), **place, "GLOO_SOCKET_IFNAME": "eth0"}
                command = [sys.executable, "-m", "benchmarks.overlap", *sys.argv[1:], "--rank-writes", str(path)]
                ranks.append(host.popen(command, env=environment))
            if any(rank.wait(timeout=900) for rank in ranks):
                raise RuntimeError("a rank failed; its output is above")
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait()
        results: list[dict[str, Any]] = json.loads(path.read_text())
        return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bandwidth", default="1gbit")
    parser.add_argument("--burst", default="512kb")
    parser.add_argument("--batch-size", type=int, default=512)
    parser.add_argument("--bucket-mb", type=float, nargs="+", default=[4, 25])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rank-writes", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_writes:
        run_rank(given)
        return
    print(f"{heading()}; 2 hosts x 1 rank, {given.bandwidth}, burst {given.burst}, batch {given.batch_size}")
    show(between_hosts(given))


if __name__ == "__main__":
    main()
