"""The guardian of another host, at the other end of a connection."""

from __future__ import annotations

import contextlib
import socket

from lightning_multigpu.guardian.failure import host_name
from lightning_multigpu.guardian.link.protocol import Connection, Message, Seal, nonce, proof, proves

ASKING, ASKED = "asking host", "asked host"

_SEND_BUFFER_BYTES = 1 << 18  # a message that does not fit in as a whole would end the connection


class Peer:
    """What is known of it.

    Args:
        connection: to it.
        secret: of the job; what it says is believed once it has proved to know that too, see
            :mod:`~lightning_multigpu.guardian.link.protocol`.
        now_s: on this guardian's clock.
        node_rank: of its host where that is known, because this guardian has connected to it; None for a stranger that
            has connected to this one.

    Attributes:
        host: the name of its host.
        where: address and port at which it can be reached by third ones.
        trusted: it has proved that it knows the secret.
        heard_s: when it has last said anything.
        paused: all ranks of its host are stopped.
        at_end: its ranks have come to the end of their run.
        done: its ranks have finished, and it may leave.
    """

    def __init__(self, connection: Connection, *, secret: bytes, now_s: float, node_rank: int | None = None) -> None:
        self.connection = connection
        self.node_rank = node_rank
        self.heard_s = now_s
        self.host = ""
        self.where = ("", 0)
        self.trusted = False
        self.paused = False
        self.at_end = False
        self.done = False
        self._secret = secret
        self._nonce = nonce()
        with contextlib.suppress(OSError):
            connection.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER_BYTES)

    @property
    def name(self) -> str:
        """As messages call it."""
        return node_name(self.node_rank, self.host)

    def challenge(self) -> None:
        """Asked: lets the stranger prove that it knows the secret."""
        self.connection.send("challenge", nonce=self._nonce)

    def introduce(self, message: Message, *, node_rank: int, port: int) -> None:
        """Asking: answers the challenge.

        Args:
            message: the challenge.
            node_rank: of this host.
            port: where this guardian listens for further ones.
        """
        theirs = str(message.get("nonce"))
        self._seals = (theirs, self._nonce)
        own = proof(self._secret, f"{ASKING} {node_rank}", theirs)
        self.connection.send("hello", proof=own, nonce=self._nonce, node_rank=node_rank, host=host_name(), port=port)

    def why_not(self, message: Message) -> str:
        """Asked: what is wrong with the stranger's answer; empty if it can be trusted, and then says who it is."""
        node_rank, port = message.get("node_rank"), message.get("port")
        if not proves(message, self._secret, f"{ASKING} {node_rank}", self._nonce):
            return "its secret is not this job's"
        if not isinstance(node_rank, int) or not isinstance(port, int):
            return f"its node rank {node_rank!r:.80} and port {port!r:.80} must be integers"
        self.node_rank, self.host = node_rank, str(message.get("host"))
        self.where = (self.connection.socket.getpeername()[0], port)
        return ""

    def welcome(self, message: Message, *, others: list[tuple[int, str, str, int]]) -> None:
        """Asked: trusts the stranger, and seals what is said from here on.

        Args:
            message: its answer.
            others: the guardians that it has to connect to as well: node rank, host name, address and port.
        """
        theirs = str(message.get("nonce"))
        own = proof(self._secret, ASKED, theirs)
        self.connection.send("welcome", proof=own, host=host_name(), others=others)
        self._trust(ASKED, ASKING, (self._nonce, theirs))

    def is_welcomed_by(self, message: Message) -> bool:
        """Asking: whether the other end knows the secret too; what is said from here on is then sealed."""
        if not proves(message, self._secret, ASKED, self._nonce):
            return False
        self.host = str(message.get("host"))
        self._trust(ASKING, ASKED, self._seals)
        return True

    def _trust(self, own: str, other: str, nonces: tuple[str, str]) -> None:
        self.trusted = True
        self.connection.seal(outgoing=Seal(self._secret, own, nonces), incoming=Seal(self._secret, other, nonces))


def node_name(node_rank: int | None, host: str) -> str:
    """A host as messages call it: "node 1 (host gpu7)"."""
    return f"node {node_rank} (host {host})" if host else f"node {node_rank}"
