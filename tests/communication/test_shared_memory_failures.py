"""Shared memory that cannot be had, and ranks that do not come: nobody hangs, and nothing is left."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_multigpu.communication.ring import RingAllReduce
from lightning_multigpu.communication.shared_memory.barrier import ConnectionLostError
from lightning_multigpu.communication.shared_memory.host_all_reduce import SharedMemoryAllReduce
from lightning_multigpu.communication.shared_memory.segment import SharedMemoryUnavailableError
from lightning_multigpu.job.failure_watch import _CONNECTION_LOST
from tests.communication.shared import shared_memory, short_of_memory
from tests.leaks import shared_memory_entries
from tests.world import World, init_group


def _mapped() -> int:
    return Path("/proc/self/maps").read_text().count("lightning_multigpu (deleted)")


def _left() -> tuple[frozenset[str], int, int]:
    with shared_memory() as shared:
        before = shared_memory_entries()
        shared(torch.ones(10))
        names, mapped = shared_memory_entries() - before, _mapped()
        shared.close()
        with pytest.raises(RuntimeError, match="closed"):
            shared(torch.ones(10))
        shared.abort()
        return names, mapped, _mapped()


def test_leaves_neither_memory_nor_names(world2: World) -> None:
    """A descriptor that is left fails any test here."""
    for names, mapped, mapped_after in world2.run(_left):
        assert (mapped, mapped_after) == (1, 0)
        assert not {name for name in names if "multigpu" in name}


@contextmanager
def _no_way_to_others() -> Iterator[None]:
    original = os.open

    def refuse(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).startswith("/proc/"):
            raise PermissionError(13, "Permission denied", path)
        return original(path, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", refuse)
        yield


def _unavailable(spoilt: Callable[[], AbstractContextManager[None]], on_rank: int) -> tuple[str, float, int]:
    init_group()
    group = dist.new_group(backend="gloo")
    tensor = torch.ones(3)
    RingAllReduce(group)(tensor)
    before = len(os.listdir("/proc/self/fd"))
    spoils = spoilt() if dist.get_rank() == on_rank else nullcontext()
    with spoils, pytest.raises(SharedMemoryUnavailableError) as caught:
        SharedMemoryAllReduce(group)
    RingAllReduce(group)(tensor)
    return str(caught.value), float(tensor[0]), len(os.listdir("/proc/self/fd")) - before


@pytest.mark.parametrize(
    ("spoilt", "on_rank", "message"),
    [
        (short_of_memory, 0, "rank 0 of 2 on this host: .*File too large"),
        (_no_way_to_others, 1, "rank 1 of 2 on this host: .*Permission denied"),
    ],
)
def test_all_ranks_do_without_if_one_cannot(
    world2: World, spoilt: Callable[[], AbstractContextManager[None]], on_rank: int, message: str
) -> None:
    for reason, reduced, descriptors in world2.run(_unavailable, spoilt, on_rank):
        assert re.search(message, reason)
        assert (reduced, descriptors) == (4.0, 0)


def _one_leaves() -> str:
    with shared_memory() as shared:
        shared(torch.ones(1))
        if shared.rank == 2:
            return ""
        with pytest.raises(ConnectionLostError) as caught:
            shared(torch.ones(5000))
        return str(caught.value)


def test_a_rank_that_left_is_not_waited_for(world4: World) -> None:
    messages = world4.run(_one_leaves, timeout_s=20)
    assert all("connection closed by rank 2" in messages[rank] for rank in (0, 1, 3))


def _one_raises() -> str:
    with shared_memory() as shared:
        failing = shared.rank == 1
        if failing:
            shared._sum = None  # type: ignore[assignment,method-assign]
        with pytest.raises(TypeError if failing else ConnectionLostError) as caught:
            shared(torch.ones(50_000))
        with pytest.raises(ConnectionLostError, match="aborted"):
            shared(torch.ones(1))
        dist.barrier()
        return str(caught.value)


def test_an_exception_in_the_middle_ends_it_for_all(world2: World) -> None:
    messages = world2.run(_one_raises, timeout_s=20)
    assert "aborted" in messages[0]


def _one_is_late() -> None:
    with shared_memory(timeout_s=0.4) as shared:
        if shared.rank == 0:
            with pytest.raises(ConnectionLostError, match=r"timed out after 0\.4 s of waiting for rank 1") as caught:
                shared(torch.ones(1))
            assert _CONNECTION_LOST.search(str(caught.value)), "else the failure of this rank"
        dist.barrier()


def test_waiting_has_an_end(world2: World) -> None:
    world2.run(_one_is_late, timeout_s=20)


def _signals_while_waiting() -> list[str]:
    events: list[str] = []
    handled = Path("handled")

    def handle(*_: object) -> None:
        events.append("signal")
        handled.touch()

    with shared_memory() as shared:
        before = signal.signal(signal.SIGALRM, handle)
        try:
            if shared.rank == 0:
                signal.setitimer(signal.ITIMER_REAL, 0.1)
            while shared.rank == 1 and not handled.exists():
                time.sleep(0.01)
            shared(torch.ones(1))
            events.append("barrier")
        finally:
            signal.signal(signal.SIGALRM, before)
        shared(torch.ones(1))
        if shared.rank == 0:
            handled.unlink()
        return events


def test_signal_handlers_run_while_a_rank_waits(world2: World) -> None:
    """Rank 1 comes only after rank 0's handler has run: if it could not run, this would hang."""
    assert world2.run(_signals_while_waiting, timeout_s=20) == [["signal", "barrier"], ["barrier"]]
