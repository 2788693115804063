"""Processes as the kernel sees them."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import struct
import time
from typing import NamedTuple

RUNNING, STOPPED, ENDED = "running", "stopped", "ended"

# From include/uapi/linux/pidfd.h: the ioctl PIDFD_GET_INFO (Linux 6.13) and its flag PIDFD_INFO_EXIT (Linux 6.15).
_PIDFD_GET_INFO = 0xC040FF0B
_PIDFD_INFO_EXIT = 1 << 3
_PIDFD_INFO_BYTES = 64


class Stat(NamedTuple):
    """Fields of /proc/PID/stat; ``start_ticks`` differs between two processes that have had the same pid."""

    state: str
    start_ticks: int
    wait_status: int


def parse_stat(text: str) -> Stat:
    """Parses the line of /proc/PID/stat; the name in parentheses may contain spaces and parentheses."""
    fields = text[text.rindex(")") + 1 :].split()
    return Stat(state=fields[0], start_ticks=int(fields[19]), wait_status=int(fields[49]))


def read_stat(pid: int) -> Stat | None:
    """The kernel's view of a process, or None if there is none; OSError if there is no descriptor or memory now."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as file:
            return parse_stat(file.read())
    except (FileNotFoundError, ProcessLookupError):
        return None


class WatchedProcess:
    """A process that is not a child of this one; ProcessLookupError if it has ended.

    ``pidfd`` is readable once the process has ended; None before Linux 5.3.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        stat = read_stat(pid)
        if stat is None:
            raise ProcessLookupError(f"no process has the pid {pid}")
        self._last: Stat = stat
        self._start_ticks = stat.start_ticks
        self._wait_status: int | None = None
        try:
            self.pidfd: int | None = os.pidfd_open(pid)
        except ProcessLookupError:
            raise
        except (AttributeError, OSError):
            self.pidfd = None

    def state(self) -> str:
        """:data:`RUNNING`, :data:`STOPPED` or :data:`ENDED`; while the kernel cannot say, what it was before.

        A process that a debugger holds counts as running: somebody looks at it. A zombie has ended.
        """
        stat = self._stat()
        if stat is None:
            return ENDED
        if stat.state in "ZX":
            self._wait_status = stat.wait_status
            return ENDED
        return STOPPED if stat.state == "T" else RUNNING

    def exit_code(self) -> int | None:
        """The exit status of an ended process, or the negative number of the signal that ended it; None if unknown."""
        if self.state() != ENDED:
            return None
        status = self._collected_status() if self._wait_status is None else self._wait_status
        return None if status is None else os.waitstatus_to_exitcode(status)

    def kill(self) -> None:
        """Ends this process, unless it has ended already, and no later one with its pid."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self.pidfd is not None:
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            elif self._stat() is not None:
                os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        if self.pidfd is not None:
            os.close(self.pidfd)
            self.pidfd = None

    def _stat(self) -> Stat | None:
        try:
            stat = read_stat(self.pid)
        except OSError:
            return self._last
        if stat is None or stat.start_ticks != self._start_ticks:
            return None
        self._last = stat
        return stat

    def _collected_status(self) -> int | None:
        """The wait status that Linux 6.15 keeps with a pidfd after the parent, such as a shell, has collected it."""
        if self.pidfd is None:
            return None
        buffer = bytearray(struct.pack("Q", _PIDFD_INFO_EXIT).ljust(_PIDFD_INFO_BYTES, b"\0"))
        try:
            fcntl.ioctl(self.pidfd, _PIDFD_GET_INFO, buffer)
        except OSError:
            return None
        (mask,) = struct.unpack_from("Q", buffer)
        (status,) = struct.unpack_from("i", buffer, _PIDFD_INFO_BYTES - 4)
        return int(status) if mask & _PIDFD_INFO_EXIT else None


def clock_s() -> float:
    """Time that goes on while the machine sleeps, so that a pause of this process shows as a jump; it cannot be set."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def ended_text(exit_code: int | None) -> str:
    """The predicate of a sentence about a process that has ended."""
    if exit_code is None:
        return "ended with an unknown exit status (its parent has collected it)"
    if exit_code >= 0:
        return f"ended with exit status {exit_code}"
    names = {each.value: each.name for each in signal.Signals}
    return f"was ended by {names.get(-exit_code, f'signal {-exit_code}')}"
