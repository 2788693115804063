"""The process of a rank: its numbers in the job, and the turns in which it works."""

from __future__ import annotations

import json
import os
import threading
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import parent_process
from typing import Any

import torch
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from lightning_multigpu.bench.jobs.placement import Placement
from lightning_multigpu.communication.interface import interface_towards

DAY = timedelta(days=1)
_LAUNCHERS = ("TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_")
_RANKS = {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK"}


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A rank of a job.

    Args:
        job: the job's name in the store of the bench.
        store_port: where the store of the bench is, at the placement's main address.
        main_port: where the ranks' own store is, ``MASTER_PORT``.
        threads: intra-op threads.
        verbose: what the rank prints goes to standard error, and nowhere otherwise.
    """

    placement: Placement
    local_rank: int = 0
    job: str = ""
    store_port: int = 0
    main_port: int = 0
    threads: int = 1
    verbose: bool = False

    @property
    def rank(self) -> int:
        return self.placement.node_rank * self.placement.devices + self.local_rank

    def store(self) -> Store:
        """A new connection to the keys of the job in the store of the bench."""
        return PrefixStore(self.job, TCPStore(self.placement.main_address, self.store_port, timeout=DAY))


class Turns:
    """The turns of this rank: what the first agent asks for, one after another; between them it sleeps.

    Each is answered once. It is what :meth:`.RankJob.turn` has got, as JSON brings it.
    """

    def __init__(self, seat: Seat) -> None:
        self._rank = seat.rank
        self._number = -1
        self._store = seat.store()

    def __iter__(self) -> Iterator[Any]:
        while (what := self.next()) is not None:
            yield what

    def next(self) -> Any:
        """What is to be done, once the turn has come; None when there is nothing left to do."""
        self._number += 1
        return json.loads(self._store.get(f"turn {self._number}"))

    def answer(self, value: Any) -> None:
        """Ends the turn."""
        self._store.set(f"answer {self._number} {self._rank}", json.dumps(value))


Entry = Callable[[Any, Seat, Turns], None]
"""The main function of a rank: settings, seat, turns. It is a function of a module, since it is sent by name."""


def note_failure(store: Any, kind: int, rank: int, what: str) -> None:
    """Notes that a rank has died (0), has raised an exception (1) or has not answered (2)."""
    store.append("failures", json.dumps([kind, f"rank {rank}: {what}".partition("\n")[0]]) + "\n")


def run_rank(seat: Seat, entry: Entry, settings: Any) -> None:
    """Runs ``entry`` in a process of its own, and ends the process."""
    if not seat.verbose:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    os.dup2(2, 1)
    _set_environment(seat)
    torch.set_num_threads(seat.threads)
    threading.Thread(target=_end_with_agent, name="bench-end", daemon=True).start()
    try:
        entry(settings, seat, Turns(seat))
    except BaseException as error:
        traceback.print_exc()
        note_failure(seat.store(), 1, seat.rank, f"{type(error).__name__}: {error}")
        _end_with_agent()  # which ends this rank; ending now would close connections that others wait in
    os._exit(0)


def _end_with_agent() -> None:
    agent = parent_process()
    assert agent is not None
    agent.join()
    os._exit(1)


def _set_environment(seat: Seat) -> None:
    """Sets the variables of a rank that a user started by hand, without those of launchers."""
    for name in list(os.environ):
        if name in _RANKS or name.startswith(_LAUNCHERS):
            del os.environ[name]
    os.environ.update(
        OMP_NUM_THREADS=str(seat.threads),
        MASTER_ADDR=seat.placement.main_address,
        MASTER_PORT=str(seat.main_port),
        TORCHELASTIC_USE_AGENT_STORE="True",  # the store at MASTER_PORT is there already, as under torchrun
    )
    interface = interface_towards(seat.placement.main_address)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
