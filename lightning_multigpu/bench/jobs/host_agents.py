"""Jobs over all hosts: every agent runs the same bench, and starts the ranks of its own host.

::

    agent 0 -- starts --> ranks 0, 1 --.                  .-- ranks 2, 3 <-- starts -- agent 1
        |                              |                  |
        '- turn by turn: what to do -->|  answers, as JSON |
                                       v                  v
    agent 0 <-- answers of all ranks --------  store  -------- answers of all ranks --> agent 1

Agents read the same answers, and so make the same decisions without commands from each other.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from lightning_multigpu.bench.jobs import rank_process
from lightning_multigpu.bench.jobs.placement import Placement
from lightning_multigpu.bench.jobs.rank_process import Entry, Seat
from lightning_multigpu.communication.main_store import listening_socket
from lightning_multigpu.job.guardian.proc import ended_text

_JOIN = timedelta(minutes=10)
_MARGIN = timedelta(minutes=1)
_POLL_S = 0.01
_GRACE_S = 1.0
_END_S = 15.0


class JobError(RuntimeError):
    """A rank has died, has raised or has not answered, and its job is over; the message is one line."""


class HostAgents:
    """A context manager: this agent's part in the jobs of all hosts. Every agent has to call the same methods.

    Args:
        threads: intra-op threads of each rank.
        verbose: what ranks print goes to standard error, and nowhere otherwise.
        modules: that ranks of later jobs than the first one need; they are imported once, before all ranks are forked.
    """

    def __init__(
        self, placement: Placement, *, threads: int, verbose: bool = False, modules: Sequence[str] = ()
    ) -> None:
        self.placement = placement
        self.modules = modules
        self._jobs: list[RankJob] = []
        self._shared = 0
        if self.prints and not placement.has_store:
            store = kept_store(placement.main_address, placement.main_port)
        else:
            store = TCPStore(placement.main_address, placement.main_port, is_master=False, timeout=_JOIN)
        self.store = PrefixStore("bench", store)
        self._seat = Seat(placement=placement, store_port=int(store.port), threads=threads, verbose=verbose)

    def __enter__(self) -> HostAgents:
        return self

    def __exit__(self, *_: object) -> None:
        for job in self._jobs:
            job.kill()
        with contextlib.suppress(Exception):
            self.store.set(f"left/{self.placement.agent}", "")
            if self.prints:  # the store ends with this process
                self.store.wait([f"left/{agent}" for agent in range(self.placement.num_agents)], _MARGIN)

    @property
    def prints(self) -> bool:
        """Whether this agent prints the results; the others are silent."""
        return self.placement.agent == 0

    def share(self, value: Any) -> list[Any]:
        """The values of all agents, in their order, as JSON brings them."""
        number, agent = self._shared, self.placement.agent
        self._shared += 1
        self.store.set(f"{number}/{agent}", json.dumps(value))
        return [json.loads(self.store.get(f"{number}/{other}")) for other in range(self.placement.num_agents)]

    def check_command(self, command: str) -> None:
        """Raises ``ValueError`` where this agent was started with another command than the first one."""
        if (first := self.share(command)[0]) != command:
            raise ValueError(f"'{command}' here, '{first}' on the first host; run the same command on each host")

    def start(
        self, entry: Entry, settings: Any, *, timeout_s: float, start_timeout_s: float = 0.0, devices: int | None = None
    ) -> RankJob:
        """Starts a job; its ranks call ``entry(settings, seat, turns)``.

        Args:
            timeout_s: of a turn; where a rank takes longer, the job ends.
            start_timeout_s: further seconds of the first turn.
            devices: ranks of each host, if not all.
        """
        placement = self.placement
        if devices is not None:
            local_ranks = tuple(rank for rank in placement.local_ranks if rank < devices)
            placement = replace(placement, devices=devices, local_ranks=local_ranks)
        seat = replace(self._seat, placement=placement, job=f"bench job {len(self._jobs)}")
        job = RankJob(seat, [rank_process.__name__, entry.__module__, *self.modules], timeout_s, start_timeout_s)
        self._jobs.append(job)
        job.start(entry, settings)
        return job


class RankJob:
    """One job on all hosts; see :meth:`HostAgents.start`."""

    def __init__(self, seat: Seat, modules: Sequence[str], timeout_s: float, start_timeout_s: float) -> None:
        self._context = fork_server(modules)
        self._timeout_s, self._more_s = timeout_s, start_timeout_s
        self._number = 0
        self._num_ranks = seat.placement.world_size
        self._processes: dict[int, BaseProcess] = {}
        self._store = seat.store()
        self._leads = seat.placement.agent == 0
        if self._leads:
            self._kept = kept_store(seat.placement.main_address, 0)  # the ranks' own store
            self._store.set("main port", str(self._kept.port))
        self._seat = replace(seat, main_port=int(self._store.get("main port")))

    def start(self, entry: Entry, settings: Any) -> None:
        """Starts the ranks of this host; one that cannot be started counts as one that has died."""
        own = self._seat
        try:
            for local_rank in self._seat.placement.local_ranks:
                own = replace(own, local_rank=local_rank)
                process = self._context.Process(target=rank_process.run_rank, args=(own, entry, settings))
                process.start()  # forked from a server that has imported all it needs: that takes some 10 ms
                self._processes[own.rank] = process
        except Exception as error:  # EOFError where the server may not fork; settings that cannot be sent
            rank_process.note_failure(self._store, 0, own.rank, f"{type(error).__name__}: {error}")

    def turn(self, what: Any) -> list[Any]:
        """Asks all ranks for ``what`` JSON can write; returns their answers in rank order, as JSON brings them.

        Raises:
            JobError: a rank has raised, has died or has not answered in time; the job is over.
        """
        answers = [f"answer {self._number} {rank}" for rank in range(self._num_ranks)]
        self._ask(what)
        limit_s = self._timeout_s + self._more_s
        until_s, self._more_s = time.monotonic() + limit_s, 0.0
        while not self._store.check(answers):
            if time.monotonic() > until_s and not self._store.check(["failures"]):
                late = next(rank for rank, answer in enumerate(answers) if not self._store.check([answer]))
                rank_process.note_failure(self._store, 2, late, f"no answer within {limit_s:g} s")
            if self._note_deaths() or self._store.check(["failures"]):
                time.sleep(_GRACE_S)  # a death explains another rank's exception, and that the wait of a third
                self._note_deaths()
                self.kill()
                failures = [json.loads(line) for line in self._store.get("failures").splitlines()]
                raise JobError(min(failures, key=lambda failure: failure[0])[1])  # the first in time of a kind
            time.sleep(_POLL_S)
        return [json.loads(self._store.get(answer)) for answer in answers]

    def end(self) -> None:
        """Lets the ranks end; kills those of this host that do not."""
        self._ask(None)
        until_s = time.monotonic() + _END_S
        for process in self._processes.values():
            process.join(max(0.0, until_s - time.monotonic()))
        self.kill()

    def kill(self) -> None:
        """Ends the ranks of this host at once."""
        for process in self._processes.values():
            process.kill()
        for process in self._processes.values():
            process.join()
        self._processes.clear()

    def _ask(self, what: Any) -> None:
        if self._leads:
            self._store.set(f"turn {self._number}", json.dumps(what))
        self._number += 1

    def _note_deaths(self) -> bool:
        dead = {rank: each.exitcode for rank, each in self._processes.items() if each.exitcode is not None}
        for rank, status in dead.items():
            rank_process.note_failure(self._store, 0, rank, f"its process {ended_text(status)}")
            del self._processes[rank]
        return bool(dead)


def kept_store(address: str, port: int) -> TCPStore:
    """A store that this process keeps at one interface."""
    listener = listening_socket(address, port)
    return TCPStore(
        address,
        port if listener is None else listener.getsockname()[1],
        is_master=True,
        timeout=_JOIN,
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )


_starting = threading.Lock()


def fork_server(modules: Sequence[str]) -> ForkServerContext:
    """Starts the server. Python starts it with ``-c``, which puts the working folder before all other folders."""
    context = multiprocessing.get_context("forkserver")
    with _starting:
        before = os.environ.get("PYTHONSAFEPATH")
        os.environ["PYTHONSAFEPATH"] = "1"
        try:
            context.set_forkserver_preload(list(modules))
            forkserver.ensure_running()
        finally:
            del os.environ["PYTHONSAFEPATH"]
            if before is not None:
                os.environ["PYTHONSAFEPATH"] = before
    return context
