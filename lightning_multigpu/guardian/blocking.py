"""Work that a file system, or a pipe that nobody reads, may keep for ever: the guardian's loop does not wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable


def done_within(limit_s: float, work: Callable[[], None]) -> bool:
    """Does the work in a thread; False if it has not ended after ``limit_s``. The thread then goes on with it."""
    thread = threading.Thread(target=work, name="guardian-may-block", daemon=True)
    thread.start()
    thread.join(limit_s)
    return not thread.is_alive()
