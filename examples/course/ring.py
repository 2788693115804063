"""An all-reduce by hand: a ring of sends and receives, against torch's own.

::

    torchrun --nproc-per-node=4 examples/course/ring.py
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch import Tensor


def ring_all_reduce(tensor: Tensor) -> int:
    """Sums ``tensor`` over all ranks, in place, and returns the bytes that this rank has sent.

    Each rank sends to the rank on its right. In the first n - 1 steps a part of the tensor grows on its way around the
    ring (reduce-scatter); in the last n - 1 steps the finished parts go around (all-gather)::

        step              0          1      |      2          3          (3 ranks; rank r sends part r - step)
        rank 0 sends      a0         c20    |      b120       a012
        rank 1 sends      b1         a01    |      c201       b120
        rank 2 sends      c2         b12    |      a012       c201
    """
    rank, n = dist.get_rank(), dist.get_world_size()
    parts = tensor.tensor_split(n)
    sent_bytes = 0
    for step in range(2 * (n - 1)):
        outgoing, incoming = parts[(rank - step) % n], parts[(rank - step - 1) % n]
        received = torch.empty_like(incoming)
        request = dist.isend(outgoing, (rank + 1) % n)
        dist.recv(received, (rank - 1) % n)
        assert request is not None
        request.wait()
        if step < n - 1:
            incoming += received
        else:
            incoming.copy_(received)
        sent_bytes += outgoing.nbytes
    return sent_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description="An all-reduce by hand, against dist.all_reduce.")
    parser.add_argument("--megabytes", type=float, default=8, help="of float32 in each rank's tensor; default: 8")
    megabytes: float = parser.parse_args().megabytes
    dist.init_process_group("gloo")
    rank, n = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    mine = torch.randn(int(megabytes * 1e6) // 4)
    expected = mine.clone()

    dist.barrier()
    start_s = time.perf_counter()
    sent_bytes = ring_all_reduce(mine)
    ring_s = time.perf_counter() - start_s

    dist.barrier()
    start_s = time.perf_counter()
    dist.all_reduce(expected)
    torch_s = time.perf_counter() - start_s

    if rank == 0:
        formula = 2 * (n - 1) / n * mine.nbytes
        print(f"{n} ranks, S = {mine.nbytes / 1e6:.3f} MB")
        print(f"sent by rank 0: {sent_bytes / 1e6:.3f} MB; 2(n-1)/n S = {formula / 1e6:.3f} MB")
        print(f"largest difference from dist.all_reduce: {float((mine - expected).abs().max()):.1e}")
        print(f"by hand {ring_s * 1e3:.1f} ms, dist.all_reduce {torch_s * 1e3:.1f} ms")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
