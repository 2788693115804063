"""Several hosts on one machine, with networks as slow as asked for."""

from lightning_multigpu.emulation.emulated_hosts import EmulatedHosts, Host, InterfaceCounters
from lightning_multigpu.emulation.namespaces import HostsUnavailable

__all__ = ["EmulatedHosts", "Host", "HostsUnavailable", "InterfaceCounters"]
