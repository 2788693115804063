"""Callbacks that measure a run's throughput, communication and devices.

They read the strategy's meter and public properties, Lightning's hooks, and the devices.
"""

import lightning.pytorch  # noqa: F401  # first: its import registers all strategies

from lightning_multigpu.callbacks.communication import CommunicationMonitor
from lightning_multigpu.callbacks.device_utilization import DeviceUtilizationMonitor
from lightning_multigpu.callbacks.global_batch_size import GlobalBatchSize
from lightning_multigpu.callbacks.monitor import KEYS
from lightning_multigpu.callbacks.profile.profiler_report import ProfilerReport
from lightning_multigpu.callbacks.run_report import RunReport
from lightning_multigpu.callbacks.throughput import ThroughputMonitor

__all__ = [
    "KEYS",
    "CommunicationMonitor",
    "DeviceUtilizationMonitor",
    "GlobalBatchSize",
    "ProfilerReport",
    "RunReport",
    "ThroughputMonitor",
]
