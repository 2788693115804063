"""A real ENOMEM at a fork, without a machine whose memory is full."""

from __future__ import annotations

import ctypes
import os

_CLONE_NEWPID = 0x20000000
_fork = os.fork


def without_memory() -> None:
    """Lets the kernel refuse with ENOMEM what the calling thread starts from here on. Needs root.

    It does so for processes of a PID namespace whose first process has ended.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWPID):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    first = _fork()
    if not first:
        os._exit(0)
    os.waitpid(first, 0)
