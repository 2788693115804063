"""All-reduce on one host: shared memory and Gloo against MPI libraries and DeepSpeed, where those are installed.

    python -m benchmarks.peers --mpi mpich='mpiexec -n {ranks} python' [--ranks 2 4] [--repetitions 5]
    python -m benchmarks.peers --deepspeed /path/to/python

Every contender is a job of its own, since an MPI library waits by spinning and would take the others' cores; the jobs
take turns, and what counts is the median of the repetitions' medians. ``{ranks}`` stands for their number; the Python
of an MPI job needs mpi4py and numpy, that of DeepSpeed's deepspeed, ninja and torch. One intra-op thread a rank,
float32, sums in place.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from lightning_multigpu.communication.shared_memory.host_all_reduce import SharedMemoryAllReduce
from tests.world import free_port

BASELINE = "gloo"
IN_PLACE = "in place"  # shared memory, for a tensor that lies there, as the buckets of ring_ddp do
_MPI_RANK = Path(__file__).with_name("mpi_rank.py")
_DEEPSPEED_RANK = Path(__file__).with_name("deepspeed_rank.py")
SIZES_KIB = (4, 1024, 16 * 1024, 64 * 1024)
ROUNDS = {4: (30, 20), 1024: (20, 10), 16 * 1024: (12, 2), 64 * 1024: (8, 1)}  # blocks, and calls in each

Medians = dict[str, float]


def torch_rank(rank: int, num_ranks: int, name: str, directory: str) -> None:
    """One rank of a job of shared memory or Gloo; the first one writes its medians in seconds, by size in KiB."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=rank, world_size=num_ranks)
    shared = SharedMemoryAllReduce(dist.new_group(backend="gloo")) if name != BASELINE else None
    medians: Medians = {}
    for size_kib in SIZES_KIB:
        blocks, calls = ROUNDS[size_kib]
        gradients = torch.ones(size_kib * 256)
        if shared is not None and name == IN_PLACE:
            shared.move(gradients, 0)
        seconds = []
        for block in range(blocks + 1):
            dist.barrier()
            for _ in range(calls):
                start = time.perf_counter()
                if shared is None:
                    dist.all_reduce(gradients)
                else:
                    shared(gradients)
                if block:
                    seconds.append(time.perf_counter() - start)
            gradients.fill_(1.0)
        medians[str(size_kib)] = statistics.median(seconds)
    dist.barrier()
    if shared is not None:
        shared.close()
    if rank == 0:
        Path(directory, "results.json").write_text(json.dumps({"library": name, "medians": medians}))
    dist.destroy_process_group()


def torch_job(name: str, num_ranks: int, directory: str) -> None:
    mp.spawn(torch_rank, (num_ranks, name, directory), nprocs=num_ranks)  # type: ignore[no-untyped-call]


def mpi_job(command: str, num_ranks: int, directory: str) -> None:
    words = shlex.split(command.format(ranks=num_ranks))
    subprocess.run([*words, str(_MPI_RANK), *_of_a_peer(directory)], check=True, timeout=600)


def deepspeed_job(python: str, num_ranks: int, directory: str) -> None:
    place = {"WORLD_SIZE": num_ranks, "LOCAL_SIZE": num_ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    tools = f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}"  # ninja
    ranks = [
        subprocess.Popen(
            [python, str(_DEEPSPEED_RANK), *_of_a_peer(directory)],
            env={**os.environ, **{k: str(v) for k, v in {**place, "RANK": r, "LOCAL_RANK": r}.items()}, "PATH": tools},
            stdout=subprocess.DEVNULL,
        )
        for r in range(num_ranks)
    ]
    try:
        if any(rank.wait(timeout=600) for rank in ranks):
            raise RuntimeError("a rank of DeepSpeed failed; its output is above")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        for segment in Path("/dev/shm").glob(f"deepspeed_*_{place['MASTER_PORT']}_*"):
            segment.unlink()  # it leaves them


def _of_a_peer(directory: str) -> list[str]:
    rounds = ",".join(f"{size}:{ROUNDS[size][0]}:{ROUNDS[size][1]}" for size in SIZES_KIB)
    return [f"{directory}/results.json", rounds]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mpi", nargs="*", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--deepspeed", metavar="PYTHON")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--repetitions", type=int, default=5)
    given = parser.parse_args()
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, "
          f"torch {torch.__version__}, {time.strftime('%Y-%m-%d')}; load {os.getloadavg()[0]:.1f} before")  # fmt: skip
    jobs: dict[str, Callable[[int, str], None]] = {
        name: lambda ranks, directory, name=name: torch_job(name, ranks, directory)  # type: ignore[misc]
        for name in (BASELINE, "shared memory", IN_PLACE)
    }
    for text in given.mpi:
        name, _, command = text.partition("=")
        jobs[name] = lambda ranks, directory, command=command: mpi_job(command, ranks, directory)  # type: ignore[misc]
    if given.deepspeed:
        jobs["DeepSpeed"] = lambda ranks, directory: deepspeed_job(given.deepspeed, ranks, directory)
    for num_ranks in given.ranks:
        show(num_ranks, jobs, given.repetitions)


def show(num_ranks: int, jobs: dict[str, Callable[[int, str], None]], repetitions: int) -> None:
    """One line a contender: microseconds, and in brackets the ratio to Gloo."""
    found: dict[str, list[Medians]] = {name: [] for name in jobs}
    libraries: dict[str, str] = {}
    for _ in range(repetitions):
        for name, job in jobs.items():
            with tempfile.TemporaryDirectory() as directory:
                job(num_ranks, directory)
                results = json.loads(Path(directory, "results.json").read_text())
            found[name].append(results["medians"])
            libraries[name] = results["library"]
    print(f"\n{num_ranks} ranks" + "".join(f"{size:>18} KiB" for size in SIZES_KIB))
    base: Medians = {}
    for name, runs in found.items():
        medians = {size: 1e6 * statistics.median(run[size] for run in runs) for size in runs[0]}
        base = base or medians
        cells = "".join(f"{value:13.0f} ({value / base[size]:5.3f})" for size, value in medians.items())
        library = f"  {libraries[name]}" if libraries[name] != name else ""
        print(f"{name:>14}{cells} us{library}", flush=True)


if __name__ == "__main__":
    main()
