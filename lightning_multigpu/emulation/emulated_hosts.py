"""Emulated hosts: network namespaces joined by a switch, each with an address and a bandwidth of its own.

::

      namespace of host 0     namespace of the switch     namespace of host 1
      ranks                                                             ranks
        eth0 10.77.0.1 -- port0 --- bridge --- port1 -- eth0 10.77.0.2
        tbf: egress                                          tbf: egress

Nothing of the machine's own network is touched, and nothing of it can be reached from the hosts. They share everything
else: processor, memory, files, host name, /dev/shm.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any

from lightning_multigpu.emulation import quantities
from lightning_multigpu.emulation.namespaces import (
    NamespaceSet,
    command_in,
    ip,
    ip_batch,
    ip_json,
    remove_leftovers,
    tc,
)

log = logging.getLogger(__name__)

_NETWORK = "10.77.0"
_MAX_HOSTS = 250
_FRAME_BYTES = 1514  # with an MTU of 1500


@dataclass(frozen=True)
class InterfaceCounters:
    """The traffic of an interface since it was made; the difference of two is the traffic between them.

    Bytes include the 14 bytes of each frame's Ethernet header, not its checksum and not the gap between frames.
    """

    sent_bytes: int
    sent_packets: int
    received_bytes: int
    received_packets: int

    def __sub__(self, earlier: InterfaceCounters) -> InterfaceCounters:
        return InterfaceCounters(
            self.sent_bytes - earlier.sent_bytes,
            self.sent_packets - earlier.sent_packets,
            self.received_bytes - earlier.received_bytes,
            self.received_packets - earlier.received_packets,
        )


@dataclass(frozen=True)
class Host:
    """One host of :class:`EmulatedHosts`; ``node_rank`` counts from 0. The others reach it as ``name`` too."""

    node_rank: int
    namespace: str
    address: str
    master_address: str
    interface: str = "eth0"

    @property
    def name(self) -> str:
        return f"host{self.node_rank}"

    def environment(self) -> dict[str, str]:
        """The environment variables that a rank on this host needs to join a job of all hosts."""
        return {
            "MASTER_ADDR": self.master_address,
            "MASTER_PORT": "29500",
            "NODE_RANK": str(self.node_rank),
        }

    def popen(
        self, command: Sequence[str], *, env: Mapping[str, str] | None = None, **options: Any
    ) -> subprocess.Popen[Any]:
        """Starts ``command`` on this host; it is killed when the hosts are taken down.

        Args:
            command: program and arguments.
            env: variables on top of this process's environment.
            options: of ``subprocess.Popen``.
        """
        environment = {**os.environ, **(env or {})}
        return subprocess.Popen(command_in(self.namespace, command), env=environment, **options)

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float | None = None,
        check: bool = True,
    ) -> subprocess.CompletedProcess[str]:
        """Runs ``command`` on this host to its end and captures its output as text.

        Raises:
            subprocess.CalledProcessError: it failed and ``check`` is set.
            subprocess.TimeoutExpired: it took longer than ``timeout_s``; it has been killed.
        """
        return subprocess.run(
            command_in(self.namespace, command),
            env={**os.environ, **(env or {})},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=check,
        )

    def counters(self) -> InterfaceCounters:
        """The traffic of this host's interface so far."""
        (link,) = ip_json("-n", self.namespace, "-stats", "link", "show", self.interface)
        sent, received = link["stats64"]["tx"], link["stats64"]["rx"]
        return InterfaceCounters(sent["bytes"], sent["packets"], received["bytes"], received["packets"])


