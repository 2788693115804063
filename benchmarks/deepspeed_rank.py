"""One rank of a job of DeepSpeed on CPUs: medians of its all-reduce through shared memory, written by the first one.

``deepspeed_rank.py RESULTS 'KIB:BLOCKS:CALLS,...'`` with RANK, LOCAL_RANK, WORLD_SIZE, LOCAL_SIZE, MASTER_ADDR and
MASTER_PORT in the environment. Needs deepspeed, ninja and a compiler: the first run builds DeepSpeed's operator.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"

import deepspeed
import deepspeed.comm as comm
import torch


def main() -> None:
    path, rounds = sys.argv[1:]
    torch.set_num_threads(1)
    deepspeed.init_distributed("gloo", verbose=False)
    medians: dict[str, float] = {}
    for text in rounds.split(","):
        size_kib, blocks, calls = (int(number) for number in text.split(":"))
        gradients = torch.ones(size_kib * 256)
        seconds = []
        for block in range(blocks + 1):
            comm.barrier()
            for _ in range(calls):
                start = time.perf_counter()
                comm.inference_all_reduce(gradients)
                if block:
                    seconds.append(time.perf_counter() - start)
            gradients.fill_(1.0)
        medians[str(size_kib)] = statistics.median(seconds)
    if comm.get_rank() == 0:
        library = f"DeepSpeed {deepspeed.__version__}"
        Path(path).write_text(json.dumps({"library": library, "medians": medians}))
    comm.barrier()


if __name__ == "__main__":
    main()
