"""Costs and gains of compression: encoding on one thread, all-reduces and training steps between two hosts.

The last column of the all-reduces is the bandwidth below which a setting pays, as the largest of them tells; "-" where
the link is too slow to tell. A byte that is not compressed takes 1/B seconds, and a compressed one 1/(rB) + c, with the
ratio r and the cost c of compressing: less if B < (1 - 1/r) / c.

    python -m benchmarks.compression                       # all three tables
    python -m benchmarks.compression --rounds 9 --bandwidth 200mbit --bucket-mb 4
    python -m benchmarks.compression --tables step --settings bf16 int8

Two emulated hosts with one rank each (needs root and iproute2), one thread a rank. Times are medians; every table names
the one that it is to be compared with, from the same run. The training step is that of an MLP of 6.3 M parameters (six
Linear(1024, 1024) with ReLU and Linear(1024, 10)), batch 64 a rank, SGD, under DistributedDataParallel; its first
row is DistributedDataParallel's own all-reduce with its own buckets.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_multigpu.communication.compression import CompressedAllReduce, GradientPiece, make_compressor
from lightning_multigpu.communication.compression.compressors import ElementwiseCompressor
from lightning_multigpu.communication.compression.owner_summed import DEFAULT_SEGMENT_ELEMENTS
from lightning_multigpu.communication.compression.powersgd import PowerSGD, add_product, first_factor, orthonormalise
from lightning_multigpu.communication.ring import RingAllReduce
from lightning_multigpu.emulation import EmulatedHosts

SETTINGS: dict[str, Any] = {
    "fp16": "fp16",
    "bf16": "bf16",
    "int8": "int8",
    "powersgd 1": {"name": "powersgd", "rank": 1, "start_step": 0},
    "powersgd 4": {"name": "powersgd", "rank": 4, "start_step": 0},
}
SIZES_MB = (1, 4, 25)
TABLES = ("coding", "exchange", "step")


def pieces_of(numel: int) -> tuple[GradientPiece, ...]:
    """Matrices of 1024 columns, of at most 1 M elements each."""
    full, rest = divmod(numel, 1 << 20)
    rows = [1024] * full + ([rest // 1024] if rest else [])
    return tuple(GradientPiece(f"{numel}.{index}", (count, 1024)) for index, count in enumerate(rows))


def median_ms(function: Callable[[], Any], rounds: int, clock: Callable[[], float] = time.perf_counter) -> float:
    """After two calls that do not count."""
    samples = []
    for index in range(rounds + 2):
        start = clock()
        function()
        if index >= 2:
            samples.append(1e3 * (clock() - start))
    return statistics.median(samples)


def coding_times(compressor: Any, numel: int, rounds: int) -> tuple[float, float]:
    """Processor time in ms to encode and to decode ``numel`` elements, error feedback included."""
    encode, decode = coders(compressor, numel)
    return median_ms(encode, rounds, time.thread_time), median_ms(decode, rounds, time.thread_time)


def coders(
    compressor: Any, numel: int, device: torch.device | None = None
) -> tuple[Callable[[], None], Callable[[], None]]:
    """What encodes ``numel`` elements on a device, error feedback included, and what decodes them."""
    values, errors = torch.randn(numel, device=device), torch.zeros(numel, device=device)
    if isinstance(compressor, ElementwiseCompressor):
        starts = range(0, numel, DEFAULT_SEGMENT_ELEMENTS)
        runs = [slice(a, min(a + DEFAULT_SEGMENT_ELEMENTS, numel)) for a in starts]
        sizes = [compressor.encoded_bytes(run.stop - run.start) for run in runs]
        wires = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]

        def encode() -> None:
            for run, wire in zip(runs, wires, strict=True):
                compressor.encode(torch.add(values[run], errors[run], out=errors[run]), wire)

        def decode() -> None:
            for run, wire in zip(runs, wires, strict=True):
                compressor.decode(wire, values[run])

    else:
        assert isinstance(compressor, PowerSGD)
        rank, columns = compressor.rank, 1024
        matrix, error = values.view(-1, columns), errors.view(-1, columns)
        q = first_factor("weight", rank, columns).to(device)
        p = torch.empty(matrix.shape[0], rank, device=device)

        def encode() -> None:
            torch.add(matrix, error, out=error)
            torch.mm(error, q.t(), out=p)
            orthonormalise(p)
            add_product(error, p, torch.mm(p.t(), error), factor=-1.0)

        def decode() -> None:
            matrix.zero_()
            add_product(matrix, p, q)

    return encode, decode


def exchange_times(
    group: dist.ProcessGroup, rounds: int, names: list[str]
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Medians in ms of an all-reduce, by setting, in order of the sizes; and bytes without compression over bytes with
    it, by setting, at the largest. The settings take turns."""
    reducers: dict[str, Callable[[Tensor, tuple[GradientPiece, ...]], Any]] = {}
    reducers["gloo"] = lambda tensor, _: dist.all_reduce(tensor, group=group)
    ring = RingAllReduce(group)
    reducers["ring"] = lambda tensor, _: ring(tensor, average=True)
    engines = {name: CompressedAllReduce(group, make_compressor(SETTINGS[name])) for name in names}
    for name, engine in engines.items():
        reducers[name] = lambda tensor, pieces, engine=engine: (engine(tensor, pieces, average=True), engine.end_step())
    times: dict[str, list[float]] = {name: [] for name in reducers}
    for size_mb in SIZES_MB:
        numel = size_mb * 1_000_000 // 4096 * 1024
        gradients = torch.randn(numel, generator=torch.Generator().manual_seed(dist.get_rank()))
        samples: dict[str, list[float]] = {name: [] for name in reducers}
        for index in range(rounds + 1):
            for name, reduce in reducers.items():
                tensor = gradients.clone()
                dist.barrier(group)
                start = time.perf_counter()
                reduce(tensor, pieces_of(numel))
                if index:
                    samples[name].append(1e3 * (time.perf_counter() - start))
        for name in reducers:
            times[name].append(statistics.median(samples[name]))
        plain_bytes, pieces = ring.sent_bytes(gradients), pieces_of(numel)
        ratios = {name: plain_bytes / engine.sent_bytes(gradients, pieces) for name, engine in engines.items()}
    return times, ratios


