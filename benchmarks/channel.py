"""Bandwidth of the channel between workers and parameter servers, against Gloo's send and receive of the same bytes.

    python -m benchmarks.channel                      two processes of this host
    lightning-multigpu emulate --nodes 2 --devices 1 --bandwidth 1gbit --burst 512kb -- python -m benchmarks.channel

Rank 0 sends, and rank 1 answers with one byte when it has all. Both ways run in the same processes, in turns.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.heading import heading
from lightning_multigpu.bench.spread import Spread
from lightning_multigpu.communication.channel import Channel, Listener, connect
from lightning_multigpu.communication.checksums import bytes_of
from tests.world import free_port

_SECRET = b"of this benchmark alone"


def channel(rank: int, host: str, port: int) -> Channel:
    """A channel between ranks 0 and 1."""
    if rank == 1:
        return connect(host, port, _SECRET, timeout_s=60)
    welcomed: list[Channel] = []
    listener = Listener(host, port, _SECRET, welcomed.append)
    while not welcomed:
        time.sleep(0.05)
    listener.close()
    return welcomed[0]


def ways(rank: int, other: Channel, flat: torch.Tensor) -> dict[str, Callable[[], Any]]:
    """One transfer of each way, as this rank takes part in it."""
    answer, memory = torch.zeros(1, dtype=torch.uint8), bytes_of(flat)

    def gloo() -> None:
        (dist.send if rank == 0 else dist.recv)(flat, 1 - rank)
        (dist.recv if rank == 0 else dist.send)(answer, 1 - rank)

    def ours() -> None:
        if rank == 0:
            other.send({"kind": "push"}, [memory])
            other.receive()
        else:
            other.receive()
            other.receive_into([memory])
            other.send({"kind": "done"})

    return {"Gloo": gloo, "channel": ours}


def run_rank(rank: int, host: str, port: int, given: argparse.Namespace) -> None:
    """Rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://{host}:{port}", rank=rank, world_size=2)
    other = channel(rank, host, port + 1)
    for size in given.sizes:
        both = ways(rank, other, torch.randint(255, (size,), dtype=torch.uint8))
        seconds: dict[str, list[float]] = {name: [] for name in both}
        for turn in range(given.turns + 1):
            for name, transfer in both.items():
                dist.barrier()
                start_s = time.perf_counter()
                transfer()
                if turn:  # the first one warms up
                    seconds[name].append(time.perf_counter() - start_s)
        if rank == 0:
            if size == given.sizes[0]:
                print(
                    f"{heading()}\n# medians of {given.turns} turns, with quartiles\n"
                    f"{'bytes':>12}{'Gloo, Mbit/s':>28}{'channel, Mbit/s':>28}  channel/Gloo"
                )
            rates = [Spread.of([size * 8e-6 / s for s in found]) for found in seconds.values()]
            cells = "".join(f"{r.median:12.0f} ({r.p25:5.0f} - {r.p75:5.0f})" for r in rates)
            print(f"{size:12,}{cells}{rates[1].median / rates[0].median:14.2f}", flush=True)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[2**16, 2**20, 4 * 2**20, 25_231_400], metavar="BYTES")
    parser.add_argument("--turns", type=int, default=30)
    given = parser.parse_args()
    if "NODE_RANK" in os.environ:
        run_rank(int(os.environ["NODE_RANK"]), os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), given)
    else:
        mp.spawn(run_rank, ("127.0.0.1", free_port(), given), nprocs=2)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
