"""Callbacks that tell what a run achieves and what its communication costs.

They read the strategy's meter, Lightning's hooks and the devices, never a strategy's inside. The keys under which they
log and report are in the table of :mod:`lightning_multigpu.callbacks.keys`.
"""

from lightning_multigpu.callbacks.communication import CommunicationMonitor
from lightning_multigpu.callbacks.device_utilization import DeviceUtilizationMonitor
from lightning_multigpu.callbacks.keys import KEYS, Key
from lightning_multigpu.callbacks.run_report import RunReport
from lightning_multigpu.callbacks.throughput import ThroughputMonitor

__all__ = ["KEYS", "CommunicationMonitor", "DeviceUtilizationMonitor", "Key", "RunReport", "ThroughputMonitor"]
