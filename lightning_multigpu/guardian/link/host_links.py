"""The connections between the guardians of several hosts.

::

      node 0 ---- node 1       all of them know each other, up to 32 hosts; beyond that each knows node 0
         | \\    / |            and its neighbours in the ring
         |  \\  /  |
         |   \\/   |            each line is a TCP connection over which both ends say once a second
         |   /\\   |            that they are alive
         |  /  \\  |
      node 2 ---- node 3

Silence, a closed connection and a reported failure are failures of the job on all hosts. The guardian that finds one
ends its own ranks and passes the failure on. So a host that is cut off reports the failure itself, and all hosts learn
of a cut between two others.

Each message carries a keyed digest with the job's secret. This keeps out other jobs, port scanners, and everybody who
can send or alter packets. Rank 0 makes the secret; the other hosts get it through the process group or the store of the
job, which encrypt nothing: a reader of their traffic has the secret too. Only a private network protects the secret, as
it protects gradients and exceptions.
"""

from __future__ import annotations

import contextlib
import math
import socket
from collections import Counter
from collections.abc import Callable, Hashable
from functools import partial
from typing import Any

from lightning_multigpu.guardian.failure import Failure, host_name
from lightning_multigpu.guardian.link.protocol import Connection, Message, Seal, accepted, nonce, proof, proves
from lightning_multigpu.guardian.proc import clock_s
from lightning_multigpu.guardian.ranks import Found

ASKING, ASKED = "asking host", "asked host"

_MAX_NAME = 255
_SEND_BUFFER_BYTES = 1 << 18  # a message that does not fit in as a whole would end the connection


class Peer:
    """The guardian of another host, at the other end of a connection.

    Args:
        connection: the connection to it.
        secret: the secret of the job; the other guardian has to prove that it knows it before it is trusted, see
            :mod:`~lightning_multigpu.guardian.link.protocol`.
        now_s: time on this guardian's clock.
        node_rank: its host's node rank, if this guardian has connected to it; None for a stranger that has connected.

    Attributes:
        host: the name of its host.
        where: its address and port for further guardians.
        came_from: the address of a stranger.
        trusted: True once it has proved that it knows the secret.
        received_s: time of its last message.
        paused: True while all ranks of its host are stopped.
        end_key: once its ranks have reached the end of their run, the exception that all have raised, or empty.
        done: True once its ranks have finished, and it may leave.
    """

    def __init__(self, connection: Connection, *, secret: bytes, now_s: float, node_rank: int | None = None) -> None:
        self.connection = connection
        self.node_rank = node_rank
        self.received_s = now_s
        self.host = ""
        self.where = ("", 0)
        self.came_from = ""
        self.trusted = False
        self.paused = False
        self.end_key: str | None = None
        self.done = False
        self._secret = secret
        self._nonce = nonce()
        self._seals: tuple[str, str] | None = None
        with contextlib.suppress(OSError):
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)

    @property
    def name(self) -> str:
        """The name in messages."""
        return node_name(self.node_rank, self.host)

    def challenge(self) -> None:
        """Asked: sends the stranger a challenge to prove that it knows the secret."""
        self.connection.send("challenge", nonce=self._nonce)

    def introduce(self, message: Message, *, node_rank: int, port: int) -> None:
        """Asking: answers the challenge.

        Args:
            message: the challenge.
            node_rank: this host's node rank.
            port: this guardian's port for further guardians.
        """
        if self._seals is not None:
            raise ValueError("it has sent a second challenge")
        theirs = str(message.get("nonce"))
        self._seals = (theirs, self._nonce)
        own = proof(self._secret, f"{ASKING} {node_rank}", theirs)
        self.connection.send("hello", proof=own, nonce=self._nonce, node_rank=node_rank, host=host_name(), port=port)

    def why_not(self, message: Message) -> str:
        """Asked: what is wrong with the stranger's answer; empty, with node rank and host set, if it can be trusted."""
        node_rank, port = message.get("node_rank"), message.get("port")
        if not proves(message, self._secret, f"{ASKING} {node_rank}", self._nonce):
            return "its secret is not this job's"
        if not isinstance(node_rank, int) or not isinstance(port, int) or not 0 <= port < 1 << 16:
            return f"its node rank {node_rank!r:.80} and port {port!r:.80} must be integers, the port below 65536"
        self.node_rank, self.host = node_rank, str(message.get("host"))[:_MAX_NAME]
        self.where = (self.came_from, port)
        return ""

    def welcome(self, message: Message, *, num_nodes: int, others: list[tuple[int, str, str, int]]) -> None:
        """Asked: trusts the stranger, and seals all later messages.

        Args:
            message: its answer.
            num_nodes: hosts of the job.
            others: the guardians that it has to connect to as well: node rank, host name, address and port.
        """
        theirs = str(message.get("nonce"))
        own = proof(self._secret, ASKED, theirs)
        self.connection.send("welcome", proof=own, host=host_name(), num_nodes=num_nodes, others=others)
        self._trust(ASKED, ASKING, (self._nonce, theirs))

    def is_welcomed_by(self, message: Message) -> bool:
        """Asking: whether the other end knows the secret too; all later messages are then sealed."""
        if self._seals is None or not proves(message, self._secret, ASKED, self._nonce):
            return False
        self.host = str(message.get("host"))[:_MAX_NAME]
        self._trust(ASKING, ASKED, self._seals)
        return True

    def _trust(self, own: str, other: str, nonces: tuple[str, str]) -> None:
        self.trusted = True
        self.connection.trust()
        self.connection.seal(outgoing=Seal(self._secret, own, nonces), incoming=Seal(self._secret, other, nonces))


