"""The connections between the guardians of several hosts: a star around node 0.

::

      node 1    node 2    node 3     each line is a TCP connection over which both ends say once a second that they
          \\       |       /         are alive
           \\      |      /
              node 0

Silence, a closed connection and a reported failure are failures of the job on all hosts. The guardian that finds one
ends its own ranks and informs node 0's, which informs all others. A host that is cut off reports that itself. Links
between two other hosts are watched by their ranks: see :func:`lightning_multigpu.job.joining.broken_link`.

The guardian that connects sends the secret of the job first; node 0's reads little, and waits a limited time, before
it. Nothing is encrypted: only a private network protects the secret, as it protects gradients and exceptions.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from lightning_multigpu.job.guardian.failure import Failure, host_name
from lightning_multigpu.job.guardian.proc import clock_s
from lightning_multigpu.job.guardian.protocol import Connection, Message, accepted, knows
from lightning_multigpu.job.guardian.ranks import Found

_SEND_BUFFER_BYTES = 1 << 18  # a message that does not fit in as a whole would end the connection
_LONGEST_BEAT_S = 1.0
_ARRIVAL_S = 0.5
_MAX_STRANGERS = 256


class Peer:
    """The guardian of another host, at the other end of a connection.

    Attributes:
        trusted: True once it has sent the secret or, as node 0's, its welcome.
        end_key: once its ranks have reached the end of their run, the exception that all have raised, or empty.
        done: True once its ranks have finished, and it may leave.
    """

    def __init__(self, connection: Connection, received_s: float, node_rank: int | None = None) -> None:
        self.connection, self.received_s, self.node_rank = connection, received_s, node_rank
        self.host = ""
        self.trusted = self.done = False
        self.end_key: str | None = None
        with contextlib.suppress(OSError):
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)
            connection.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    @property
    def name(self) -> str:
        return node_name(self.node_rank, self.host)

    def trust(self, message: Message) -> None:
        """Reads all that it sends from now on."""
        self.host = message["host"]
        self.trusted = True
        self.connection.trust()


def node_name(node_rank: int | None, host: str) -> str:
    """The name of a host in messages: "node 1 (host gpu7)"."""
    return f"node {node_rank} (host {host})" if host else f"node {node_rank}"


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
        on_message: Callable[[Hashable, Message], None] = lambda host, message: None,
    ) -> None:
        self.silence_s = silence_s
        self._watch, self._forget, self._on_message = watch, forget, on_message
        self._secret = ""  # on node 0
        self._own_rank = 0
        self._on_met: Callable[[], None] = lambda: None
        self._finished = False
        self._at_end = self._all_at_end = False
        self._run = 1
        self.end_now = 0
        self._peers: list[Peer] = []
        self._strangers: list[Peer] = []
        self._listener: socket.socket | None = None  # while hosts have yet to connect
        self._awaited: set[int] = set()  # node ranks that have yet to connect
        self._now_s = self._beat_s = 0.0
        self._found: Found | None = None

    @property
    def _beat_every_s(self) -> float:
        return min(_LONGEST_BEAT_S, self.silence_s / 4)

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
        if not self.is_first:
            return all(peer.trusted for peer in self._peers)
        return not self._awaited and all(peer.done for peer in self._peers)

    def listen(self, listener: socket.socket, *, num_nodes: int, secret: str, now_s: float) -> None:
        """On node 0: accepts the other hosts' guardians."""
        self._secret, self._now_s = secret, now_s
        self._awaited = set(range(1, num_nodes))
        listener.setblocking(False)
        self._listener = listener
        self._watch(listener, lambda: self._accept(listener))

    def join(
        self, sock: socket.socket, *, node_rank: int, secret: str, now_s: float, on_met: Callable[[], None]
    ) -> None:
        """On the other nodes: joins through ``sock``, which is connected to node 0's guardian."""
        self._now_s, self._own_rank, self._on_met = now_s, node_rank, on_met
        peer = Peer(Connection(sock), now_s, node_rank=0)
        self._peers.append(peer)
        self._watch(sock, partial(self._read, peer))
        peer.connection.send("hello", secret=secret, node_rank=node_rank, host=host_name())

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
            peer.end_key = None
            if peer.done:
                self._find(f"the ranks of {peer.name} have ended, and ranks of {self._own_name} have begun another run")
        self.send("begin", run=run)

    def observe(self, now_s: float, *, resting: bool = False) -> Found | None:
        """Sends that this host is alive; returns the failure of another host, if any.

        ``resting``: this host's ranks are between two runs, and nothing is a failure.
        """
        self._now_s = now_s
        if now_s - self._beat_s >= self._beat_every_s:
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
                self._lost(peer)
        if silent := [peer for peer in waited_for if now_s - peer.received_s > self.silence_s]:
            # Hosts that went silent together are named together: this host, or a switch, may be cut off.
            self._silent([peer for peer in waited_for if now_s - peer.received_s > self.silence_s - self._beat_every_s])
            for peer in silent:
                self._drop(peer)
        found, self._found = self._found, None
        return found

    def send_failure(self, failure: Failure, since_s: float) -> None:
        """Sends a failure with its age."""
        self.send("failure", failure=failure.to_message(), age_s=max(0.0, self._now_s - since_s))

    def send(self, kind: str, *, to: Hashable | None = None, **fields: Any) -> list[Hashable]:
        """Sends to ``to``; by default node 0 sends to all others, and they to node 0. Returns the receivers."""
        peers = [peer for peer in self._known() if to is None or peer is to]
        for peer in peers:
            peer.connection.send(kind, **fields)
        return list(peers)

    def come_to_end(self, key: str = "") -> bool:
        """Called when all ranks of this host have reached the end of their run; True once the ranks of all hosts have.

        It is called again until then. The other hosts report to node 0, which informs them when all have. ``key`` is
        the exception that all ranks have raised, or empty; the same on all hosts.
        """
        if self.is_first and (self._awaited or not all(peer.end_key == key or peer.done for peer in self._peers)):
            return False
        if not self._at_end:
            self._at_end = True
            if self.is_first:
                self.send("all at end", run=self._run)
            else:
                self.send("at end", key=key, run=self._run)
        return self.is_first or self._all_at_end or not self._peers

    def finish(self) -> None:
        """This host's ranks have finished: its end is no failure from now on; node 0 stays until all hosts have."""
        if not self.is_first and not self._finished:
            self._finished = bool(self.send("done"))

    def close(self) -> None:
        """Closes all connections; sent messages still arrive, unless that takes long."""
        until_s = clock_s() + _ARRIVAL_S
        for peer in self._known():
            peer.connection.await_arrival(until_s)
        for peer in self._peers + self._strangers:
            self._drop(peer)
        self._close_listener()

    def _known(self) -> list[Peer]:
        return [peer for peer in self._peers if peer.trusted and not peer.connection.closed]

    # Failures

    def _find(self, what: str, since_s: float | None = None) -> None:
        if self._found is None:
            self._found = Found(Failure(what), self._now_s if since_s is None else since_s)

    def _lost(self, peer: Peer) -> None:
        why = f": {peer.connection.why}" if peer.connection.why else ""
        if peer.trusted:
            self._find(f"the guardian of {peer.name} has ended, or its connection to {self._own_name}{why}")
        else:
            self._cannot_reach(peer, why)

    def _silent(self, peers: list[Peer]) -> None:
        since_s = min(peer.received_s for peer in peers)
        if not peers[0].trusted:
            self._cannot_reach(peers[0], f": no answer for {self._now_s - since_s:.1f} s")
            return
        names = " and ".join(peer.name for peer in peers)
        self._find(silence(self._own_name, names, self._now_s - since_s), since_s)

    def _cannot_reach(self, peer: Peer, why: str) -> None:
        self._find(f"{self._own_name} cannot reach the guardian of {peer.name}{why}; is its port open to this host?")

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
            if peer not in self._strangers:
                peer.received_s = self._now_s
            try:
                self._handle(peer, message)
            except Exception as error:  # no message of another host may end this guardian
                peer.connection.closed, peer.connection.why = True, f"{error!s:.1000}"
        if peer.connection.closed:
            self._forget(peer.connection.socket)

    def _handle(self, peer: Peer, message: Message) -> None:
        kind = message["kind"]
        if peer in self._strangers:
            self._welcome(peer, message)
        elif not peer.trusted:
            self._introduce(peer, message)
        elif kind == "alive":
            return
        elif kind == "failure" and self._found is None:
            self._found = Found(Failure.from_message(message["failure"]), self._now_s - message["age_s"])
        elif kind == "at end" and message["run"] == self._run:
            peer.end_key = message["key"]
        elif kind == "all at end" and message["run"] == self._run:
            self._all_at_end = True
        elif kind == "end now":
            self.end_now = message["status"]
        elif kind == "done":
            peer.done = True
        else:
            self._on_message(peer, message)

    def _introduce(self, peer: Peer, message: Message) -> None:
        if message["kind"] == "refused":
            self._find(
                f"the guardian of {peer.name} has refused that of {self._own_name}: {message.get('why')!s:.1000}"
            )
        elif message["kind"] == "welcome":
            peer.trust(message)
            self._on_met()
        else:
            raise ValueError(f"it says {message['kind']!r:.80} before welcome: it is another program")

    def _welcome(self, peer: Peer, message: Message) -> None:
        """On node 0: handles the first message of a stranger."""
        why = self._why_not(message)
        if why:
            peer.connection.send("refused", why=why)
            peer.connection.closed = True
            return
        self._strangers.remove(peer)
        peer.node_rank, peer.received_s = message["node_rank"], self._now_s
        peer.trust(message)
        self._peers.append(peer)
        peer.connection.send("welcome", host=host_name())
        self._awaited.discard(message["node_rank"])
        if not self._awaited:  # no other is accepted
            self._close_listener()
            for stranger in self._strangers[:]:
                self._drop(stranger)

    def _why_not(self, message: Message) -> str:
        """What is wrong with a stranger's first message; empty if the stranger can be trusted."""
        node_rank = message.get("node_rank")
        if message["kind"] != "hello" or not knows(message, self._secret):
            return "its secret is not this job's"
        if node_rank == 0 or any(peer.node_rank == node_rank for peer in self._peers):
            return f"there is a node {node_rank!r:.80} already; give each host a node rank of its own"
        if type(node_rank) is not int or node_rank not in self._awaited:
            return f"node {node_rank!r:.80} is not awaited here; see num_nodes and the node ranks of all hosts"
        return ""
