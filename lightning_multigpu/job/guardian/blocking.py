"""Work that may block for ever in a file system or a terminal, so that the guardian's loop does not wait for it."""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections.abc import Callable

_PIPE_BUF = 4096  # bytes that a pipe takes at once if it is ready; other files may block
_LIMIT_S = 0.5


def done_within(limit_s: float, work: Callable[[], None], *, otherwise: Callable[[], None] = lambda: None) -> bool:
    """Does the work in a thread; False if it has not ended after ``limit_s``, or cannot begin: then ``otherwise``."""
    thread = threading.Thread(target=work, name="guardian-may-block", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no more threads are allowed: pids.max of the container
        otherwise()
        return False
    thread.join(limit_s)
    return not thread.is_alive()


def print_text(text: str, *, limit_s: float = _LIMIT_S) -> None:
    """Prints on standard error; gives up what takes no more text after ``limit_s``."""

    def write() -> None:
        rest, until_s = text.encode(errors="replace"), time.monotonic() + limit_s
        with contextlib.suppress(OSError, ValueError):  # it may be closed
            while rest and select.select([], [2], [], max(0.0, until_s - time.monotonic()))[1]:
                rest = rest[os.write(2, rest[:_PIPE_BUF]) :]

    done_within(limit_s, write, otherwise=write)
