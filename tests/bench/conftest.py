"""A bench leaves no rank behind; the leak test of all tests cannot tell ranks from the server that forks them."""

from __future__ import annotations

import time
from collections.abc import Iterator

import psutil
import pytest


@pytest.fixture(autouse=True)
def _no_rank_is_left() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 5
    while (left := ranks()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def ranks() -> list[psutil.Process]:
    """Processes that the fork server of this process has started."""
    return [
        rank
        for server in psutil.Process().children()
        if server.status() != psutil.STATUS_ZOMBIE and "multiprocessing.forkserver" in " ".join(server.cmdline())
        for rank in server.children()
        if rank.status() != psutil.STATUS_ZOMBIE
    ]
