"""Ranks that share a GPU, where a host has more ranks than GPUs: their devices and their back end."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Sequence
from typing import Any

import torch

SHARING_NCCL = (2, 31)
"""The first version of NCCL that lets several ranks share a GPU."""
SHARING_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
_NCCL_LIBRARY = "libnccl.so.2"


def nccl_version() -> tuple[int, ...]:
    """The version of the NCCL that this process has loaded.

    ``torch.cuda.nccl.version()`` is that of the headers with which torch was built; another library may be preloaded.
    """
    number = ctypes.c_int()
    # A preloaded library is in the global scope; that of torch's package is loaded, and found by its name only.
    for name, mode in ((None, ctypes.DEFAULT_MODE), (_NCCL_LIBRARY, os.RTLD_NOW | os.RTLD_NOLOAD)):
        with contextlib.suppress(OSError, AttributeError):
            if ctypes.CDLL(name, mode=mode).ncclGetVersion(ctypes.byref(number)) == 0:
                major, rest = divmod(number.value, 10_000)
                return major, rest // 100, rest % 100
    built_with: tuple[int, ...] = torch.cuda.nccl.version()[:3]  # type: ignore[no-untyped-call]
    return built_with


def rank_devices(device_type: str, num_ranks: int, num_gpus: int) -> list[torch.device]:
    """The device of each rank of a host: the GPUs in turn, from the first again where there are more ranks."""
    if device_type == "cpu":
        return [torch.device("cpu")] * num_ranks
    return [torch.device(device_type, rank % num_gpus) for rank in range(num_ranks)]


def share_a_gpu(devices: Sequence[torch.device]) -> bool:
    """Whether a GPU is the device of two ranks."""
    indices = [device.index or 0 for device in devices if device.type == "cuda"]
    return len(set(indices)) < len(indices)


def ask_nccl_to_share() -> None:
    """Sets the variable by which ranks that inherit it may share a GPU over NCCL, unless the user has set it."""
    os.environ.setdefault(SHARING_VARIABLE, "1")


def refusal_of_nccl() -> str | None:
    """The reason why NCCL does not let ranks share a GPU here; None where it does."""
    version = nccl_version()
    variable = os.environ.get(SHARING_VARIABLE)
    if version >= SHARING_NCCL and variable == "1":
        return None
    return (
        f"ranks share a GPU over NCCL from version 2.31 on, where {SHARING_VARIABLE}=1 is set (here: NCCL "
        f"{'.'.join(map(str, version))}, {SHARING_VARIABLE} {variable or 'unset'})"
    )


def sharing_backend() -> str:
    """The back end of ranks that share a GPU: NCCL where it lets them, else Gloo."""
    return "nccl" if refusal_of_nccl() is None else "gloo"


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
