"""The ranks of a job on one host: their processes are started, asked in turn, and ended in any case."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from queue import SimpleQueue
from typing import Any, Literal

import torch

from lightning_multigpu.bench.jobs.placement import Placement
from lightning_multigpu.communication.interface import interface_towards

_LAUNCHERS = ("TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_")
_RANKS = {"RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK"}
_END = "end"
_LINGER_S = 10.0
_GRACE_S = 2.0
_END_S = 15.0
_KILL_S = 5.0


@dataclass(frozen=True, kw_only=True)
class Seat:
    """The place of a rank.

    Args:
        placement: the ranks of the job.
        local_rank: of this process.
        threads: intra-op threads.
        store_port: where torch's store for the bench is.
        job: names what this job keeps in the store.
        main_port: a port of the first host that the job may take, ``MASTER_PORT``.
        verbose: what ranks print goes to standard error, and nowhere otherwise.
    """

    placement: Placement
    local_rank: int
    threads: int
    store_port: int
    job: str
    main_port: int
    verbose: bool

    @property
    def rank(self) -> int:
        """Of this process, among all ranks of the job."""
        return self.placement.rank(self.local_rank)


class Requests:
    """The requests to this rank, one after another; each needs one answer.

    Without a request the rank sleeps. When the process that asks has ended, this process ends at once.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._queue: SimpleQueue[Any] = SimpleQueue()
        threading.Thread(target=self._receive, name="bench-requests", daemon=True).start()

    def __iter__(self) -> Iterator[Any]:
        while (request := self.next()) is not None:
            yield request

    def next(self) -> Any:
        """The next request, or None when there is nothing left to do."""
        request = self._queue.get()
        return None if isinstance(request, str) and request == _END else request

    def answer(self, value: Any) -> None:
        """Answers the request before, by what JSON can write."""
        self._connection.send(("answer", value))

    def _receive(self) -> None:
        while True:
            try:
                self._queue.put(self._connection.recv())
            except (EOFError, OSError):
                os._exit(1)


Entry = Callable[[Any, Seat, Requests], None]
"""The main function of a rank: settings, seat, requests. It is a function of a module, since it is sent by name."""


@dataclass(frozen=True)
class RankFailure:
    """The reason why ranks gave no answer.

    Args:
        kind: they raised an exception, their processes ended, or their time was up.
        ranks: the ranks that failed in this way.
        all_ranks: whether all ranks of this host did.
        reason: in one line.
    """

    kind: Literal["raised", "died", "late"]
    ranks: tuple[int, ...]
    all_ranks: bool
    reason: str


class LocalRanks:
    """Processes of this host that run ``entry``.

    They are forked from a server that has imported all they need and has never joined a process group: starting one
    takes some 10 ms, so that failed ranks can be replaced.
    """

    def __init__(self, entry: Entry, settings: Any, seats: Sequence[Seat]) -> None:
        self._seats = list(seats)
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, entry.__module__])
        _start_forkserver()
        try:
            for seat in self._seats:
                ours, theirs = context.Pipe()
                self._connections.append(ours)
                with contextlib.closing(theirs):
                    process = context.Process(target=run_rank, args=(entry, settings, seat, theirs), daemon=True)
                    process.start()
                self._processes.append(process)
        except BaseException:
            self.kill()
            raise

    def ask(self, request: Any, timeout_s: float) -> list[Any] | RankFailure:
        """The answer of every rank, in order; upon the first failure all ranks are killed, and that is the answer."""
        for connection in self._connections:
            with contextlib.suppress(OSError):  # a rank that has died is found below
                connection.send(request)
        answers: dict[int, tuple[str, Any]] = {}
        deadline = time.monotonic() + timeout_s
        while missing := [index for index in range(len(self._seats)) if index not in answers]:
            watched = {w: i for i in missing for w in (self._connections[i], self._processes[i].sentinel)}
            ready = {watched[event] for event in wait(list(watched), max(0.0, deadline - time.monotonic()))}
            if not ready:
                break
            for index in ready:
                answers[index] = self._receive(index)
                if answers[index][0] != "answer":
                    # Do the others fail alike, or do they wait for this one?
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        if len(answers) == len(self._seats) and all(word == "answer" for word, _ in answers.values()):
            return [answers[index][1] for index in range(len(self._seats))]
        failure = self._failure(answers, timeout_s)
        self.kill()
        return failure

    def end(self) -> None:
        """Lets the ranks end in order, and kills those that do not."""
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(_END)
        deadline = time.monotonic() + _END_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Ends the ranks at once."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join(_KILL_S)
            process.close()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []

    def _receive(self, index: int) -> tuple[str, Any]:
        try:
            if self._connections[index].poll():
                word, value = self._connections[index].recv()
                return ("died", "ended before it had answered") if word == "ended" else (word, value)
        except (EOFError, OSError):
            pass
        self._processes[index].join(_GRACE_S)
        return "died", _ended(self._processes[index].exitcode)

    def _failure(self, answers: dict[int, tuple[str, Any]], timeout_s: float) -> RankFailure:
        for kind in ("died", "raised"):
            failed = {index: value for index, (word, value) in answers.items() if word == kind}
            if failed:
                ranks = tuple(self._seats[index].rank for index in sorted(failed))
                reason = next(iter(failed.values()))  # the first in time: others may only have followed
                first = self._seats[min(index for index in failed if failed[index] == reason)].rank
                return RankFailure(kind, ranks, len(ranks) == len(self._seats), f"rank {first}: {reason}")
        late = tuple(seat.rank for index, seat in enumerate(self._seats) if index not in answers)
        return RankFailure("late", late, len(late) == len(self._seats), f"no answer within {timeout_s:g} s")


_starting = threading.Lock()


def _start_forkserver() -> None:
    """Python starts it with ``-c``, which puts the working folder before all other folders."""
    with _starting:
        before = os.environ.get("PYTHONSAFEPATH")
        os.environ["PYTHONSAFEPATH"] = "1"
        try:
            forkserver.ensure_running()
        finally:
            del os.environ["PYTHONSAFEPATH"]
            if before is not None:
                os.environ["PYTHONSAFEPATH"] = before


def _ended(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"its process was ended by {signal.Signals(-exitcode).name}"
    return f"its process ended with exit status {exitcode}"


def run_rank(entry: Entry, settings: Any, seat: Seat, connection: Connection) -> None:
    """Runs ``entry`` in the process of a rank; an exception becomes the last answer."""
    _redirect(seat.verbose)
    _set_environment(seat)
    torch.set_num_threads(seat.threads)
    try:
        entry(settings, seat, Requests(connection))
    except BaseException as error:
        traceback.print_exc()
        connection.send(("raised", f"{type(error).__name__}: {error}"))
        # Ending now would close connections that others wait in: they would seem to have failed by themselves.
        time.sleep(_LINGER_S)
        sys.exit(1)
    connection.send(("ended", None))


def _redirect(verbose: bool) -> None:
    if not verbose:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 2)
        os.close(nowhere)
    os.dup2(2, 1)


def _set_environment(seat: Seat) -> None:
    """Sets the variables of a rank that a user started by hand, without those of the bench's launcher."""
    for name in list(os.environ):
        if name in _RANKS or name.startswith(_LAUNCHERS):
            del os.environ[name]
    os.environ["OMP_NUM_THREADS"] = str(seat.threads)
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = seat.placement.main_address, str(seat.main_port)
    interface = interface_towards(seat.placement.main_address)
    if interface is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
