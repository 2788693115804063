"""The connections between the guardians of several hosts: a star around node 0.

::

    node 1    node 2    node 3     each line is a TCP connection over which both ends say once a second that they
          \\       |       /         are alive
           \\      |      /
              node 0

Silence, a closed connection and a reported failure are failures of the job on all hosts. The guardian that finds one
ends its own ranks and informs node 0's, which informs all others. A host that is cut off reports that itself. Links
between two other hosts are watched by their ranks: see :func:`lightning_multigpu.job.joining.broken_link`.

A rank of each other host connects, sends the job's secret, and hands the connection to its guardian. The kernel passes
a connection to node 0's together with its first bytes (TCP_DEFER_ACCEPT): if they are not the secret, it is closed at
once. Nothing is encrypted: only a private network protects the secret, as it protects gradients and exceptions.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from lightning_multigpu.job.guardian.failure import Failure, host_name
from lightning_multigpu.job.guardian.protocol import Connection, Message, ProtocolError, accepted, decode, encode

_SEND_BUFFER_BYTES = 1 << 18  # a message that does not fit in as a whole would end the connection
_LONGEST_BEAT_S = 1.0
_MAX_HELLO_BYTES = 4 * 1024
_DEFER_S = 10  # a rank may be slow to send its first bytes


class Peer:
    """The guardian of another host; ``at_end``: its ranks have reached the end of their run."""

    def __init__(self, sock: socket.socket, node_rank: int, host: str, received_s: float) -> None:
        self.connection, self.received_s, self.node_rank = Connection(sock), received_s, node_rank
        self.name = node_name(node_rank, host)
        self.at_end = False
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def node_name(node_rank: int, host: str) -> str:
    """The name of a host in messages: "node 1 (host gpu7)"."""
    return f"node {node_rank} (host {host})"


def silence(own: str, others: str, silent_s: float) -> str:
    """The failure of a link that the host ``own`` has found."""
    return (
        f"{own} has received nothing from {others} for {silent_s:.1f} s: a host, its guardian, or the link between "
        "them is down"
    )


class Hosts:
    """This host's connections to other hosts' guardians: to all of them on node 0, to node 0's on the others.

    ``watch`` makes the guardian's loop call a function when a socket becomes readable; ``forget`` is the opposite.
    ``on_message`` gets another host's messages that are not about the connection itself. ``is_first``: this is node 0,
    or a single host. ``all_at_end``: the ranks of all hosts have reached the end of their run, and the end of a host is
    no failure until they begin another one. Once ``end_now`` is not 0, the job has to end at once with that status.
    """

    def __init__(
        self,
        *,
        silence_s: float,
        watch: Callable[[socket.socket, Callable[[], None]], None],
        forget: Callable[[socket.socket], None],
        on_message: Callable[[Hashable, Message], None],
    ) -> None:
        self.silence_s = silence_s
        self._watch, self._forget, self._on_message = watch, forget, on_message
        self._secret = ""  # on node 0
        self._own_rank, self.is_first = 0, True
        self._at_end = self.all_at_end = False
        self._run = 1
        self.end_now = 0
        self._peers: list[Peer] = []
        self._listener: socket.socket | None = None  # while hosts have yet to connect
        self._awaited: set[int] = set()  # node ranks that have yet to connect
        self._now_s = self._beat_s = 0.0
        self._found: Failure | None = None

    def listen(self, listener: socket.socket, *, num_nodes: int, secret: str, now_s: float) -> None:
        """On node 0: accepts the other hosts' guardians."""
        self._secret, self._now_s = secret, now_s
        self._awaited = set(range(1, num_nodes))
        listener.setblocking(False)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, _DEFER_S)
        self._listener = listener
        self._watch(listener, lambda: self._accept(listener))

    def join(self, sock: socket.socket, *, node_rank: int, host: str, now_s: float) -> None:
        """On the other nodes: ``sock`` is a connection to node 0's guardian, on ``host``, which has welcomed it."""
        self._now_s, self._own_rank, self.is_first = now_s, node_rank, False
        self._add(Peer(sock, 0, host, now_s))

    def restart_timers(self, now_s: float) -> None:
        """Restarts the time of each silence: this guardian was paused, and may have missed messages."""
        for peer in self._peers:
            peer.received_s = now_s

    def begin(self, run: int, now_s: float) -> None:
        """Begins a further run, and informs the other hosts."""
        self._at_end = self.all_at_end = False
        self._run = run
        self.restart_timers(now_s)
        for peer in self._peers:
            peer.at_end = False
        self.send("begin", run=run)

    def observe(self, now_s: float) -> Failure | None:
        """Sends that this host is alive; returns the failure of another host, if any: none between two runs."""
        self._now_s = now_s
        if now_s - self._beat_s >= min(_LONGEST_BEAT_S, self.silence_s / 4):
            self._beat_s = now_s
            self.send("alive")
        if self.all_at_end:
            return None
        for peer in self._peers[:]:
            if peer.connection.closed:
                self._drop(peer)
                why = f": {peer.connection.why}" if peer.connection.why else ""
                self._find(f"the guardian of {peer.name} has ended, or its connection to {self._own_name}{why}")
        if silent := [peer for peer in self._peers if now_s - peer.received_s > self.silence_s]:
            silent_s = now_s - min(peer.received_s for peer in silent)
            names = " and ".join(peer.name for peer in silent)  # this host, or a switch, may be cut off
            self._find(silence(self._own_name, names, silent_s), silent_s)
        found, self._found = self._found, None
        return found

    def send(self, kind: str, **fields: Any) -> None:
        """Sends from node 0 to all others, and from them to node 0."""
        for peer in self.connected():
            peer.connection.send(kind, **fields)

    def come_to_end(self) -> bool:
        """Called while all ranks of this host are at the end of their run; True once the ranks of all hosts are."""
        if self.is_first and (self._awaited or not all(peer.at_end for peer in self._peers)):
            return False
        if not self._at_end:
            self._at_end = True
            self.send("all at end" if self.is_first else "at end", run=self._run)
        self.all_at_end |= self.is_first or not self._peers
        return self.all_at_end

    def close(self) -> None:
        """Closes all connections; sent messages still arrive."""
        for peer in self.connected():
            self._read(peer)  # a socket that is closed with unread data drops its data under way
        for peer in self._peers[:]:
            self._drop(peer)
        self._close_listener()

    def connected(self) -> list[Peer]:
        return [peer for peer in self._peers if not peer.connection.closed]

    def _find(self, what: str, age_s: float = 0.0) -> None:
        self._found = self._found or Failure(what, age_s=age_s)

    @property
    def _own_name(self) -> str:
        return node_name(self._own_rank, host_name())

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._forget(self._listener)
            self._listener.close()
            self._listener = None

    def _accept(self, listener: socket.socket) -> None:
        for sock in accepted(listener):
            hello = _hello(sock)
            why = self._why_not(hello)
            with contextlib.suppress(OSError):
                sock.send(encode("refused", why=why) if why else encode("welcome", host=host_name()))
            if why:
                sock.close()
            else:
                self._add(Peer(sock, hello["node_rank"], str(hello.get("host")), self._now_s))
                self._awaited.discard(hello["node_rank"])
        if not self._awaited:  # no other is accepted
            self._close_listener()

    def _why_not(self, hello: Message) -> str:
        """What is wrong with a first message; empty if it is of a host of this job."""
        import hmac  # for jobs of several hosts alone: OpenSSL takes 5 ms of a guardian's start

        node_rank, secret = hello.get("node_rank"), hello.get("secret")
        if not isinstance(secret, str) or not hmac.compare_digest(
            secret.encode(errors="replace"), self._secret.encode()
        ):
            return "its secret is not this job's"
        if node_rank == 0 or any(peer.node_rank == node_rank for peer in self._peers):
            return f"there is a node {node_rank!r:.80} already; give each host a node rank of its own"
        if type(node_rank) is not int or node_rank not in self._awaited:
            return f"node {node_rank!r:.80} is not awaited here; see num_nodes and the node ranks of all hosts"
        return ""

    def _add(self, peer: Peer) -> None:
        self._peers.append(peer)
        self._watch(peer.connection.socket, partial(self._read, peer))

    def _drop(self, peer: Peer) -> None:
        self._peers.remove(peer)
        self._forget(peer.connection.socket)
        peer.connection.close()

    def _read(self, peer: Peer) -> None:
        for message in peer.connection.arriving():
            try:
                peer.received_s = self._now_s
                self._handle(peer, message)
            except Exception as error:  # no message of another host may end this guardian
                peer.connection.closed, peer.connection.why = True, f"{error!s:.1000}"
        if peer.connection.closed:
            self._forget(peer.connection.socket)

    def _handle(self, peer: Peer, message: Message) -> None:
        kind = message["kind"]
        if kind == "failure":
            self._found = self._found or Failure(**message["failure"])
        elif kind == "at end":
            peer.at_end = message["run"] == self._run
        elif kind == "all at end":
            self.all_at_end = message["run"] == self._run
        elif kind == "end now":
            self.end_now = message["status"]
        elif kind != "alive":
            self._on_message(peer, message)


def _hello(sock: socket.socket) -> Message:
    """The first message of a connection, which has come with it; empty without one."""
    try:
        sock.setblocking(False)
        return decode(sock.recv(_MAX_HELLO_BYTES))
    except (OSError, ProtocolError):
        return {}