class Hook:
    """A communication hook that hands buckets to an engine's own thread, which begins one before it ends the last."""

    def __init__(self, engine: CompressedAllReduce, model: nn.Module) -> None:
        self.engine = engine
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        self.jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def __call__(self, state: object, bucket: Any) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future()
        pieces = tuple(GradientPiece(self.names[p], tuple(p.shape)) for p in bucket.parameters())
        self.jobs.put((bucket.buffer(), pieces, future))
        return future

    def work(self) -> None:
        pending: list[Any] = []
        while True:
            try:
                job = self.jobs.get(block=not pending)
            except queue.Empty:
                job = ()
            if job is None:
                return
            if job:
                tensor, pieces, future = job
                pending.append((self.engine.begin(tensor, pieces, average=True), future))
            if pending and (not job or len(pending) > 1):
                exchange, future = pending.pop(0)
                future.set_result(exchange.finish())


def step_times(group: dist.ProcessGroup, rounds: int, names: list[str], bucket_mb: float) -> dict[str, float]:
    """Medians in ms of a training step, by setting; the settings take turns of a few steps."""
    x = torch.randn(64, 1024)
    steps: dict[str, Callable[[], None]] = {}
    hooks = []

    def add(name: str, setting: Any) -> None:
        torch.manual_seed(0)
        layers = [layer for _ in range(6) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
        model = nn.Sequential(*layers, nn.Linear(1024, 10))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        forward: nn.Module = model
        hook = None
        if name != "none":
            cap = 25 if name == "ddp" else bucket_mb
            forward = DistributedDataParallel(model, process_group=group, bucket_cap_mb=cap)
        if setting is not None:
            hook = Hook(CompressedAllReduce(group, make_compressor(setting)), model)
            hooks.append(hook)
            forward.register_comm_hook(None, _bucket_hook(hook))

        def step() -> None:
            optimizer.zero_grad()
            forward(x).square().mean().backward()
            if hook is not None:
                hook.engine.end_step()
            optimizer.step()

        steps[name] = step

    add("ddp", None)
    add("none", None)
    for name in names:
        add(name, SETTINGS[name])
    samples: dict[str, list[float]] = {name: [] for name in steps}
    for index in range(rounds + 1):
        for name, step in steps.items():
            dist.barrier(group)
            for inner in range(5):
                start = time.perf_counter()
                step()
                if index and inner:  # the first step of a turn finds its memory cold
                    samples[name].append(1e3 * (time.perf_counter() - start))
    for hook in hooks:
        hook.jobs.put(None)
        hook.thread.join()
    return {name: statistics.median(found) for name, found in samples.items()}


def _bucket_hook(hook: Hook) -> Any:
    def run(state, bucket):  # torch reads the annotations of a hook as objects
        return hook(state, bucket)

    return run


def run_rank(given: argparse.Namespace) -> None:
    """What a rank on a host does; the first one writes its results."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    group = dist.new_group(backend="gloo")
    results: dict[str, Any] = {}
    if "exchange" in given.tables:
        results["exchange"] = exchange_times(group, given.rounds, given.settings)
    if "step" in given.tables:
        results["step"] = step_times(group, given.rounds, given.settings, given.bucket_mb)
    if dist.get_rank() == 0:
        Path(given.rank_writes).write_text(json.dumps(results))
    dist.destroy_process_group()


@contextmanager
def ranks_on(hosts: EmulatedHosts, arguments: list[str]) -> Iterator[list[subprocess.Popen[Any]]]:
    """One rank a host."""
    command = [sys.executable, "-m", "benchmarks.compression", *arguments]
    ranks = []
    try:
        for host in hosts:
            environment = {
                **host.environment(),
                "RANK": str(host.node_rank),
                "WORLD_SIZE": str(len(hosts)),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": host.interface,
            }
            ranks.append(host.popen(command, env=environment))
        yield ranks
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def between_hosts(given: argparse.Namespace) -> dict[str, Any]:
    """The times of rank 0 of two."""
    with (
        tempfile.TemporaryDirectory() as folder,
        EmulatedHosts(2, bandwidth=given.bandwidth, burst=given.burst) as hosts,
    ):
        path = Path(folder) / "results.json"
        arguments = ["--rounds", str(given.rounds), "--bucket-mb", str(given.bucket_mb)]
        arguments += ["--tables", *given.tables, "--settings", *given.settings]
        with ranks_on(hosts, ["--rank-writes", str(path), *arguments]) as ranks:
            for rank in ranks:
                if rank.wait(timeout=600):
                    raise RuntimeError("a rank failed; its output is above")
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bandwidth", default="1gbit")
    parser.add_argument("--burst", default="256kb")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--bucket-mb", type=float, default=4)
    parser.add_argument("--tables", nargs="+", default=list(TABLES), choices=TABLES)
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--rank-writes", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_writes:
        run_rank(given)
        return
    torch.set_num_threads(1)
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
          f"Python {platform.python_version()}, torch {torch.__version__}, one thread a rank")  # fmt: skip
    if "coding" in given.tables:
        print_coding(given.settings, given.rounds)
    if given.tables != ["coding"]:
        results = between_hosts(given)
        hosts = f"2 hosts x 1 rank, {given.bandwidth}, burst {given.burst}"
        if "exchange" in results:
            print(f"\nall-reduce, {hosts}: ms (ratio to gloo)")
            print_exchange(*results["exchange"])
        if "step" in results:
            print(f"\ntraining step, {hosts}, buckets of {given.bucket_mb:g} MB: ms (ratio to ddp)")
            for name, time_ms in results["step"].items():
                print(f"{name:12}{time_ms:9.1f} ({time_ms / results['step']['ddp']:5.3f})")


def print_coding(names: list[str], rounds: int) -> None:
    """One line a setting."""
    print("\nencode / decode, ms of processor time")
    print(f"{'':12}" + "".join(f"{size:>12} MB" for size in SIZES_MB))
    for name in names:
        numels = [size * 1_000_000 // 4096 * 1024 for size in SIZES_MB]
        times = [coding_times(make_compressor(SETTINGS[name]), numel, rounds) for numel in numels]
        print(f"{name:12}" + "".join(f"{encode:7.2f} /{decode:6.2f}" for encode, decode in times))


def print_exchange(times_by_name: dict[str, list[float]], ratios: dict[str, float]) -> None:
    """One line a setting."""
    print(f"{'':12}" + "".join(f"{size:>14} MB" for size in SIZES_MB) + "   pays below")
    for name, times in times_by_name.items():
        relative = [time / base for time, base in zip(times, times_by_name["gloo"], strict=True)]
        cells = "".join(f"{t:9.1f} ({ratio:5.3f})" for t, ratio in zip(times, relative, strict=True))
        border = ""
        if name in ratios:
            num_bytes = 4 * (SIZES_MB[-1] * 1_000_000 // 4096 * 1024)
            plain_s, compressed_s = 1e-3 * times_by_name["ring"][-1], 1e-3 * times[-1]
            cost_s = compressed_s - plain_s / ratios[name]
            is_known = cost_s >= plain_s / 8  # else it is within the noise
            border = f"{8e-9 * (1 - 1 / ratios[name]) * num_bytes / cost_s:6.2f} Gbit/s" if is_known else "      -"
        print(f"{name:12}{cells}{border}")


if __name__ == "__main__":
    main()
