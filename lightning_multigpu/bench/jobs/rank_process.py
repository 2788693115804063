"""The process of a rank: its numbers in the job, and the turns in which it works."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from lightning_multigpu.bench.jobs.placement import Placement
from lightning_multigpu.communication.interface import interface_towards

PREFIX = "lightning-multigpu-bench"
"""Of all keys in the store of the bench."""
_DAY = timedelta(days=1)
_LAUNCHERS = ("TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_")
_RANKS = {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK"}


@dataclass(frozen=True, kw_only=True)
class Seat:
    """A rank of a job.

    Args:
        local_rank: of this process.
        threads: intra-op threads.
        store_port: where the store of the bench is, at the placement's main address.
        main_port: where the ranks' own store is, ``MASTER_PORT``.
        job: the job's name in the store of the bench.
        verbose: what ranks print goes to standard error, and nowhere otherwise.
        start_timeout_s: from the start to the first turn.
        timeout_s: of a turn.
    """

    placement: Placement
    local_rank: int = 0
    threads: int = 1
    store_port: int = 0
    main_port: int = 0
    job: str = ""
    verbose: bool = False
    start_timeout_s: float = 60.0
    timeout_s: float = 60.0

    @property
    def rank(self) -> int:
        return self.placement.rank(self.local_rank)

    def store(self) -> Store:
        """A new connection to the store of the bench."""
        return PrefixStore(PREFIX, TCPStore(self.placement.main_address, self.store_port, timeout=_DAY))


class Turns:
    """The turns of this rank, one after another; between them it sleeps. Each needs one answer.

    A turn begins when the turn before it, of whichever job, is over. It is over when all ranks have answered. A rank
    whose time is up says so, with the stacks of its threads on standard error. ``turns`` are the job's own: the number
    among all turns, and what is to be done.
    """

    def __init__(self, seat: Seat, turns: Sequence[tuple[int, Any]]) -> None:
        self._seat = seat
        self._left = list(turns)
        self._number = -1
        self._is_late = False
        self._store = seat.store()
        self._limit(seat.start_timeout_s)

    def __iter__(self) -> Iterator[Any]:
        while (what := self.next()) is not None:
            yield what

    def next(self) -> Any:
        """What is to be done in the next turn, once it has come; None when there is nothing left to do."""
        self._timer.cancel()
        if not self._left:
            return None
        self._number, what = self._left.pop(0)
        if self._number:
            self._store.wait([turn_key(self._number - 1)], _DAY)
        self._limit(self._seat.timeout_s)
        return what

    def answer(self, value: Any) -> list[Any]:
        """Ends the turn; returns the answers of all ranks, as JSON brings them."""
        if self._is_late:
            _end_when_asked(self._seat)
        self._store.set(f"answer {self._number} {self._seat.rank}", json.dumps(value))
        found = answers(self._store, self._number, self._seat.placement.world_size)
        self._store.compare_set(turn_key(self._number), "", "null")
        return found

    def _limit(self, seconds: float) -> None:
        self._timer = threading.Timer(seconds, self._give_up, (seconds,))
        self._timer.daemon = True
        self._timer.start()

    def _give_up(self, seconds: float) -> None:
        self._is_late = True
        faulthandler.dump_traceback(all_threads=True)
        store = self._seat.store()  # the other connection is busy while the rank waits for answers
        note_failure(store, self._seat.job, self._seat.rank, "timed out", f"no answer within {seconds:g} s")


Entry = Callable[[Any, Seat, Turns], None]
"""The main function of a rank: settings, seat, turns. It is a function of a module, since it is sent by name."""


def turn_key(number: int) -> str:
    """Set when the turn is over: to null, or to the arguments of the :class:`.JobError` that has ended it."""
    return f"turn {number}"


def end_key(job: str) -> str:
    """Set when all processes of the job are to end at once."""
    return f"end {job}"


def answers(store: Store, turn: int, num_ranks: int) -> list[Any]:
    """The answers of all ranks in a turn, in their order."""
    return [json.loads(store.get(f"answer {turn} {rank}")) for rank in range(num_ranks)]


def note_failure(store: Any, job: str, rank: int, kind: str, what: str) -> None:
    """Notes the failure of a rank; ``kind`` is a status of :class:`.JobError`."""
    store.append(f"failures {job}", json.dumps([kind, rank, what]) + "\n")


def failures(store: Store, job: str) -> list[tuple[str, int, str]]:
    """The failures of the ranks of a job in the order of time: kind, rank and what happened."""
    lines = store.get(f"failures {job}").splitlines() if store.check([f"failures {job}"]) else []
    return [json.loads(line) for line in lines]


def run_rank(seat: Seat, entry: Entry, settings: Any, turns: Sequence[tuple[int, Any]]) -> None:
    """Runs ``entry`` in a process of its own, and ends the process."""
    if not seat.verbose:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)
    os.dup2(2, 1)
    _set_environment(seat)
    torch.set_num_threads(seat.threads)
    threading.Thread(target=_end_when_asked, args=(seat,), name="bench-end", daemon=True).start()
    try:
        entry(settings, seat, Turns(seat, turns))
    except BaseException as error:
        traceback.print_exc()
        note_failure(seat.store(), seat.job, seat.rank, "failed", f"{type(error).__name__}: {error}")
        _end_when_asked(seat)  # ending now would close connections that others wait in
    os._exit(0)


def _end_when_asked(seat: Seat) -> None:
    with contextlib.suppress(RuntimeError):  # the store has gone, and with it the command that has started this process
        seat.store().wait([end_key(seat.job)], _DAY)
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
