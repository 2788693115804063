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

import json
import os
import socket
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from lightning_multigpu.emulation.namespaces import Namespace, check_available

_NETWORK = "10.77.0"
_INTERFACE = "eth0"
_MAX_HOSTS = 250


class InterfaceCounters(NamedTuple):
    """The traffic of an interface since it was made.

    Bytes include an Ethernet header of 14 bytes for each packet, of up to 64 KiB, that the kernel has handed over: on a
    wire there would be more and smaller frames.
    """

    sent_bytes: int
    sent_packets: int
    received_bytes: int
    received_packets: int


@dataclass(frozen=True)
class Host:
    """One host of :class:`EmulatedHosts`; ``node_rank`` counts from 0. The others reach it as ``name`` too."""

    node_rank: int
    namespace: Namespace

    @property
    def name(self) -> str:
        return f"host{self.node_rank}"

    @property
    def address(self) -> str:
        return _address(self.node_rank)

    def environment(self) -> dict[str, str]:
        """The environment variables that a rank on this host needs to join a job of all hosts."""
        return {"MASTER_ADDR": _address(0), "MASTER_PORT": "29500", "NODE_RANK": str(self.node_rank)}

    def popen(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> subprocess.Popen[Any]:
        """Starts ``command`` on this host, as ``subprocess.Popen``; it is killed when the hosts are taken down.

        ``env`` are variables on top of this process's environment.
        """
        return subprocess.Popen(self.namespace.command(command, cwd), env={**os.environ, **(env or {})}, **options)

    def counters(self) -> InterfaceCounters:
        """The traffic of this host's interface so far."""
        (link,) = json.loads(self.namespace.run("ip", "-json", "-stats", "link", "show", _INTERFACE))
        sent, received = link["stats64"]["tx"], link["stats64"]["rx"]
        return InterfaceCounters(sent["bytes"], sent["packets"], received["bytes"], received["packets"])


class EmulatedHosts:
    """A context manager that creates hosts and deletes them at its end.

    They also end, with all that runs there, when this process does, however that comes about.

    Args:
        num_hosts: 1 to 250.
        bandwidth: of each host's sending side, as ``tc`` writes it ("1gbit", "200mbit"); None for as fast as it goes.
        burst: how much may pass at once before the bandwidth limits; figures depend on it, so name it with them.

    Raises:
        ValueError: ``num_hosts`` is out of its range.
        HostsUnavailable: on entering, where the machine cannot do it (not Linux, no root, no iproute2, no kernel
            support), or ``tc`` refuses an argument; nothing is left behind.
    """

    def __init__(self, num_hosts: int, *, bandwidth: str | None = "1gbit", burst: str = "512kb") -> None:
        if not 1 <= num_hosts <= _MAX_HOSTS:
            raise ValueError(f"num_hosts={num_hosts} is out of range: use 1 to {_MAX_HOSTS}")
        self._num_hosts, self._bandwidth, self._burst = num_hosts, bandwidth, burst
        self._hosts: list[Host] = []
        self._namespaces: list[Namespace] = []  # the first is the switch's

    @property
    def switch(self) -> Namespace:
        """The namespace of the bridge; ``port3`` there is the port of host 3."""
        return self._namespaces[0]

    def __enter__(self) -> EmulatedHosts:
        check_available()
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for namespace in self._namespaces:
            namespace.end()
        while self._namespaces:
            self._namespaces[-1].wait()
            self._namespaces.pop()
        self._hosts = []

    def __getitem__(self, node_rank: int) -> Host:
        return self._hosts[node_rank]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def _build(self) -> None:
        for node_rank in (None, *range(self._num_hosts)):
            self._namespaces.append(Namespace(self._names_seen_by(node_rank)))
        for namespace in self._namespaces:
            namespace.wait_until_ready()
        switch, *others = self._namespaces
        # No frames of the bridge's own: the counters shall count the ranks' traffic only.
        switch.run("ip", "link", "add", "bridge", "type", "bridge", "stp_state", "0", "mcast_snooping", "0")
        switch.run("ip", "link", "set", "bridge", "addrgenmode", "none", "up")
        for node_rank, namespace in enumerate(others):
            self._connect(node_rank, namespace)
            self._hosts.append(Host(node_rank, namespace))

    def _connect(self, node_rank: int, namespace: Namespace) -> None:
        eth, port, address = _INTERFACE, f"port{node_rank}", _hardware_address(node_rank)
        # All namespaces share one table of neighbours, 1,024 by default; permanent ones do not count.
        others = [other for other in range(self._num_hosts) if other != node_rank]
        commands = [
            f"link add {eth} address {address} type veth peer name {port} netns {self.switch.pid}",
            f"link set {eth} addrgenmode none",
            f"address add {_address(node_rank)}/24 dev {eth}",
            f"link set {eth} up",
            *(
                f"neighbour replace {_address(other)} lladdr {_hardware_address(other)} nud permanent dev {eth}"
                for other in others
            ),
        ]
        namespace.run("ip", "-batch", "-", given="".join(f"{command}\n" for command in commands))
        self.switch.run("ip", "link", "set", port, "addrgenmode", "none", "master", "bridge", "up")
        if self._bandwidth is not None:
            namespace.run(
                *("tc", "qdisc", "add", "dev", eth, "root", "tbf"),
                *("rate", self._bandwidth, "burst", self._burst),
                *("latency", "100ms"),  # what would wait longer for its turn is dropped
            )

    def _names_seen_by(self, node_rank: int | None) -> str:
        """/etc/hosts: every host by its name, this one by the machine's name too."""
        lines = ["127.0.0.1 localhost", "::1 localhost"]
        for other in range(self._num_hosts):
            own_names = [socket.gethostname()] if other == node_rank else []
            lines.append(" ".join([_address(other), f"host{other}", *own_names]))
            # As torch's store, which listens on IPv6, sees it; without a name c10d warns. A name of its own: host0 is
            # to stay one address.
            lines.append(f"::ffff:{_address(other)} host{other}-ipv4")
        return "\n".join(lines) + "\n"


def _address(node_rank: int) -> str:
    return f"{_NETWORK}.{node_rank + 1}"


def _hardware_address(node_rank: int) -> str:
    return f"02:00:0a:4d:00:{node_rank + 1:02x}"
