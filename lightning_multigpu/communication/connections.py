"""The TCP connections under process groups, which can be cut after a failure.

Aborting or destroying a gloo group does not wake a thread that waits in a collective; only the end of a connection
does. So the connections that a group opens are noted by their kernel names and shut down when the job has failed:
threads of this process that wait in them get an error, and so do the ranks at the other end.

Meanwhile other threads of the process may open connections too, a logger's for example. A back end makes its sockets in
C++, so a socket that a Python object holds is never cut.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator

_DESCRIPTORS = "/proc/self/fd"
_CUT_AGAIN_S = 0.5
_TCP = (socket.AF_INET, socket.AF_INET6)
_NUM_PROBES = 127  # the kernel's most: who asks decides when a connection has ended
_TCP_INFO = struct.Struct("2xBB52xI")  # linux/tcp.h, struct tcp_info: tcpi_retransmits, _probes and _last_ack_recv


class Connections:
    """The sockets that are opened within :meth:`noted`; none on systems without ``/proc``."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._before: list[set[str]] = []
        self._probed_s: dict[str, float] = {}  # since when, by name

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Notes the connections that this process opens within the block; :meth:`cut` already works within it."""
        self._before.append(set(_sockets().values()))
        try:
            yield
        finally:
            self._names |= set(_sockets().values()) - self._before.pop()

    def note(self, *connections: socket.socket) -> None:
        """Notes connections for :meth:`cut_silent`; :meth:`cut` leaves a Python object's connection alone."""
        found = _sockets()
        self._names |= {found[connection.fileno()] for connection in connections if connection.fileno() in found}

    @contextlib.contextmanager
    def cut_after(self, timeout_s: float) -> Iterator[None]:
        """After ``timeout_s`` cuts the connections that the block opens, again and again, since back ends reconnect.

        After the block only the connections of :meth:`noted` can be cut: the failed rank is yet to be reported.
        """
        over = threading.Event()

        def cut() -> None:
            pause_s = timeout_s
            while not over.wait(pause_s):
                self.cut()
                pause_s = _CUT_AGAIN_S

        thread = threading.Thread(target=cut, name="cut-connections", daemon=True)
        self._before.append(set(_sockets().values()))
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            self._before.pop()

    def cut(self, *, except_port: int | None = None) -> int:
        """Shuts the noted connections down, but those from or to a port that stays; returns how many there were."""
        cut = 0
        before = self._before[0] if self._before else None
        noted = {
            descriptor: name
            for descriptor, name in _sockets().items()
            if name in self._names or (before is not None and name not in before)
        }
        # By type(), since isinstance would evaluate proxy objects of other libraries.
        owned = {each.fileno() for each in gc.get_objects() if issubclass(type(each), socket.socket)} if noted else ()
        for descriptor in noted.keys() - owned:
            with contextlib.suppress(OSError), _borrowed(descriptor, noted[descriptor]) as connection:
                is_tcp = connection.family in _TCP
                if is_tcp and except_port not in (connection.getsockname()[1], connection.getpeername()[1]):
                    connection.shutdown(socket.SHUT_RDWR)
                    cut += 1
        return cut

    def cut_silent(self, limit_s: float) -> None:
        """Shuts down the connections that :meth:`silent` finds; to be called every second or so."""
        for found, *_ in self.silent(limit_s):
            with contextlib.suppress(OSError), _borrowed(*found) as connection:
                connection.shutdown(socket.SHUT_RDWR)

    def silent(self, limit_s: float) -> list[tuple[tuple[int, str], str, float]]:
        """Finds noted TCP connections whose other machine does not answer; to be called twice a second or so.

        The kernels of both machines answer each other even while the processes are busy or stopped. The kernel's
        probes, which this turns on, ask once a second while no data is under way; data under way is sent again and
        again. The kernel's limit for data under way (``TCP_USER_TIMEOUT``) would also end a connection whose other
        process does not read.

        Args:
            limit_s: how long the other machine may be silent, 1 or more.

        Returns:
            Of each: the descriptor and the kernel's name, the address of the other machine, and the seconds since its
            last answer.
        """
        found, now_s, probed = [], time.monotonic(), self._probed_s
        self._probed_s = {}
        for descriptor, name in _sockets().items() if hasattr(socket, "TCP_INFO") else ():
            if name in self._names:
                # Before the first probe the last answer may be old.
                since_s = self._probed_s[name] = probed.get(name, now_s)
                with contextlib.suppress(OSError), _borrowed(descriptor, name) as connection:
                    silent_s = min(_silent_s(connection, probes=name not in probed), now_s - since_s)
                    if silent_s > limit_s:
                        found.append(((descriptor, name), str(connection.getpeername()[0]), silent_s))
        return found


def _silent_s(connection: socket.socket, *, probes: bool) -> float:
    """Seconds since the last answer, if one is overdue; turns the kernel's probes on."""
    if connection.family not in _TCP:
        return 0.0
    if probes:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _NUM_PROBES)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    num_sent_again, num_probes, last_answer_ms = _TCP_INFO.unpack(
        connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    )
    return last_answer_ms / 1e3 if num_sent_again or num_probes else 0.0


@contextlib.contextmanager
def _borrowed(descriptor: int, name: str) -> Iterator[socket.socket]:
    """A socket for a descriptor that stays open; OSError if it is no longer that of the socket with the kernel's name.

    Its number may have gone to a connection that another thread has opened since the descriptors were listed.
    """
    if os.readlink(f"{_DESCRIPTORS}/{descriptor}") != name:
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    connection = socket.socket(fileno=descriptor)  # no duplicate: there may be no descriptor left for one
    try:
        yield connection
    finally:
        connection.detach()


def _sockets() -> dict[int, str]:
    """Open sockets of this process: descriptor -> the kernel's name, which no two open sockets share."""
    found: dict[int, str] = {}
    with contextlib.suppress(OSError):  # no such folder, or no descriptor left to list it
        for entry in os.listdir(_DESCRIPTORS):
            with contextlib.suppress(OSError):
                target = os.readlink(f"{_DESCRIPTORS}/{entry}")
                if target.startswith("socket:"):
                    found[int(entry)] = target
    return found
