"""The TCP store through which ranks join, kept at the job's main address by rank 0 or by torchrun."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import time
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lightning_multigpu.communication.connections import Connections
from lightning_multigpu.communication.interface import port_number
from lightning_multigpu.communication.rendezvous import QUIET_S, Limit, RendezvousError, own_host

_SHORTEST_POLL_S, _POLL_S = 0.01, 0.2
_PROBE_S = 2.0
_HANDSHAKE_S = 10.0
_LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class MainStore:
    """Opens the store; checks every few seconds of a wait whether the job has failed.

    Args:
        is_one_host: all ranks are on this host: the store listens at loopback, which no other host reaches.
        is_kept: torchrun's agent keeps the store, not rank 0.
        connections: can cut the store's connections.

    Raises:
        ValueError: the port is out of range.
    """

    address: str
    port: int
    limit: Limit
    _: KW_ONLY
    rank: int
    is_one_host: bool
    is_kept: bool
    connections: Connections

    def __post_init__(self) -> None:
        port_number(str(self.port))

    def open(self) -> TCPStore:
        """Rank 0 listens; the others connect. If another rank 0 listens at the address, this rank 0 connects too.

        It tries until names are known, as they come late in Kubernetes, and rank 0 is there.

        Raises:
            RendezvousError: the port is taken, the address is wrong, or no process listens there in time.
        """
        pause_s, tell_s = _SHORTEST_POLL_S, time.monotonic() + QUIET_S
        while True:
            self.limit.check()
            try:
                return self._opened()
            except OSError as error:
                problem = str(error) or type(error).__name__
            except RendezvousError:
                raise
            except RuntimeError as error:
                self.limit.check()
                problem = f"what listens there is not rank 0 of a job ({_first_line(error)})"
            where = f"rank 0 at {self.address} port {self.port}"
            if time.monotonic() > self.limit.deadline_s:
                raise RendezvousError(
                    f"rank {self.rank} on {own_host()} cannot reach {where} within {self.limit.timeout_s:g} s "
                    f"(join_timeout_s): {problem}. Check that MASTER_ADDR and MASTER_PORT are the same on all hosts "
                    "and name the host of rank 0, that rank 0 runs, and that the port is open between the hosts"
                )
            if time.monotonic() > tell_s:
                tell_s = float("inf")
                self.limit.tell(self.rank, f"waits for {where}: {problem}")
            time.sleep(pause_s)
            pause_s = min(_POLL_S, 1.5 * pause_s)

    def _opened(self) -> TCPStore:
        is_local = self._is_local()
        address = _LOOPBACK if self.is_one_host and not self.is_kept and is_local else self.address
        if self.rank != 0 or self.is_kept:
            return self._connected(address)
        if is_local:
            return self._listening(address, alone=True)
        try:
            return self._connected(address)  # to another rank 0: then both see each other's note
        except OSError:
            store = self._listening(_LOOPBACK, alone=False)
        try:
            _probe(address, self.port)
        except OSError as error:
            raise RendezvousError(
                f"MASTER_ADDR={address} is no address of {own_host()}, where rank 0 runs, and does not lead here "
                f"either ({error}). Set it on all hosts to an address of {own_host()}, or start rank 0 on the host "
                "that it names"
            ) from None
        return store

    def _connected(self, address: str) -> TCPStore:
        _probe(address, self.port)
        return self._tcp_store(address, is_master=False)

    def _listening(self, address: str, *, alone: bool) -> TCPStore:
        """The store of this process; with ``alone`` it listens at the address, and not at all interfaces."""
        listener = None
        try:
            if alone:
                try:
                    listener = listening_socket(address, self.port)
                except OSError as error:
                    if error.errno != errno.EADDRINUSE:  # by this process perhaps, whose store torch then returns
                        raise
            return self._tcp_store(address, is_master=True, listener=listener)
        except (OSError, RuntimeError) as error:
            is_taken = os.strerror(errno.EADDRINUSE).lower() in str(error).lower()
            what = "another program, or another job, has it" if is_taken else _first_line(error)
            raise RendezvousError(
                f"rank 0 cannot listen at port {self.port} of {own_host()}: {what}. Set MASTER_PORT to a free port on "
                "all hosts"
            ) from None

    def _tcp_store(self, address: str, *, is_master: bool, listener: socket.socket | None = None) -> TCPStore:
        # The store's own timeout does not end its wait for a silent peer.
        patience_s = min(_HANDSHAKE_S, max(1.0, self.limit.deadline_s - time.monotonic()))
        with self.connections.cut_after(patience_s):
            return TCPStore(
                address,
                self.port,
                is_master=is_master,
                timeout=timedelta(seconds=patience_s),
                wait_for_workers=False,
                multi_tenant=True,  # this process may still have the store of an earlier, failed run
                master_listen_fd=None if listener is None else listener.detach(),  # torch closes it
            )

    def _is_local(self) -> bool:
        """Whether the address is this host's; raises OSError for a name that is not known."""
        for family, kind, protocol, _, address in socket.getaddrinfo(self.address, 0, type=socket.SOCK_STREAM):
            try:
                with socket.socket(family, kind, protocol) as probe:
                    probe.bind(address)
                    return True
            except OSError:
                continue
        return False


def _probe(address: str, port: int) -> None:
    """Raises OSError if no process listens there."""
    socket.create_connection((address, port), timeout=_PROBE_S).close()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def listening_socket(address: str, port: int) -> socket.socket | None:
    """A socket for TCPStore's ``master_listen_fd`` at one interface: without it torch listens at all of them.

    Returns:
        None where the address is a name that leads to loopback here, and perhaps to a network on other hosts (Debian's
        127.0.1.1), or is none of this host.

    Raises:
        OSError: the socket cannot listen there.
    """
    for family, kind, protocol, _, place in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM):
        if address not in (place[0], "localhost") and ipaddress.ip_address(str(place[0]).partition("%")[0]).is_loopback:
            return None
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(place)
            return listener
        except OSError as error:
            listener.close()
            if error.errno != errno.EADDRNOTAVAIL:
                raise
    return None
