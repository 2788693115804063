"""One rank a host: compressed all-reduces; writes what was announced and what the interface counted."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_multigpu.communication.compression import CompressedAllReduce, GradientPiece, make_compressor
from lightning_multigpu.communication.interface import interface_towards
from tests.launch.wire_script import counters

SETTINGS: dict[str, Any] = {
    "bf16": "bf16",
    "int8": "int8",
    "powersgd": {"name": "powersgd", "rank": 128, "start_step": 0},
}
PIECES = (GradientPiece("weight", (1000, 2000)), GradientPiece("bias", (1001,)))


def main() -> None:
    rank = int(os.environ["NODE_RANK"])
    interface = interface_towards(os.environ["MASTER_ADDR"])
    assert interface is not None
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    dist.init_process_group("gloo", rank=rank, world_size=2)
    assert dist.group.WORLD is not None
    report: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        reduce = CompressedAllReduce(dist.group.WORLD, make_compressor(setting))
        tensor = torch.randn(2_001_001, generator=torch.Generator().manual_seed(rank))
        dist.barrier()
        before = counters(interface)
        reduce(tensor, PIECES, average=True)
        dist.barrier()
        report[name] = {"sent_bytes": reduce.total_sent_bytes, "before": before, "after": counters(interface)}
    dist.barrier()  # a peer that leaves closes the connections, which counters of the last setting may still read
    (Path(sys.argv[1]) / f"rank{rank}.json").write_text(json.dumps(report))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
