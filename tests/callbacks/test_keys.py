"""The table of keys."""

from __future__ import annotations

import pytest

from lightning_multigpu.callbacks import CommunicationMonitor, DeviceUtilizationMonitor, ThroughputMonitor
from lightning_multigpu.callbacks.keys import KEYS, keys_of
from lightning_multigpu.callbacks.monitor import Monitor


def test_the_keys_that_others_rely_on_are_there() -> None:
    assert {
        "throughput/samples_per_sec",
        "throughput/batches_per_sec",
        "throughput/tokens_per_sec",
        "throughput/flops_per_sec",
        "throughput/mfu",
        "throughput/step_ms",
        "communication/all_reduce_ms",
        "communication/total_ms",
        "communication/exposed_ms",
        "communication/sent_bytes",
        "communication/algbw_gb_per_sec",
        "communication/busbw_gb_per_sec",
        "device/utilization_percent",
        "device/memory_used_bytes",
        "device/power_watts",
        "device/cpu_percent",
        "device/process_rss_bytes",
    } <= KEYS.keys()


@pytest.mark.parametrize("monitor", [ThroughputMonitor, CommunicationMonitor, DeviceUtilizationMonitor])
def test_every_key_is_documented_where_it_is_measured(monitor: type[Monitor]) -> None:
    for key in keys_of(monitor.group):
        assert f"`{key}`" in (monitor.__doc__ or "")
