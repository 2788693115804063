"""A bench leaves no rank behind; the leak test of all tests cannot tell ranks from the server that forks them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from multiprocessing.context import BaseContext

import psutil
import pytest

from lightning_multigpu.bench.collectives import collective_run
from lightning_multigpu.bench.strategies import strategy_rank


@pytest.fixture(autouse=True)
def _fork_server_of_all_benches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server lives as long as these tests: with the modules of the first bench alone, ranks of the others would
    each import Lightning."""
    of_context = BaseContext.set_forkserver_preload

    def preload(context: BaseContext, modules: Sequence[str]) -> None:
        of_context(context, [*modules, collective_run.__name__, strategy_rank.__name__])

    monkeypatch.setattr(BaseContext, "set_forkserver_preload", preload)


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
