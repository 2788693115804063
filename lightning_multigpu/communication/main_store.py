"""The TCP store through which ranks join, kept at the job's main address by rank 0 or by torchrun."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from datetime import timedelta

from torch.distributed import TCPStore  # type: ignore[attr-defined]

from lightning_multigpu.communication.connections import Connections
from lightning_multigpu.communication.interface import port_number
from lightning_multigpu.communication.rendezvous import QUIET_S, RendezvousError, own_host, tell_wait

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
        deadline_s: the time by which the store has to be open, on the monotonic clock.
        timeout_s: the user's limit, for the message.
        check: called between two tries; raises if the job has failed.

    Raises:
        ValueError: the port is out of range.
    """

    address: str
    port: int
    _: KW_ONLY
    rank: int
    is_one_host: bool
    is_kept: bool
    connections: Connections
    deadline_s: float
    timeout_s: float
    check: Callable[[], None]

    def __post_init__(self) -> None:
        port_number(str(self.port))

    def open(self) -> TCPStore:
        """Rank 0 listens; the others connect. If another rank 0 listens at the address, this rank 0 connects too.

        Raises:
            RendezvousError: the port is taken, the address is wrong, or no process listens there in time.
        """
        if self.is_one_host and not self.is_kept and self._is_local():
            return replace(self, address=_LOOPBACK, is_one_host=False).open()
        if self.rank != 0 or self.is_kept:
            return self._connect()
        if self._is_local():
            return self._listen(self.address, listening_socket)
        if self._problem() is None:  # then both processes that claim rank 0 see each other's note
            return self._connect()
        store = self._listen(_LOOPBACK, lambda address, port: None)
        if (problem := self._problem()) is not None:
            raise RendezvousError(
                f"MASTER_ADDR={self.address} is no address of {own_host()}, where rank 0 runs, and does not lead here "
                f"either ({problem}). Set it on all hosts to an address of {own_host()}, or start rank 0 on the host "
                "that it names"
            )
        return store

    def _listen(self, address: str, socket_at: Callable[[str, int], socket.socket | None]) -> TCPStore:
        try:
            try:
                listener = socket_at(address, self.port)
            except OSError as error:
                if error.errno != errno.EADDRINUSE:
                    raise
                listener = None  # by this process perhaps, whose store torch then returns
            return self._tcp_store(address, is_master=True, listener=listener)
        except (OSError, RuntimeError) as error:
            what = str(error).partition("\n")[0]
            if os.strerror(errno.EADDRINUSE).lower() in str(error).lower():
                what = "another program, or another job, has it"
            raise RendezvousError(
                f"rank 0 cannot listen at port {self.port} of {own_host()}: {what}. Set MASTER_PORT to a free port "
                "on all hosts"
            ) from None

    def _connect(self) -> TCPStore:
        handshakes, tell_s = 0, time.monotonic() + QUIET_S
        pause_s = _SHORTEST_POLL_S
        while True:
            self.check()
            problem = self._problem()
            if problem is None:
                try:
                    return self._tcp_store(self.address, is_master=False)
                except RuntimeError as error:
                    self.check()
                    handshakes += 1
                    problem = f"what listens there is not rank 0 of a job ({str(error).partition(chr(10))[0]})"
            if handshakes > 1 or time.monotonic() > self.deadline_s:
                raise RendezvousError(
                    f"rank {self.rank} on {own_host()} cannot reach rank 0 at {self.address} port {self.port}"
                    f"{'' if handshakes > 1 else f' within {self.timeout_s:g} s (join_timeout_s)'}: {problem}. Check "
                    "that MASTER_ADDR and MASTER_PORT are the same on all hosts and name the host of rank 0, that rank "
                    "0 runs, and that the port is open between the hosts"
                )
            if time.monotonic() > tell_s:
                tell_s = self.deadline_s
                what = f"waits for rank 0 at {self.address} port {self.port}: {problem}"
                tell_wait(self.rank, what, self.deadline_s)
            time.sleep(pause_s)
            pause_s = min(_POLL_S, 1.5 * pause_s)

    def _tcp_store(self, address: str, *, is_master: bool, listener: socket.socket | None = None) -> TCPStore:
        # The store's own timeout does not end its wait for a silent peer.
        patience_s = min(_HANDSHAKE_S, max(1.0, self.deadline_s - time.monotonic()))
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
        """Whether the address is this host's; waits for names that cannot be resolved yet."""
        told = False
        while True:
            try:
                candidates = socket.getaddrinfo(self.address, 0, type=socket.SOCK_STREAM)
                break
            except OSError as error:
                if time.monotonic() > self.deadline_s:
                    raise RendezvousError(
                        f"rank {self.rank} on {own_host()} does not know the host MASTER_ADDR={self.address}: {error}; "
                        f"set it to a name or an address of {own_host()} that all hosts know"
                    ) from None
                if not told:
                    told = True
                    what = f"does not know the host MASTER_ADDR={self.address} ({error}) and waits for its name"
                    tell_wait(self.rank, f"{what}, since names can come late, as in Kubernetes", self.deadline_s)
            self.check()
            time.sleep(_POLL_S)
        for family, kind, protocol, _, address in candidates:
            try:
                with socket.socket(family, kind, protocol) as probe:
                    probe.bind(address)
                    return True
            except OSError:
                continue
        return False

    def _problem(self) -> str | None:
        """The reason why no connection is possible, or None if a process listens there."""
        try:
            with socket.create_connection((self.address, self.port), timeout=_PROBE_S):
                return None
        except OSError as error:
            return str(error) or type(error).__name__


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


def kept_by_torchrun(variables: Mapping[str, str]) -> bool:
    """Whether torchrun's agent keeps a store at the main address, from torchrun's variables."""
    return variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
