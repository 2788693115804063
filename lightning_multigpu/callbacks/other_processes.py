"""Readings of a machine's processors and GPUs, and the share that other processes take between two of them."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from lightning_multigpu._usable_cores import usable_cores

_READINGS, _APART_S = 8, 0.25


class Usage(NamedTuple):
    """A reading of this machine.

    Attributes:
        boot: identity of the running machine; processes in other namespaces of it have the same.
        now_s: of the clock.
        cores: that this process may use.
        busy_s: processor time that all processes have taken on them.
        own_s: processor time of this process, and of all that it has started.
        gpu: the utilization of its GPUs by others, before anything of its own runs there; 0 to 1.
    """

    boot: str
    now_s: float
    cores: int
    busy_s: float
    own_s: float
    gpu: float = 0.0


def usage(gpus: Sequence[int] = ()) -> Usage:
    """A reading now; of ``gpus`` it takes two seconds. Figures that the system does not have are 0."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    of_cores = psutil.cpu_times(percpu=True)
    own = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(len(of_cores))
    busy_s = sum(
        times.user + times.system + getattr(times, "nice", 0.0) + getattr(times, "steal", 0.0)
        for times in (of_cores[core] for core in own if core < len(of_cores))
    )
    process = psutil.Process()
    tree = [process.cpu_times()]
    for child in process.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            tree.append(child.cpu_times())
    own_s = sum(t.user + t.system + t.children_user + t.children_system for t in tree)
    name = boot.read_text().strip() if boot.exists() else ""
    return Usage(name, time.monotonic(), usable_cores(), busy_s, own_s, _gpu_utilization(gpus))


def _gpu_utilization(gpus: Sequence[int]) -> float:
    """The least of some readings of the busiest GPU: NVML's figure is of the last second, maybe of our own work."""
    least = 1.0 if gpus else 0.0
    for _ in range(_READINGS if gpus else 0):
        with contextlib.suppress(Exception):  # without nvidia-ml-py, or of a slice of a GPU
            least = min(least, max(torch.cuda.utilization(gpu) for gpu in gpus) / 100)
            time.sleep(_APART_S)
            continue
        return 0.0
    return least


def share_of_others(before: Sequence[Usage], after: Sequence[Usage]) -> float:
    """The largest share of a machine's processors, or GPUs, that other processes have taken between readings.

    Each list has a reading of every process that measures, in the same order; several may be on one machine.
    """
    shares = [0.0, *(reading.gpu for reading in before)]
    for boot in {reading.boot for reading in after}:
        pairs = [(a, b) for a, b in zip(before, after, strict=True) if b.boot == boot]
        first, last = pairs[0]
        own_s = sum(b.own_s - a.own_s for a, b in pairs)
        most_s = (last.now_s - first.now_s) * last.cores
        shares.append((last.busy_s - first.busy_s - own_s) / most_s if most_s > 0 else 0.0)
    return min(1.0, max(shares))
