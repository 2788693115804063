"""One rank a host: a fit with ring_ddp and fits with parameter servers.

Writes what meter and interface counted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import struct
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_multigpu import MultiGPUStrategy, ParameterServerStrategy, RingDDPStrategy
from lightning_multigpu.communication.interface import interface_towards
from lightning_multigpu.emulation import InterfaceCounters
from tests.strategies.tasks import Case, make_trainer

NUM_FEATURES = 1000
NUM_STEPS = 4


def counters(interface: str) -> dict[str, int]:
    """What the interface has counted, and the bytes that TCP has brought to the peers, and has sent again."""
    directory = Path("/sys/class/net") / interface / "statistics"
    names = {"sent": "tx", "received": "rx"}
    found = {
        f"{name}_{what}": int((directory / f"{short}_{what}").read_text())
        for name, short in names.items()
        for what in ("bytes", "packets")
    }
    payload_bytes, sent_again_bytes = sent_by_tcp()
    names_of_tcp, values_of_tcp = (
        line.split()[1:] for line in Path("/proc/self/net/snmp").read_text().splitlines() if line.startswith("Tcp:")
    )
    return {
        **dataclasses.asdict(InterfaceCounters(**found)),
        "segments_sent_again": int(dict(zip(names_of_tcp, values_of_tcp, strict=True))["RetransSegs"]),
        "payload_bytes": payload_bytes,
        "sent_again_bytes": sent_again_bytes,
    }


def sent_by_tcp() -> tuple[int, int]:
    """Payload of all TCP connections of this process that the peers have acknowledged, and how much was sent again.

    An attempt to send again may count where it failed, so that what was sent, less what was sent again, came out too
    small, and even negative, on a busy machine.
    """
    payload_bytes = sent_again_bytes = 0
    # By the kernel's name of each: a descriptor that is duplicated meanwhile is the same connection, and may be closed.
    sockets: dict[str, list[str]] = {}
    for entry in Path("/proc/self/fd").iterdir():
        sockets.setdefault(os.path.realpath(entry).rpartition("/")[2], []).append(entry.name)
    for target, descriptors in sockets.items():
        for descriptor in descriptors if target.startswith("socket:") else ():
            with (
                contextlib.suppress(OSError),
                socket.socket(fileno=os.dup(int(descriptor))) as connection,
            ):  # of any kind
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                payload_bytes += struct.unpack_from("Q", info, 120)[0]  # tcpi_bytes_acked
                sent_again_bytes += struct.unpack_from("Q", info, 208)[0]  # tcpi_bytes_retrans
                break
    return payload_bytes, sent_again_bytes


class Counted(L.LightningModule):
    """A layer whose gradients are large against all else that travels; reads the interface's counters after a step."""

    def __init__(self, interface: str) -> None:
        super().__init__()
        self.layer = nn.Linear(NUM_FEATURES, NUM_FEATURES)
        self.interface = interface
        self.counted: list[dict[str, int]] = []

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)

    def on_train_batch_end(self, *args: Any) -> None:
        dist.barrier()
        self.counted.append(counters(self.interface))
        dist.barrier()


def training(interface: str, root: Path, strategy: MultiGPUStrategy) -> dict[str, Any]:
    """Sent bytes of each step by the meter, all operations, and the interface's counters after each step."""
    module = Counted(interface)
    case = Case(precision="32-true", max_epochs=-1)
    trainer = make_trainer(case, strategy, 1, num_nodes=2, max_steps=NUM_STEPS, default_root_dir=root)
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(8 * NUM_STEPS, NUM_FEATURES)), batch_size=4))
    strategy.meter.flush()
    return {
        "all_reduce_bytes": [sum(t.sent_bytes for t in s.of("all_reduce", "data")) for s in strategy.meter.steps],
        "push_bytes": [sum(t.sent_bytes for t in s.of("push", "servers")) for s in strategy.meter.steps],
        "sent_bytes": [step.sent_bytes for step in strategy.meter.steps],
        "counted": module.counted,
    }


def main() -> None:
    root = Path(sys.argv[1])
    rank = int(os.environ["NODE_RANK"])
    interface = interface_towards(os.environ["MASTER_ADDR"])
    assert interface is not None
    os.environ["GLOO_SOCKET_IFNAME"] = interface
    dist.init_process_group("gloo", rank=rank, world_size=2)
    report = {"training": training(interface, root, RingDDPStrategy())}
    for number in (1, 2):
        servers = ParameterServerStrategy(num_servers=number)
        report[f"{number} servers"] = training(interface, root, servers)
    (root / f"rank{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