def node_name(node_rank: int | None, host: str) -> str:
    """The name of a host in messages: "node 1 (host gpu7)"."""
    return f"node {node_rank} (host {host})" if host else f"node {node_rank}"


_LONGEST_BEAT_S = 1.0
_ARRIVAL_S = 0.5
_MAX_MESH = 32
_MAX_STRANGERS = 256
_MAX_NODES = 1 << 14


class Hosts:
    """This host's connections to other hosts' guardians.

    Args:
        silence_s: seconds that another host may be silent.
        join_timeout_s: seconds after :meth:`listen` in which the last host has to connect.
        watch: makes the guardian's loop call a function when a socket becomes readable.
        forget: the opposite of ``watch``.
        on_message: called with another host and its message, if the message is not about the connection itself.

    Attributes:
        end_now: the exit status with which the job has to end at once, once another host has sent it; else 0.
    """

    def __init__(
        self,
        *,
        silence_s: float,
        join_timeout_s: float,
        watch: Callable[[socket.socket, Callable[[], None]], None],
        forget: Callable[[socket.socket], None],
        on_message: Callable[[Hashable, Message], None] = lambda host, message: None,
    ) -> None:
        self._silence_s = silence_s
        self._beat_every_s = min(_LONGEST_BEAT_S, silence_s / 4)
        self._join_timeout_s = join_timeout_s
        self._watch, self._forget, self._on_message = watch, forget, on_message
        self._secret = b""
        self._own_rank = 0
        self._num_nodes = 1
        self._on_met: Callable[[], None] = lambda: None
        self._finished = self._paused = False
        self._at_end = self._all_at_end = False
        self.end_now = 0
        self._peers: list[Peer] = []
        self._strangers: list[Peer] = []
        self._listener: socket.socket | None = None  # while hosts have yet to connect
        self._awaited: set[int] = set()  # known node ranks that have yet to connect
        self._since_s = self._now_s = self._beat_s = 0.0
        self._found: Found | None = None

    @property
    def others_wait(self) -> bool:
        """True if another host's ranks may wait for this one's: the host is connected, and its ranks are at work."""
        return any(not (peer.paused or peer.done) for peer in self._known())

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

    def listen(self, listener: socket.socket, *, num_nodes: int, secret: bytes, now_s: float) -> None:
        """On node 0: accepts the other hosts' guardians."""
        self._begin(secret, now_s)
        self._since_s = now_s
        self._expect(num_nodes)
        self._open(listener)

    def join(
        self, sock: socket.socket, *, node_rank: int, secret: bytes, now_s: float, on_met: Callable[[], None]
    ) -> None:
        """On the other nodes: joins through ``sock``, which is connected to node 0's guardian."""
        self._begin(secret, now_s)
        self._own_rank, self._on_met = node_rank, on_met
        with contextlib.suppress(OSError):  # other hosts report that they cannot connect
            self._open(socket.create_server((sock.getsockname()[0], 0), family=sock.family))
        self._ask(Connection(sock), 0, "")

    def restart_timers(self, now_s: float) -> None:
        """Restarts the time of each silence: this guardian was paused, and may have missed messages."""
        for peer in self._peers:
            peer.received_s = now_s

    def observe(self, now_s: float, *, paused: bool) -> Found | None:
        """Sends that this host is alive; returns the failure of another host, if any.

        Args:
            now_s: time on this guardian's clock.
            paused: whether all ranks of this host are stopped.
        """
        self._now_s = now_s
        if now_s - self._beat_s >= self._beat_every_s or paused != self._paused:
            self._beat_s, self._paused = now_s, paused
            for peer in self._known():
                peer.connection.send("alive", paused=paused)
        for stranger in self._strangers[:]:
            if stranger.connection.closed or now_s - stranger.received_s > self._silence_s:
                self._drop(stranger)
        waited_for = [peer for peer in self._peers if not peer.done]
        for peer in waited_for:
            if peer.connection.closed:
                self._drop(peer)
                self._lost(peer)
        if silent := [peer for peer in waited_for if now_s - peer.received_s > self._silence_s]:
            # Hosts that went silent together are named together: this host, or a switch, may be cut off.
            self._silent(
                [peer for peer in waited_for if now_s - peer.received_s > self._silence_s - self._beat_every_s]
            )
            for peer in silent:
                self._drop(peer)
        if self.is_first and self._awaited and now_s - self._since_s > self._join_timeout_s:
            came = ", ".join(peer.name for peer in self._known()) or "none"
            self._find(f"{len(self._awaited)} hosts have not come within {self._join_timeout_s:g} s; there are: {came}")
        found, self._found = self._found, None
        return found

    def send_failure(self, failure: Failure, since_s: float) -> None:
        """Sends a failure, with its age since clocks differ, to all hosts that this one knows."""
        age_s = max(0.0, self._now_s - since_s)
        for peer in self._known():
            peer.connection.send("failure", failure=failure.to_message(), age_s=age_s)

    def send(self, kind: str, *, to: Hashable | None = None, **fields: Any) -> list[Hashable]:
        """Sends to ``to``; by default node 0 sends to all others, and they to node 0. Returns the receivers."""
        peers = [p for p in self._known() if p is to or (to is None and (self.is_first or p.node_rank == 0))]
        for peer in peers:
            peer.connection.send(kind, **fields)
        return list(peers)

    def send_end_now(self, status: int) -> None:
        """Sends to all known hosts that the job has to end at once, with that exit status."""
        for peer in self._known():
            peer.connection.send("end now", status=status)

    def come_to_end(self, key: str = "") -> bool:
        """Called when all ranks of this host have reached the end of their run; True once the ranks of all hosts have.

        It is called again until then. The other hosts report to node 0, which informs them when all have.

        Args:
            key: the exception that all ranks have raised, or empty; the same on all hosts.
        """
        if self.is_first and (self._awaited or not all(peer.end_key == key or peer.done for peer in self._peers)):
            return False
        if not self._at_end:
            self._at_end = True
            if self.is_first:
                self.send("all at end")
            else:
                self.send("at end", key=key)
        return self.is_first or self._all_at_end or not self._peers

    def finish(self) -> None:
        """This host's ranks have finished: its end is no failure from now on; node 0 stays until all hosts have."""
        if not self.is_first and not self._finished:
            for peer in self._known():
                self._finished = True
                peer.connection.send("done")

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
        """Notes a failure, if it is the first."""
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
        self._find(
            f"{self._own_name} has received nothing from {names} for {self._now_s - since_s:.1f} s: a host, its "
            "guardian, or the link between them is down",
            since_s,
        )

    def _cannot_reach(self, peer: Peer, why: str) -> None:
        address, port = peer.where
        at = f" at {address} port {port}" if address else ""
        self._find(
            f"{self._own_name} cannot reach the guardian of {peer.name}{at}{why}; are all ports open between the hosts?"
        )

    @property
    def _own_name(self) -> str:
        return node_name(self._own_rank, host_name())

    # Connections

    def _begin(self, secret: bytes, now_s: float) -> None:
        if self._secret:
            raise ValueError("this guardian knows the other hosts already")
        self._secret, self._now_s = secret, now_s

    def _open(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        self._listener = listener
        self._watch(listener, lambda: self._accept(listener))

    def _close_listener(self) -> None:
        if self._listener is not None:
            self._forget(self._listener)
            self._listener.close()
            self._listener = None

    def _accept(self, listener: socket.socket) -> None:
        for connection in accepted(listener):
            peer = Peer(connection, secret=self._secret, now_s=self._now_s)
            with contextlib.suppress(OSError):  # it may have disconnected
                peer.came_from = connection.socket.getpeername()[0]
            if len(self._strangers) >= _MAX_STRANGERS:
                self._drop(self._stranger_to_drop())
            self._strangers.append(peer)
            self._watch(connection.socket, partial(self._read, peer))
            peer.challenge()

    def _stranger_to_drop(self) -> Peer:
        """The oldest stranger of the address with the most strangers."""
        crowd = Counter(stranger.came_from for stranger in self._strangers).most_common(1)[0][0]
        return next(stranger for stranger in self._strangers if stranger.came_from == crowd)

    def _expect(self, num_nodes: int) -> None:
        """Sets the number of hosts, which node 0 knows."""
        if not 1 <= num_nodes <= _MAX_NODES:
            raise ValueError(f"the job has {num_nodes} hosts; it must be 1 to {_MAX_NODES}")
        self._num_nodes = num_nodes
        near = {0, (self._own_rank - 1) % num_nodes, (self._own_rank + 1) % num_nodes}
        everybody = set(range(num_nodes)) if self.is_first or num_nodes <= _MAX_MESH else near
        self._awaited = everybody - {self._own_rank} - {peer.node_rank for peer in self._peers if peer.trusted}

    def _came(self, peer: Peer) -> None:
        """Notes a trusted guardian; after the last one no other is accepted."""
        if peer.node_rank is not None:
            self._awaited.discard(peer.node_rank)
        if not self._awaited and self._num_nodes > 1:
            self._close_listener()
            for stranger in self._strangers[:]:
                self._drop(stranger)

    def _ask(self, connection: Connection, node_rank: int, host: str, where: tuple[str, int] = ("", 0)) -> None:
        peer = Peer(connection, secret=self._secret, now_s=self._now_s, node_rank=node_rank)
        peer.host, peer.where = host, where
        self._peers.append(peer)
        self._watch(connection.socket, lambda: self._read(peer))

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
            peer.paused = message.get("paused") is True
        elif kind == "failure" and self._found is None:
            if not 0 <= (age_s := float(message["age_s"])) < math.inf:
                raise ValueError(f"a failure is {age_s} s old; it must be 0 or more")
            self._found = Found(Failure.from_message(message.get("failure")), self._now_s - age_s)
        elif kind == "at end":
            peer.end_key = str(message["key"])
        elif kind == "all at end":
            self._all_at_end = True
        elif kind == "end now":
            self.end_now = int(message["status"])
        elif kind == "done":
            peer.done = True
        else:
            self._on_message(peer, message)

    def _introduce(self, peer: Peer, message: Message) -> None:
        """Asking: one step of the handshake; the welcome names the other guardians that this one connects to."""
        kind = message["kind"]
        if kind == "challenge":
            port = 0 if self._listener is None else int(self._listener.getsockname()[1])
            peer.introduce(message, node_rank=self._own_rank, port=port)
        elif kind == "refused":
            self._find(
                f"the guardian of {peer.name} has refused that of {self._own_name}: {message.get('why')!s:.1000}"
            )
        elif kind == "welcome" and peer.is_welcomed_by(message):
            if peer.node_rank == 0:
                self._expect(int(message["num_nodes"]))
            self._came(peer)
            for node_rank, host, address, port in message.get("others") or ():
                family = socket.AF_INET6 if ":" in address else socket.AF_INET
                socket.inet_pton(family, address.partition("%")[0])  # raises for a name: a lookup may take long
                if not isinstance(port, int) or not 0 <= port < 1 << 16:
                    raise ValueError(f"node {node_rank} has the port {port!r:.80}; it must be below 65536")
                sock = socket.socket(family)
                sock.setblocking(False)
                sock.connect_ex((address, port))  # a later read shows the result
                self._ask(Connection(sock), node_rank, host, (address, port))
            if all(other.trusted for other in self._peers):
                self._on_met()
        else:
            raise ValueError(f"it says {kind!r:.80} and does not know the secret: it is another program")

    def _welcome(self, peer: Peer, message: Message) -> None:
        """Asked: handles the stranger's answer."""
        if message["kind"] != "hello":
            raise ValueError(f"a stranger says {message['kind']!r:.80} before hello")
        why = peer.why_not(message)
        if not why and (peer.node_rank == self._own_rank or any(p.node_rank == peer.node_rank for p in self._peers)):
            why = f"there is a node {peer.node_rank} already; give each host a node rank of its own"
        elif not why and self._num_nodes > 1 and peer.node_rank not in self._awaited:
            why = f"node {peer.node_rank} is not awaited here: the job has {self._num_nodes} hosts, from node 0 on"
        if why:
            peer.connection.send("refused", why=why)
            peer.connection.closed = True
            return
        self._strangers.remove(peer)
        others = self._others_for(peer) if self.is_first else []
        peer.welcome(message, num_nodes=self._num_nodes, others=others)
        self._peers.append(peer)
        peer.received_s = self._now_s
        self._came(peer)

    def _others_for(self, newcomer: Peer) -> list[tuple[int, str, str, int]]:
        """On node 0: the connected guardians that the new one has to connect to."""
        assert newcomer.node_rank is not None
        neighbours = {(newcomer.node_rank + step) % self._num_nodes for step in (-1, 1)}
        return [
            (peer.node_rank, peer.host, *peer.where)
            for peer in self._known()
            if peer.node_rank is not None
            and not peer.done
            and (self._num_nodes <= _MAX_MESH or peer.node_rank in neighbours)
        ]
