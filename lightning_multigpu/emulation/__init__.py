"""Emulated hosts on one machine, with limited network bandwidth."""

from lightning_multigpu.emulation.emulated_hosts import EmulatedHosts, Host, InterfaceCounters
from lightning_multigpu.emulation.namespaces import HostsUnavailable

__all__ = ["EmulatedHosts", "Host", "HostsUnavailable", "InterfaceCounters"]
