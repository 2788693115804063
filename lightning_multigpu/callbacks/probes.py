"""Probes of devices: NVML for NVIDIA GPUs, the operating system for everything else."""

from __future__ import annotations

import contextlib
import importlib
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from lightning.pytorch.utilities import rank_zero_warn

from lightning_multigpu._usable_cores import usable_cores
from lightning_multigpu.engine.main_memory import host_memory


class HostProbe:
    """This process and its host.

    The share of processor time is taken between two readings, the first one reaching back to when the probe was made.
    Worker processes of data loaders do not count.

    Args:
        is_device: the model trains on the CPU, so that the process's processor time is the device's utilization. As
            many cores as it has intra-op threads, of those that it may use, are its 100 %.
    """

    def __init__(self, *, is_device: bool) -> None:
        self._is_device = is_device
        self._process = psutil.Process()
        self._cores = min(torch.get_num_threads(), usable_cores())
        self._read_s, self._process_s = time.perf_counter(), time.process_time()

    def read(self) -> dict[str, float]:
        figures = {"device/process_rss_bytes": float(self._process.memory_info().rss)}
        if self._is_device:
            figures["device/memory_used_bytes"] = float(host_memory().used_bytes)
        now_s, process_s = time.perf_counter(), time.process_time()
        if self._is_device and now_s > self._read_s:
            share = (process_s - self._process_s) / ((now_s - self._read_s) * self._cores)
            # The process has more threads than those that compute, so it can take more than its 100 %.
            figures["device/utilization_percent"] = min(100.0, 100.0 * share)
        self._read_s, self._process_s = now_s, process_s
        return figures


class GpuProbe:
    """One NVIDIA GPU, through NVML: the figures that ``nvidia-smi`` shows.

    A figure that the GPU does not report (power on some virtual machines, utilization of a MIG slice) is absent.

    Args:
        uuid: the GPU's identity, ``GPU-...``: CUDA may count GPUs in another order than NVML, the fastest one first.

    Raises:
        ImportError: nvidia-ml-py is not installed.
        NVMLError: there is no driver, or it does not know the GPU.
    """

    def __init__(self, uuid: str) -> None:
        self._nvml = nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        gpu = nvml.nvmlDeviceGetHandleByUUID(uuid)
        self._readings: dict[str, Callable[[], float]] = {
            "device/utilization_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu,
            "device/memory_used_bytes": lambda: nvml.nvmlDeviceGetMemoryInfo(gpu).used,
            "device/power_watts": lambda: nvml.nvmlDeviceGetPowerUsage(gpu) / 1e3,
            "device/temperature_celsius": lambda: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
        }

    def read(self) -> dict[str, float]:
        figures = {}
        for key, reading in self._readings.items():
            with contextlib.suppress(self._nvml.NVMLError):
                figures[key] = float(reading())
        return figures


def machine_of(device_type: str) -> dict[str, Any]:
    """This host as JSON: no host name, no address and no path is in it. Its GPUs are named under "cuda" only."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count() or 1,
        "usable_cores": usable_cores(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpus": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        if device_type == "cuda"
        else [],
        "system": f"{platform.system()} {platform.release()}",
    }


def probes_of(device: torch.device) -> list[HostProbe | GpuProbe]:
    """The probes of a rank that trains on ``device``; warns once where a library for more figures is missing."""
    probes: list[HostProbe | GpuProbe] = [HostProbe(is_device=device.type == "cpu")]
    if device.type == "cuda":
        try:
            probes.append(GpuProbe(f"GPU-{torch.cuda.get_device_properties(device).uuid}"))
        except ImportError:
            rank_zero_warn(
                "utilization, memory and power of the GPUs are not measured: nvidia-ml-py is not installed; "
                "pip install 'lightning-multigpu[gpu]'"
            )
        except Exception as error:  # there is no driver, or it does not know the GPU
            rank_zero_warn(f"utilization, memory and power of the GPUs are not measured: {error}")
    return probes


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
