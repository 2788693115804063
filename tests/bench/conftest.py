"""A bench leaves no rank behind; the leak test of all tests cannot tell ranks from the server that forks them."""

import multiprocessing.util
import time
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

from tests import preforked


@pytest.fixture(autouse=True)
def _server_with_lightning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server of multiprocessing, which lives as long as these tests, is a fork that has imported Lightning."""
    start = multiprocessing.util.spawnv_passfds

    def forked(path: Any, arguments: Any, descriptors: Any) -> int:
        return (preforked.spawn if "forkserver" in arguments[-1] else start)(path, arguments, descriptors)

    monkeypatch.setattr(multiprocessing.util, "spawnv_passfds", forked)


@pytest.fixture(autouse=True)
def _no_rank_is_left() -> Iterator[None]:
    yield
    deadline = time.monotonic() + 5
    while (left := ranks()) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def ranks() -> list[psutil.Process]:
    """Processes that the fork server of this process has started: they have its command line."""
    return [
        rank
        for server in psutil.Process().children()
        if server.status() != psutil.STATUS_ZOMBIE and "multiprocessing.forkserver" in " ".join(server.cmdline())
        for rank in server.children()
        if rank.status() != psutil.STATUS_ZOMBIE and rank.cmdline() == server.cmdline()
    ]
