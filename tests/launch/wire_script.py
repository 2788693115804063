"""One rank a host: a fit with ring_ddp. Writes what meter and interface have counted."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_multigpu import RingDDPStrategy
from lightning_multigpu.communication.interface import interface_towards
from tests.strategies.tasks import Case, make_trainer

NUM_FEATURES = 1000
NUM_STEPS = 4


def counters(interface: str) -> dict[str, int]:
    """What the interface has sent, and what TCP has sent again."""
    directory = Path("/sys/class/net") / interface / "statistics"
    names, values = (
        line.split()[1:] for line in Path("/proc/self/net/snmp").read_text().splitlines() if line.startswith("Tcp:")
    )
    return {
        "sent_bytes": int((directory / "tx_bytes").read_text()),
        "sent_packets": int((directory / "tx_packets").read_text()),
        "segments_sent_again": int(dict(zip(names, values, strict=True))["RetransSegs"]),
    }


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


def training(interface: str, root: Path) -> dict[str, Any]:
    """Sent bytes of each step by the meter, all operations, and the interface's counters after each step."""
    module, strategy = Counted(interface), RingDDPStrategy()
    case = Case(precision="32-true", max_epochs=-1)
    trainer = make_trainer(case, strategy, 1, num_nodes=2, max_steps=NUM_STEPS, default_root_dir=root)
    trainer.fit(module, DataLoader(TensorDataset(torch.randn(8 * NUM_STEPS, NUM_FEATURES)), batch_size=4))
    strategy.meter.flush()
    return {
        "all_reduce_bytes": [sum(t.sent_bytes for t in s.of("all_reduce", "data")) for s in strategy.meter.steps],
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
    (root / f"rank{rank}.json").write_text(json.dumps(training(interface, root)))


if __name__ == "__main__":
    main()
