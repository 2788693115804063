"""Ranks that share a GPU, where a host has more ranks than GPUs: their devices and their back end."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

SHARING_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
"""By this variable the user, or a bench, says that NCCL lets ranks share a GPU; it can from version 2.31 on."""


def rank_devices(device_type: str, num_ranks: int, num_gpus: int) -> list[torch.device]:
    """The device of each rank of a host: the GPUs in turn, from the first again where there are more ranks."""
    if device_type == "cpu":
        return [torch.device("cpu")] * num_ranks
    return [torch.device(device_type, rank % num_gpus) for rank in range(num_ranks)]


def share_a_gpu(devices: Sequence[torch.device]) -> bool:
    """Whether a GPU is the device of two ranks."""
    indices = [device.index or 0 for device in devices if device.type == "cuda"]
    return len(set(indices)) < len(indices)


def sharing_backend() -> str:
    """The back end of ranks that share a GPU: NCCL where it lets them, else Gloo."""
    return "nccl" if os.environ.get(SHARING_VARIABLE) == "1" else "gloo"


def place(strategy: Any, devices: Sequence[torch.device], backend: str | None = None) -> None:
    """Gives a strategy its devices and, where ranks share one and NCCL does not let them, Gloo in place of the default.

    ``backend`` is that of ranks that share a GPU; None for :func:`sharing_backend`.
    """
    strategy.parallel_devices = list(devices)
    may_choose = getattr(strategy, "_process_group_backend", "") is None
    if may_choose and share_a_gpu(devices) and (backend or sharing_backend()) == "gloo":
        strategy._process_group_backend = "gloo"


def sharing_note(num_ranks: int, num_gpus: int) -> str | None:
    """A sentence about times of ranks that share GPUs; None where each rank has one of its own."""
    if num_ranks <= num_gpus:
        return None
    return (
        f"{num_ranks} ranks share {num_gpus} GPU{'s' * (num_gpus != 1)}, its time and its memory: these times are no "
        "forecast of ranks with a GPU each"
    )
