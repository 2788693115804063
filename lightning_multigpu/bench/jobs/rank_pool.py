"""The ranks of one job on this host: started, asked, and ended whatever they do."""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, Literal

from lightning_multigpu.bench.jobs.rank_process import Entry, Seat, end_request, run_rank

_GRACE_S = 2.0
_END_S = 15.0
_KILL_S = 5.0


@dataclass(frozen=True)
class Failure:
    """Why ranks gave no answer.

    Args:
        kind: they raised an exception, their processes ended, or their time was up.
        ranks: those of which that is so.
        all_ranks: it is so of every rank of this host.
        reason: in one line.
    """

    kind: Literal["raised", "died", "late"]
    ranks: tuple[int, ...]
    all_ranks: bool
    reason: str


class LocalRanks:
    """Processes of this host that run ``entry``.

    They are forked from a server that has imported all they need, and that has never joined a process group: starting
    one takes some 10 ms, so that those that have failed can be replaced.
    """

    def __init__(self, entry: Entry, settings: Any, seats: Sequence[Seat]) -> None:
        self._seats = list(seats)
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, entry.__module__])
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

    def ask(self, request: Any, timeout_s: float) -> list[Any] | Failure:
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
                connection.send(end_request())
        deadline = time.monotonic() + _END_S
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Ends the ranks at once; nothing of them is left."""
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

    def _failure(self, answers: dict[int, tuple[str, Any]], timeout_s: float) -> Failure:
        for kind in ("died", "raised"):
            failed = {index: value for index, (word, value) in answers.items() if word == kind}
            if failed:
                ranks = tuple(self._seats[index].rank for index in sorted(failed))
                reason = next(iter(failed.values()))  # the first in time: others may only have followed
                first = self._seats[min(index for index in failed if failed[index] == reason)].rank
                return Failure(kind, ranks, len(ranks) == len(self._seats), f"rank {first}: {reason}")
        late = tuple(seat.rank for index, seat in enumerate(self._seats) if index not in answers)
        return Failure("late", late, len(late) == len(self._seats), f"no answer within {timeout_s:g} s")


def _ended(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"its process was ended by {signal.Signals(-exitcode).name}"
    return f"its process ended with exit status {exitcode}"
