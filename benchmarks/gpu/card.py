"""The devices that the checks run on, and how 1, 2 or 4 ranks are placed on them."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

import torch
from lightning.pytorch.strategies import Strategy

from lightning_multigpu.job.shared_gpus import SHARING_VARIABLE, place, rank_devices, sharing_backend

_VARIABLES = {"kind": "TESTS_DEVICE_KIND", "count": "TESTS_DEVICE_COUNT", "backend": "TESTS_DEVICE_BACKEND"}


@dataclass(frozen=True)
class Card:
    """The devices of this machine; ranks share them where there are fewer devices than ranks.

    Args:
        kind: "cuda" or "cpu".
        count: GPUs; 1 for CPUs.
        backend: of the process groups of ranks that share a GPU: "nccl" where NCCL allows it, else "gloo".
    """

    kind: str
    count: int
    backend: str

    @classmethod
    def found(cls, kind: str | None = None) -> Card:
        """The GPUs of this machine, or its CPUs where there are none or ``kind`` is "cpu"; starts no CUDA context.

        Raises:
            ValueError: a GPU is asked for, and there is none.
        """
        count = torch.cuda.device_count()
        if kind == "cuda" and not count:
            raise ValueError("--device=cuda: torch finds no GPU on this machine; pass --device=cpu")
        if kind == "cpu" or not count:
            return cls("cpu", 1, "gloo")
        os.environ.setdefault(SHARING_VARIABLE, "1")
        return cls("cuda", count, sharing_backend())

    @classmethod
    def of_environment(cls) -> Card:
        """The card of the program that has started this process with :attr:`variables`; CPUs without them."""
        kind, count, backend = (
            os.environ.get(variable, default)
            for variable, default in zip(_VARIABLES.values(), ("cpu", "1", "gloo"), strict=True)
        )
        return cls(kind, int(count), backend)

    @cached_property
    def variables(self) -> dict[str, str]:
        """Environment variables by which a job's script finds the same card."""
        return {_VARIABLES[name]: str(value) for name, value in asdict(self).items()}

    @property
    def is_gpu(self) -> bool:
        return self.kind == "cuda"

    def device(self, rank: int = 0) -> torch.device:
        """The device of a rank."""
        return self.devices(rank + 1)[rank]

    def devices(self, ranks: int) -> list[torch.device]:
        """One device for each rank; the same for several ranks where there are too few."""
        return rank_devices(self.kind, ranks, self.count)

    def backend_of(self, ranks: int) -> str:
        """The back end of a group of ``ranks``: NCCL where each has a GPU of its own."""
        return "nccl" if self.is_gpu and ranks <= self.count else self.backend

    def slowness(self, ranks: int) -> float:
        """By how much a check of ``ranks`` may be slower than with a GPU for each.

        A kernel of NCCL that waits for another rank keeps the GPU until the driver gives it to the other process.
        """
        return float(ranks) if self.is_gpu and ranks > self.count and self.backend == "nccl" else 1.0

    def place(self, strategy: Strategy | str, ranks: int) -> dict[str, Any]:
        """Arguments of a ``Trainer`` that trains on this card.

        Args:
            strategy: of this pack, or Lightning's ``DDPStrategy``; it is told its devices. Or "auto" for one device.
            ranks: devices of the run; replicas of ``dp``.
        """
        if isinstance(strategy, str):
            return {"accelerator": "gpu" if self.is_gpu else "cpu", "devices": 1, "strategy": strategy}
        place(strategy, self.devices(ranks), self.backend)
        return {"accelerator": "auto", "devices": "auto", "strategy": strategy}

    def __str__(self) -> str:
        if not self.is_gpu:
            return "CPUs, ranks over gloo"
        names = {torch.cuda.get_device_name(index) for index in range(self.count)}
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        sharing = f"ranks that share a GPU over {self.backend}"
        return f"{self.count} x {' and '.join(sorted(names))}, torch built with NCCL {nccl}, {sharing}"
