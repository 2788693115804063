"""The connections between the guardians of several hosts: a star around node 0.

::

    node 1    node 2    node 3     each line is a TCP connection over which both ends say once a second that they
          \\       |       /         are alive
           \\      |      /
              node 0

Silence, a closed connection and a reported failure are failures of the job on all hosts. The guardian that finds one
ends its own ranks and informs node 0's, which informs all others. A host that is cut off reports that itself. Links
between two other hosts are watched by their ranks: see :func:`lightning_multigpu.job.joining.broken_link`.

A rank of each other host connects, sends the job's secret, and hands the connection to its guardian. Node 0's reads
little, and waits a limited time, before the secret. Nothing is encrypted: only a private network protects the secret,
as it protects gradients and exceptions.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from lightning_multigpu.job.guardian.failure import Failure, host_name
from lightning_multigpu.job.guardian.protocol import Connection, Message, accepted, knows
from lightning_multigpu.job.guardian.ranks import Found

_SEND_BUFFER_BYTES = 1 << 18  # a message that does not fit in as a whole would end the connection
_LONGEST_BEAT_S = 1.0
_MAX_STRANGERS = 256


class Peer:
    """The guardian of another host, or a stranger, at the other end of a connection.

    ``at_end``: its ranks have reached the end of their run; ``done``: they have finished, and it may leave.
    """

    def __init__(self, connection: Connection, received_s: float, node_rank: int | None = None, host: str = "") -> None:
        self.connection, self.received_s, self.node_rank, self.host = connection, received_s, node_rank, host
        self.at_end = self.done = False
        with contextlib.suppress(OSError):
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def name(self) -> str:
        return node_name(self.node_rank, self.host)


def node_name(node_rank: int | None, host: str) -> str:
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
    ``on_message`` gets another host's messages that are not about the connection itself. Once ``end_now`` is not 0, the
    job has to end at once with that exit status.
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
        self._own_rank = 0
        self._finished = self._at_end = self._all_at_end = False
        self._run = 1
        self.end_now = 0
        self._peers: list[Peer] = []
        self._strangers: list[Peer] = []
        self._listener: socket.socket | None = None  # while hosts have yet to connect
        self._awaited: set[int] = set()  # node ranks that have yet to connect
        self._now_s = self._beat_s = 0.0
        self._found: Found | None = None

    @property
    def others_wait(self) -> bool:
        """True if ranks of another host may wait for this one's: a host is connected that has not finished."""
        return any(not peer.done for peer in self._known())

    @property
    def is_first(self) -> bool:
        """True on node 0, which reports for the job, and on a single host."""
        return self._own_rank == 0

    @property
    def all_done(self) -> bool:
        """True if this guardian may end: node 0's waits until the other hosts' ranks have finished."""
        return not self.is_first or (not self._awaited and all(peer.done for peer in self._peers))

    def listen(self, listener: socket.socket, *, num_nodes: int, secret: str, now_s: float) -> None:
        """On node 0: accepts the other hosts' guardians."""
        self._secret, self._now_s = secret, now_s
        self._awaited = set(range(1, num_nodes))
        listener.setblocking(False)
        self._listener = listener
        self._watch(listener, lambda: self._accept(listener))

    def join(self, sock: socket.socket, *, node_rank: int, host: str, now_s: float) -> None:
        """On the other nodes: ``sock`` is a connection to node 0's guardian, on ``host``, which has welcomed it."""
        self._now_s, self._own_rank = now_s, node_rank
        peer = Peer(Connection(sock), now_s, 0, host)
        self._peers.append(peer)
        self._watch(sock, partial(self._read, peer))

    def restart_timers(self, now_s: float) -> None:
        """Restarts the time of each silence: this guardian was paused, and may have missed messages."""
        for peer in self._peers:
            peer.received_s = now_s

    def begin(self, run: int, now_s: float) -> None:
        """Begins a further run, and informs the other hosts."""
        self._at_end = self._all_at_end = False
        self._run = run
        self.restart_timers(now_s)
        for peer in self._peers:
            peer.at_end = False
            if peer.done:
                self._find(f"the ranks of {peer.name} have ended, and ranks of {self._own_name} have begun another run")
        self.send("begin", run=run)

    def observe(self, now_s: float, *, resting: bool = False) -> Found | None:
        """Sends that this host is alive; returns the failure of another host, if any.

        ``resting``: this host's ranks are between two runs, and nothing is a failure.
        """
        self._now_s, beat_every_s = now_s, min(_LONGEST_BEAT_S, self.silence_s / 4)
        if now_s - self._beat_s >= beat_every_s:
            self._beat_s = now_s
            for peer in self._known():
                peer.connection.send("alive")
        for stranger in self._strangers[:]:
            if stranger.connection.closed or now_s - stranger.received_s > self.silence_s:
                self._drop(stranger)
        if resting:
            return None
        waited_for = [peer for peer in self._peers if not peer.done]
        for peer in waited_for:
            if peer.connection.closed:
                self._drop(peer)
                why = f": {peer.connection.why}" if peer.connection.why else ""
                self._find(f"the guardian of {peer.name} has ended, or its connection to {self._own_name}{why}")
        if silent := [peer for peer in waited_for if now_s - peer.received_s > self.silence_s]:
            # Hosts that went silent together are named together: this host, or a switch, may be cut off.
            together = [peer for peer in waited_for if now_s - peer.received_s > self.silence_s - beat_every_s]
            since_s, names = min(peer.received_s for peer in silent), " and ".join(peer.name for peer in together)
            self._find(silence(self._own_name, names, now_s - since_s), since_s)
            for peer in silent:
                self._drop(peer)
        found, self._found = self._found, None
        return found

    def send_failure(self, failure: Failure, since_s: float) -> None:
        """Sends a failure with its age."""
        self.send("failure", failure=failure.to_message(), age_s=max(0.0, self._now_s - since_s))

    def send(self, kind: str, **fields: Any) -> list[Hashable]:
        """Sends from node 0 to all others, and from them to node 0. Returns the receivers."""
        peers = self._known()
        for peer in peers:
            peer.connection.send(kind, **fields)
        return list(peers)

    def come_to_end(self) -> bool:
        """Called when all ranks of this host have reached the end of their run; True once the ranks of all hosts have.

        It is called again until then. The other hosts report to node 0, which informs them when all have.
        """
        if self.is_first and (self._awaited or not all(peer.at_end or peer.done for peer in self._peers)):
            return False
        if not self._at_end:
            self._at_end = True
            self.send("all at end" if self.is_first else "at end", run=self._run)
        return self.is_first or self._all_at_end or not self._peers

    def finish(self) -> None:
        """This host's ranks have finished: its end is no failure from now on; node 0 stays until all hosts have."""
        if not self.is_first and not self._finished:
            self._finished = bool(self.send("done"))

    def close(self) -> None:
        """Closes all connections; sent messages still arrive."""
        for peer in self._known():
            self._read(peer)  # a socket that is closed with unread data drops its data under way
        for peer in self._peers + self._strangers:
            self._drop(peer)
        self._close_listener()

    def _known(self) -> list[Peer]:
        return [peer for peer in self._peers if not peer.connection.closed]

    def _find(self, what: str, since_s: float | None = None) -> None:
        if self._found is None:
            self._found = Found(Failure(what), self._now_s if since_s is None else since_s)

    @property
    def _own_name(self) -> str:
        return node_name(self._own_rank, host_name())

    # Connections

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._forget(self._listener)
            self._listener.close()
            self._listener = None

    def _accept(self, listener: socket.socket) -> None:
        for sock in accepted(listener):
            peer = Peer(Connection(sock, is_stranger=True), self._now_s)
            if len(self._strangers) >= _MAX_STRANGERS:
                self._drop(self._strangers[0])  # a host introduces itself at once
            self._strangers.append(peer)
            self._watch(sock, partial(self._read, peer))

    def _drop(self, peer: Peer) -> None:
        for peers in (self._peers, self._strangers):
            if peer in peers:
                peers.remove(peer)
        self._forget(peer.connection.socket)
        peer.connection.close()

    def _read(self, peer: Peer) -> None:
        for message in peer.connection.arriving():
            try:
                if peer in self._strangers:
                    self._welcome(peer, message)
                else:
                    peer.received_s = self._now_s
                    self._handle(peer, message)
            except Exception as error:  # no message of another host may end this guardian
                peer.connection.closed, peer.connection.why = True, f"{error!s:.1000}"
        if peer.connection.closed:
            self._forget(peer.connection.socket)

    def _handle(self, peer: Peer, message: Message) -> None:
        kind = message["kind"]
        if kind == "failure" and self._found is None:
            self._found = Found(Failure.from_message(message["failure"]), self._now_s - message["age_s"])
        elif kind == "at end":
            peer.at_end = message["run"] == self._run
        elif kind == "all at end":
            self._all_at_end = message["run"] == self._run
        elif kind == "end now":
            self.end_now = message["status"]
        elif kind == "done":
            peer.done = True
        elif kind != "alive":
            self._on_message(peer, message)

    def _welcome(self, peer: Peer, message: Message) -> None:
        """On node 0: handles the first message of a stranger."""
        node_rank = message.get("node_rank")
        if message["kind"] != "hello" or not knows(message, self._secret):
            why = "its secret is not this job's"
        elif node_rank == 0 or any(other.node_rank == node_rank for other in self._peers):
            why = f"there is a node {node_rank!r:.80} already; give each host a node rank of its own"
        elif type(node_rank) is not int or node_rank not in self._awaited:
            why = f"node {node_rank!r:.80} is not awaited here; see num_nodes and the node ranks of all hosts"
        else:
            self._strangers.remove(peer)
            peer.node_rank, peer.host, peer.received_s = node_rank, message["host"], self._now_s
            peer.connection.trust()
            self._peers.append(peer)
            peer.connection.send("welcome", host=host_name())
            self._awaited.discard(node_rank)
            if not self._awaited:  # no other is accepted
                self._close_listener()
                for stranger in self._strangers[:]:
                    self._drop(stranger)
            return
        peer.connection.send("refused", why=why)
        peer.connection.closed = True
