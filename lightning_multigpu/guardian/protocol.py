"""Messages of a guardian: one JSON object a line, of bounded length, after both ends have proved that they know the
job's secret.

::

    asked (the guardian, or that of node 0)          asking (a rank, or another guardian)
      challenge  nonce A                   ------>
                                           <------     hello    nonce B, proof(A), who it is
      welcome    proof(B), ...             ------>
      or: refused  why                     ------>

A proof is an HMAC of the role and the other's nonce, so that the secret never travels and no proof serves twice. The
one exception: a rank that could inherit no secret may ask for it before it says hello (``ask``, ``secret``), over the
UNIX socket, where the kernel says to both ends whether the other is a process of the same user.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
from typing import Any

MAX_LINE_BYTES = 128 * 1024
_CHUNK_BYTES = 64 * 1024

Message = dict[str, Any]


class ProtocolError(ValueError):
    """What the other end has sent is not a message, or not one that is allowed now."""


def encode(kind: str, **fields: Any) -> bytes:
    """One message as a line.

    Raises:
        ProtocolError: it is longer than :data:`MAX_LINE_BYTES`.
    """
    line = json.dumps({"kind": kind, **fields}, separators=(",", ":")).encode() + b"\n"
    if len(line) > MAX_LINE_BYTES:
        raise ProtocolError(f"a message {kind!r} has {len(line)} bytes, the limit is {MAX_LINE_BYTES}; shorten it")
    return line


def decode(line: bytes) -> Message:
    """One line as a message.

    Raises:
        ProtocolError: it is no JSON object with a text ``kind``.
    """
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ProtocolError(f"not a message of a guardian: {line[:80]!r}; is the address another program's?")
    return message


def nonce() -> str:
    """Sixteen random bytes, as text."""
    return os.urandom(16).hex()


def proof(secret: bytes, role: str, challenge: str) -> str:
    """What only somebody who knows the secret can answer to ``challenge``; each role has answers of its own."""
    return hmac.new(secret, f"{role}:{challenge}".encode(), "sha256").hexdigest()


def proves(message: Message, secret: bytes, role: str, challenge: str) -> bool:
    """Whether the message carries the right proof."""
    given = message.get("proof")
    return isinstance(given, str) and hmac.compare_digest(given.encode(), proof(secret, role, challenge).encode())


class Connection:
    """Messages over a stream socket that never blocks. File descriptors may come along over a UNIX socket.

    Attributes:
        closed: the other end is gone, or has sent what is no message.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.closed = False
        self._takes_descriptors = sock.family == socket.AF_UNIX
        self._descriptors: list[int] = []
        self._rest = b""

    def fileno(self) -> int:
        return self.socket.fileno()

    def send(self, kind: str, *, descriptors: tuple[int, ...] = (), **fields: Any) -> None:
        """Sends, or closes: who leaves its messages unread for so long that no more fit in is as good as gone."""
        if self.closed:
            return
        line = encode(kind, **fields)
        try:
            if descriptors:
                sent = socket.send_fds(self.socket, [line], list(descriptors))
            else:
                sent = self.socket.send(line, socket.MSG_NOSIGNAL)
        except OSError:
            sent = 0
        if sent != len(line):
            self.closed = True

    def receive(self) -> list[Message]:
        """The messages that have arrived, without waiting for more."""
        messages: list[Message] = []
        while not self.closed:
            try:
                data = self._read()
            except BlockingIOError:
                break
            except OSError:
                data = b""
            if not data:
                self.closed = True
                break
            *lines, self._rest = (self._rest + data).split(b"\n")
            try:
                messages += [decode(line) for line in lines]
            except ProtocolError:
                self.closed = True
            if len(self._rest) > MAX_LINE_BYTES:
                self.closed = True
        return messages

    def take_descriptor(self) -> int | None:
        """The oldest file descriptor that has come along and has not been taken; the caller closes it."""
        return self._descriptors.pop(0) if self._descriptors else None

    def close(self) -> None:
        """Closes the socket and what came along unasked."""
        self.closed = True
        self.socket.close()
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _read(self) -> bytes:
        if not self._takes_descriptors:
            return self.socket.recv(_CHUNK_BYTES)
        data, descriptors, _, _ = socket.recv_fds(self.socket, _CHUNK_BYTES, 4)
        self._descriptors += descriptors
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        return data
