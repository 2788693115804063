"""The table of keys."""

from __future__ import annotations

import pytest

from lightning_multigpu.callbacks import CommunicationMonitor, DeviceUtilizationMonitor, ThroughputMonitor
from lightning_multigpu.callbacks.keys import keys_of
from lightning_multigpu.callbacks.monitor import Monitor


@pytest.mark.parametrize("monitor", [ThroughputMonitor, CommunicationMonitor, DeviceUtilizationMonitor])
def test_every_key_is_documented_where_it_is_measured(monitor: type[Monitor]) -> None:
    for key in keys_of(monitor.group):
        assert f"`{key}`" in (monitor.__doc__ or "")
