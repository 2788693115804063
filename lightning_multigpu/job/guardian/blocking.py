"""Work that may block for ever in a file system or a full pipe, so that the guardian's loop does not wait for it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


def done_within(limit_s: float, work: Callable[[], None]) -> bool:
    """Does the work in a thread; False if it has not ended after ``limit_s``, or cannot begin."""
    thread = threading.Thread(target=work, name="guardian-may-block", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no more threads are allowed: pids.max of the container
        return False
    thread.join(limit_s)
    return not thread.is_alive()


def no_link(path: str, flags: int) -> int:
    """Opens a file for writing; refuses a symbolic link."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)
