"""Messages of a guardian: one JSON object a line, of bounded length.

::

    asking: a rank, perhaps of another host   asked: the guardian, or that of node 0
      hello      who it is             ------>
                                       <------     welcome
                                                   or: refused  why

Another host also sends the job's secret. Over a UNIX socket both ends ask the kernel for the other's process: see
:func:`foreign`.
"""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterator
from typing import Any

MAX_LINE_BYTES = 128 * 1024
_CHUNK_BYTES = 64 * 1024
INTERRUPTED_STATUS = 130  # of a job that a second Ctrl-C has ended
_MAX_DESCRIPTORS = 4
_MAX_ACCEPTED = 64

Message = dict[str, Any]


class ProtocolError(ValueError):
    """The other end has sent something other than a message, or a message that is not allowed now."""


def encode(kind: str, **fields: Any) -> bytes:
    """One message as a line; ProtocolError if it is longer than :data:`MAX_LINE_BYTES`."""
    text = json.dumps({"kind": kind, **fields}, separators=(",", ":"), ensure_ascii=False)
    line = text.encode(errors="surrogatepass") + b"\n"  # of file names that are not UTF-8; json.loads takes it
    if len(line) > MAX_LINE_BYTES:
        raise ProtocolError(f"a message {kind!r} has {len(line)} bytes, the limit is {MAX_LINE_BYTES}; shorten it")
    return line


def decode(line: bytes) -> Message:
    """One line as a message; ProtocolError if it is no JSON object with a text ``kind``."""
    try:
        message = json.loads(line)
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict) or not isinstance(message.get("kind"), str):
        raise ProtocolError(f"not a message of a guardian: {line[:80]!r}; is the address another program's?")
    return message


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Process and user at the other end of a UNIX socket when it was connected, from the kernel."""
    layout = "3i"
    pid, user, _ = struct.unpack(
        layout, sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(layout))
    )
    return pid, user


def foreign(sock: socket.socket) -> str:
    """The reason why the process at the other end of a UNIX socket cannot be of the same job; empty if it can."""
    pid, user = peer_of(sock)
    if user != os.getuid():
        return f"a process of user {user}, and not of user {os.getuid()}"
    # With host networking, containers share UNIX addresses.
    return "" if pid else "a process of another container (PID namespace)"


class Connection:
    """Messages over a non-blocking stream socket. A UNIX socket may also carry file descriptors.

    Once ``closed``, the other end has ended, or has sent something other than a message; ``why`` has the reason, empty
    if it has just closed it.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.socket = sock
        self.closed = False
        self.why = ""
        self._descriptors: list[int] = []
        self._data = b""

    def send(self, kind: str, *, descriptors: tuple[int, ...] = (), **fields: Any) -> None:
        """Sends; closes the connection if its buffer is full, because the other end does not read."""
        if self.closed:
            return
        line = encode(kind, **fields)
        try:
            if descriptors:
                sent = socket.send_fds(self.socket, [line], list(descriptors))
            else:
                sent = self.socket.send(line, socket.MSG_NOSIGNAL)
        except BlockingIOError:
            sent = 0
        except OSError:  # earlier messages of the other end, and its end, can still be read
            return
        if sent != len(line):
            self._close("it does not read what it is sent")

    def arriving(self) -> Iterator[Message]:
        """The messages that have arrived; none comes after one that has closed the connection."""
        while not self.closed:
            line, end, rest = self._data.partition(b"\n")
            if len(line) > MAX_LINE_BYTES:
                self._close(f"a message is longer than {MAX_LINE_BYTES} bytes")
            elif end:
                self._data = rest
                try:
                    message = decode(line)
                except ProtocolError as error:
                    return self._close(str(error))
                yield message
            elif not self._read():
                return

    def take_descriptor(self) -> int:
        """The oldest received descriptor that was not taken; the caller closes it. ProtocolError if none has come."""
        if not self._descriptors:
            raise ProtocolError("a message came without its file descriptor: see `ulimit -n`")
        return self._descriptors.pop(0)

    def close(self) -> None:
        """Closes the socket and the received file descriptors."""
        self.closed = True
        self.socket.close()
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _close(self, why: str) -> None:
        self.closed, self.why = True, why

    def _read(self) -> bool:
        """Reads what has arrived; False if nothing has."""
        descriptors: list[int] = []
        try:
            if self.socket.family == socket.AF_UNIX:
                data, descriptors, _, _ = socket.recv_fds(self.socket, _CHUNK_BYTES, _MAX_DESCRIPTORS)
            else:
                data = self.socket.recv(_CHUNK_BYTES)
        except BlockingIOError:
            return False
        except OSError as error:
            self._close(error.strerror or str(error))
            return False
        for descriptor in descriptors:
            os.set_inheritable(descriptor, False)
        self._descriptors += descriptors
        self._data += data
        self.closed |= not data
        return bool(data)


def accepted(listener: socket.socket) -> Iterator[socket.socket]:
    """The sockets of those that have connected, at most 64 at a time, so that the loop goes on."""
    for _ in range(_MAX_ACCEPTED):
        try:
            sock, _ = listener.accept()
        except ConnectionError:  # it has disconnected
            continue
        except OSError:  # nobody is there, or no descriptor is left
            return
        yield sock
