"""What the guardians of several hosts have to do with each other.

Each has one connection, to the guardian of node 0, over which both say once a second that they are alive. Silence, a
closed connection and a reported failure are failures of the job on all hosts; node 0 passes them on.
"""

from __future__ import annotations

import socket
from collections.abc import Callable

from lightning_multigpu.guardian.failure import Failure, host_name
from lightning_multigpu.guardian.protocol import Connection, Message, nonce, proof, proves
from lightning_multigpu.guardian.ranks import Found

_BEAT_S = 1.0


class _Peer:
    """The guardian of another host."""

    def __init__(self, connection: Connection, now_s: float) -> None:
        self.connection = connection
        self.nonce = nonce()
        self.heard_s = now_s
        self.node_rank: int | None = None
        self.host = "unknown"
        self.trusted = False
        self.at_end = False
        self.done = False

    @property
    def name(self) -> str:
        return f"node {self.node_rank} (host {self.host})"


class Hosts:
    """This host's connections to other hosts' guardians.

    Args:
        silence_s: how long another host may say nothing.
        join_timeout_s: how long after :meth:`listen` the last host may come.
        watch: makes the guardian's loop call a function when a socket becomes readable.
        forget: the opposite.

    Attributes:
        end_now: another host has said that the job has to end at once.
    """

    def __init__(
        self,
        *,
        silence_s: float,
        join_timeout_s: float,
        watch: Callable[[socket.socket, Callable[[], None]], None],
        forget: Callable[[socket.socket], None],
    ) -> None:
        self._silence_s = silence_s
        self._join_timeout_s = join_timeout_s
        self._watch, self._forget = watch, forget
        self._secret = b""
        self._own_rank = 0
        self._on_met: Callable[[], None] = lambda: None
        self._finished = False
        self._at_end = False
        self.end_now = False
        self._peers: list[_Peer] = []
        self._listener: socket.socket | None = None
        self._missing = 0
        self._since_s = self._now_s = self._beat_s = 0.0
        self._found: Found | None = None

    @property
    def is_used(self) -> bool:
        """Whether the job has other hosts."""
        return bool(self._peers) or self._listener is not None

    @property
    def all_done(self) -> bool:
        """Whether this guardian may leave: node 0's stays until the others' ranks have finished."""
        if self._listener is None:
            return all(peer.trusted for peer in self._peers)
        return self._missing == 0 and all(peer.done for peer in self._peers)

    def listen(self, listener: socket.socket, *, num_nodes: int, secret: bytes, now_s: float) -> None:
        """On node 0: accepts the other hosts' guardians."""
        listener.setblocking(False)
        self._listener, self._missing, self._secret, self._since_s = listener, num_nodes - 1, secret, now_s
        self._now_s = now_s
        self._watch(listener, self._accept)

    def join(
        self, sock: socket.socket, *, node_rank: int, secret: bytes, now_s: float, on_met: Callable[[], None]
    ) -> None:
        """On the other nodes: ``sock`` is connected to node 0's guardian, which asks for the proof first."""
        peer = _Peer(Connection(sock), now_s)
        peer.node_rank, peer.host = 0, "of rank 0"
        self._secret, self._now_s = secret, now_s
        self._own_rank, self._on_met = node_rank, on_met
        self._add(peer)

    def forgive(self, now_s: float) -> None:
        """Begins to wait anew: this guardian has been paused and may have overheard the others."""
        for peer in self._peers:
            peer.heard_s = now_s

    def observe(self, now_s: float) -> Found | None:
        """Says that this host is alive; returns the failure of another one, if there is any."""
        self._now_s = now_s
        if now_s - self._beat_s >= _BEAT_S:
            self._beat_s = now_s
            for peer in self._known():
                peer.connection.send("alive")
        for peer in list(self._peers):
            silent_s = now_s - peer.heard_s
            if peer.done:
                continue
            if peer.connection.closed:
                self._lost(peer, "its guardian has ended", now_s)
            elif silent_s > self._silence_s:
                what = f"nothing heard for {silent_s:.1f} s: the host, its guardian or the link to it is down"
                self._lost(peer, what, peer.heard_s)
        if self._found is None and self._missing > 0 and now_s - self._since_s > self._join_timeout_s:
            came = ", ".join(peer.name for peer in self._known()) or "none"
            what = f"{self._missing} hosts have not come within {self._join_timeout_s:g} s; there are: {came}"
            self._found = Found(Failure(what, host=host_name()), now_s)
        found, self._found = self._found, None
        return found

    def tell(self, failure: Failure, since_s: float) -> None:
        """Passes a failure on to all hosts that this one knows; how long ago it was, because clocks differ."""
        age_s = max(0.0, self._now_s - since_s)
        for peer in self._known():
            peer.connection.send("failure", failure=failure.to_message(), age_s=age_s)

    def tell_end_now(self) -> None:
        """Passes on that the job has to end at once."""
        for peer in self._known():
            peer.connection.send("end now")

    def come_to_end(self) -> bool:
        """All ranks of this host have come to the end of their run; True once those of all hosts have.

        Called again until then.
        """
        if self._listener is not None:
            if self._missing or not all(peer.at_end or peer.done for peer in self._peers):
                return False
            if not self._at_end:
                self._at_end = True
                for peer in self._known():
                    peer.connection.send("all at end")
            return True
        if self._peers and not self._at_end:
            self._at_end = True
            for peer in self._known():
                peer.connection.send("at end")
        return all(peer.at_end for peer in self._peers)

    def finish(self) -> None:
        """This host's ranks have finished: its end is no failure from here on, unless it is node 0, which stays."""
        if self._listener is None and not self._finished:
            for peer in self._known():
                self._finished = True
                peer.connection.send("done")

    def close(self) -> None:
        """Closes everything; what has been sent before still arrives."""
        for peer in list(self._peers):
            self._drop(peer)
        if self._listener is not None:
            self._forget(self._listener)
            self._listener.close()
            self._listener = None

    def _known(self) -> list[_Peer]:
        return [peer for peer in self._peers if peer.trusted and not peer.connection.closed]

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return
        peer = _Peer(Connection(sock), self._now_s)
        self._add(peer)
        peer.connection.send("challenge", nonce=peer.nonce)

    def _add(self, peer: _Peer) -> None:
        self._peers.append(peer)
        self._watch(peer.connection.socket, lambda: self._read(peer))

    def _drop(self, peer: _Peer) -> None:
        self._peers.remove(peer)
        self._forget(peer.connection.socket)
        peer.connection.close()

    def _lost(self, peer: _Peer, what: str, since_s: float) -> None:
        """A stranger that leaves is nobody's loss; one of the job's hosts is a failure."""
        self._drop(peer)
        if peer.node_rank is not None and self._found is None:
            self._found = Found(Failure(f"{peer.name}: {what}", host=host_name()), since_s)

    def _read(self, peer: _Peer) -> None:
        for message in peer.connection.receive():
            peer.heard_s = self._now_s
            try:
                self._handle(peer, message)
            except ValueError:
                peer.connection.closed = True
        if peer.connection.closed:
            self._forget(peer.connection.socket)

    def _handle(self, peer: _Peer, message: Message) -> None:
        kind = message["kind"]
        if self._listener is None and kind == "challenge":
            own = proof(self._secret, "host", str(message.get("nonce")))
            peer.connection.send("hello", proof=own, nonce=peer.nonce, node_rank=self._own_rank, host=host_name())
        elif self._listener is None and kind == "welcome" and proves(message, self._secret, "node 0", peer.nonce):
            peer.host, peer.trusted = str(message.get("host")), True
            self._on_met()
        elif self._listener is not None and kind == "hello" and peer.node_rank is None:
            self._welcome(peer, message)
        elif self._listener is None and kind == "refused" and self._found is None:
            what = f"the guardian of node 0 has refused this host's: {message.get('why')}"
            self._found = Found(Failure(what, host=host_name()), self._now_s)
        elif peer.trusted and kind == "failure" and self._found is None:
            age_s = message.get("age_s")
            since_s = self._now_s - (float(age_s) if isinstance(age_s, int | float) else 0.0)
            self._found = Found(Failure.from_message(message.get("failure")), since_s)
        elif peer.trusted and kind in ("at end", "all at end"):
            peer.at_end = True
        elif peer.trusted and kind == "end now":
            self.end_now = True
        elif peer.trusted and kind == "done":
            peer.done = True

    def _welcome(self, peer: _Peer, message: Message) -> None:
        node_rank = message.get("node_rank")
        why = ""
        if not proves(message, self._secret, "host", peer.nonce) or not isinstance(node_rank, int):
            why = "its secret is not this job's"
        elif any(other.node_rank == node_rank for other in self._peers):
            why = f"there is a node {node_rank} already; give each host a node rank of its own"
        if why:
            peer.connection.send("refused", why=why)
            peer.connection.closed = True
            return
        peer.node_rank, peer.host, peer.trusted = node_rank, str(message.get("host")), True
        self._missing -= 1
        own = proof(self._secret, "node 0", str(message.get("nonce")))
        peer.connection.send("welcome", proof=own, host=host_name())