class EmulatedHosts:
    """A context manager that creates hosts and deletes them at its end, also after an error.

    A SIGTERM that arrives in the meantime ends the process through the context manager, unless the program has a
    handler of its own. Hosts of a killed process are taken down by the next use on this machine.

    Args:
        num_hosts: 1 to 250.
        bandwidth: of each host's sending side, as ``tc`` writes it ("1gbit", "200mbit"); None for as fast as it goes.
        burst: how much may pass at once before the bandwidth limits; figures depend on it, so name it with them.
        wire_frames: the kernel hands TCP's data over in frames of the MTU, as they would be on a wire, so that the
            counters count each frame and its headers. Without it, it hands over up to 64 KiB at a time, which costs
            less processor time.

    Raises:
        ValueError: an argument is out of its range; raised before anything is made.
        HostsUnavailable: on entering, where the machine cannot do it (not Linux, no root, no iproute2, no kernel
            support); nothing is left behind.
    """

    def __init__(
        self,
        num_hosts: int,
        *,
        bandwidth: str | None = "1gbit",
        burst: str = "512kb",
        wire_frames: bool = True,
    ) -> None:
        if not 1 <= num_hosts <= _MAX_HOSTS:
            raise ValueError(f"num_hosts={num_hosts} is out of range: use 1 to {_MAX_HOSTS}")
        self.bandwidth_bits_per_s = None if bandwidth is None else quantities.bits_per_s(bandwidth)
        self.burst_bytes = quantities.size_bytes(burst)
        if self.burst_bytes < _FRAME_BYTES:
            raise ValueError(
                f"burst={burst!r} is smaller than one frame, so that none could ever pass: use at least {_FRAME_BYTES}b"
            )
        self.num_hosts = num_hosts
        self._wire_frames = wire_frames
        self._hosts: list[Host] = []
        self._namespaces: NamespaceSet | None = None
        self._sigterm_before: Any = None

    def __enter__(self) -> EmulatedHosts:
        if self._namespaces is not None:
            raise RuntimeError("these hosts are up already: make another EmulatedHosts for a second network")
        self._namespaces = NamespaceSet()
        self._catch_sigterm()
        try:
            if removed := remove_leftovers():
                log.warning("deleted namespaces of a process that was killed: %s", ", ".join(removed))
            self._build(self._namespaces)
        except BaseException:
            self._take_down()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._take_down()

    def __getitem__(self, node_rank: int) -> Host:
        return self._hosts[node_rank]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def __len__(self) -> int:
        return len(self._hosts)

    def _build(self, namespaces: NamespaceSet) -> None:
        switch = namespaces.add("switch")
        # No frames of the bridge's own: the counters shall count the ranks' traffic only.
        ip("-n", switch, "link", "add", "bridge", "type", "bridge", "stp_state", "0", "mcast_snooping", "0")
        ip("-n", switch, "link", "set", "bridge", "addrgenmode", "none", "up")
        for node_rank in range(self.num_hosts):
            self._hosts.append(self._build_host(namespaces, switch, node_rank))

    def _build_host(self, namespaces: NamespaceSet, switch: str, node_rank: int) -> Host:
        name = namespaces.add(f"host{node_rank}", hosts_file=self._names_seen_by(node_rank))
        host = Host(node_rank, name, _address(node_rank), _address(0))
        eth, port = host.interface, f"port{node_rank}"
        ip(
            *("-n", name, "link", "add", eth, "address", _hardware_address(node_rank)),
            *("type", "veth", "peer", "name", port, "netns", switch),
        )
        ip("-n", switch, "link", "set", port, "addrgenmode", "none", "master", "bridge", "up")
        ip("-n", name, "link", "set", eth, "addrgenmode", "none")
        if self._wire_frames:
            ip("-n", name, "link", "set", eth, "gso_max_segs", "1")
        ip("-n", name, "address", "add", f"{host.address}/24", "dev", eth)
        ip("-n", name, "link", "set", eth, "up")
        # All namespaces share one table of neighbours, 1,024 by default; permanent ones do not count.
        others = [other for other in range(self.num_hosts) if other != node_rank]
        neighbours = [f"{_address(other)} lladdr {_hardware_address(other)}" for other in others]
        ip_batch(name, [f"neighbour replace {neighbour} nud permanent dev {eth}" for neighbour in neighbours])
        if self.bandwidth_bits_per_s is not None:
            tc(
                *("-n", name, "qdisc", "add", "dev", eth, "root", "tbf"),
                *("rate", f"{self.bandwidth_bits_per_s}bit", "burst", f"{self.burst_bytes}b"),
                *("latency", "100ms"),  # what would wait longer for its turn is dropped
            )
        return host

    def _names_seen_by(self, node_rank: int) -> str:
        """/etc/hosts: every host by its name, this one by the machine's name too."""
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        for other in range(self.num_hosts):
            own_names = [socket.gethostname()] if other == node_rank else []
            lines.append(" ".join([_address(other), f"host{other}", *own_names]))
            # As torch's store, which listens on IPv6, sees it; without a name c10d warns. A name of its own: host0 is
            # to stay one address.
            lines.append(f"::ffff:{_address(other)} host{other}-ipv4")
        return "\n".join(lines) + "\n"

    def _take_down(self) -> None:
        namespaces, self._namespaces = self._namespaces, None
        self._hosts = []
        if self._sigterm_before is not None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the end has begun: a second signal must not cut it short
        try:
            if namespaces is not None:
                namespaces.delete()
        finally:
            self._release_sigterm()

    def _catch_sigterm(self) -> None:
        in_main_thread = threading.current_thread() is threading.main_thread()
        if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._sigterm_before = signal.signal(signal.SIGTERM, _exit_on_sigterm)

    def _release_sigterm(self) -> None:
        if self._sigterm_before is not None:
            signal.signal(signal.SIGTERM, self._sigterm_before)
            self._sigterm_before = None


def _address(node_rank: int) -> str:
    return f"{_NETWORK}.{node_rank + 1}"


def _hardware_address(node_rank: int) -> str:
    return f"02:00:0a:4d:00:{node_rank + 1:02x}"


def _exit_on_sigterm(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)
