"""Jobs over all hosts: every agent runs the same bench, and starts the ranks of its own host.

::

    agent 0 -- starts --> ranks 0, 1 --.                  .-- ranks 2, 3 <-- starts -- agent 1
                                       |                  |
                                  their answers, turn by turn, as JSON
                                       v                  v
    agent 0 <-- answers of all ranks --------  store  -------- answers of all ranks --> agent 1

Jobs take turns, whose order all processes know from the start. Agents read the same answers, and so make the same
decisions without commands from each other. Where a job has failed, agent 0 ends its turns.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
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

_JOIN = timedelta(minutes=10)
_MARGIN = timedelta(minutes=1)
_POLL_S = 0.02
_GRACE_S = 2.0
_END_S = 15.0


class JobError(RuntimeError):
    """A job has failed, and its ranks have been ended; the message is one line.

    ``status`` is "crashed" where a process ended, "failed" where a rank raised an exception, or "timed out";
    ``all_ranks`` tells whether all failed in this way.
    """

    def __init__(self, status: str, all_ranks: bool, reason: str) -> None:
        super().__init__(reason.partition("\n")[0])
        self.status = status
        self.all_ranks = all_ranks


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
        self._threads = threads
        self._verbose = verbose
        self._jobs: set[RankJob] = set()
        self._shared = self._turns = 0
        if self.prints and not placement.has_store:
            store = _kept_store(placement.main_address, placement.main_port)
        else:
            store = TCPStore(placement.main_address, placement.main_port, is_master=False, timeout=_JOIN)
        self._port = int(store.port)
        self.store = PrefixStore(rank_process.PREFIX, store)

    def __enter__(self) -> HostAgents:
        return self

    def __exit__(self, *_: object) -> None:
        for job in self._jobs:
            self.store.set(rank_process.end_key(job.name), "")
        for job in list(self._jobs):
            job.kill()
        with contextlib.suppress(Exception):
            self.store.set(f"left/{self.placement.agent}", "")
            if self.prints:  # the store ends with this process
                self.store.wait([f"left/{agent}" for agent in range(self.placement.num_agents)], _MARGIN)

    @property
    def prints(self) -> bool:
        """Whether this agent prints the results; the others are silent."""
        return self.placement.agent == 0

    def check_settings(self, settings: Mapping[str, str]) -> None:
        """Checks that all agents have been started with the same settings.

        Raises:
            ValueError: they have not; the message names the setting.
        """
        for agent, theirs in enumerate(self.share(dict(settings))):
            for name, value in settings.items():
                if (other := theirs.get(name)) != value:
                    raise ValueError(f"{name}={value} here, {other} on host {agent}; run the same command on each host")

    def turns(self, whats: Sequence[Any]) -> list[tuple[int, Any]]:
        """Numbers the turns of a bench, in their order; each is then either waited for or skipped, in that order."""
        first = self._turns
        self._turns += len(whats)
        return list(enumerate(whats, first))

    def skip(self, turn: int) -> None:
        """Ends a turn that no job takes."""
        self._end_turn(turn, None)

    def start(
        self,
        name: str,
        entry: Entry,
        settings: Any,
        turns: Sequence[tuple[int, Any]],
        *,
        timeout_s: float,
        start_timeout_s: float,
        devices: int | None = None,
    ) -> RankJob:
        """Starts a job; its ranks call ``entry(settings, seat, turns)``.

        Args:
            turns: those of :meth:`turns` in which the job works.
            timeout_s: of a turn; a rank that takes longer is ended, and with it the job.
            start_timeout_s: the same from the start to the first turn.
            devices: ranks of each host, if not all.
        """
        placement = self.placement
        if devices is not None:
            local_ranks = tuple(rank for rank in placement.local_ranks if rank < devices)
            placement = replace(placement, devices=devices, local_ranks=local_ranks)
        store = _kept_store(placement.main_address, 0) if self.prints else None
        seat = Seat(
            placement=placement,
            threads=self._threads,
            store_port=self._port,
            main_port=self.share(store and store.port)[0],
            job=f"{name}-{self._shared}",
            verbose=self._verbose,
            start_timeout_s=start_timeout_s,
            timeout_s=timeout_s,
        )
        return RankJob(self, seat, entry, settings, turns, store)

    def share(self, value: Any) -> list[Any]:
        """The values of all agents, in their order, as JSON brings them."""
        number, agent = self._shared, self.placement.agent
        self._shared += 1
        self.store.set(f"{number}/{agent}", json.dumps(value))
        self.store.set_timeout(_JOIN)
        return [json.loads(self.store.get(f"{number}/{other}")) for other in range(self.placement.num_agents)]

    def _end_turn(self, turn: int, failure: Any) -> None:
        if self.prints:
            self.store.compare_set(rank_process.turn_key(turn), "", json.dumps(failure))


class RankJob:
    """One job on all hosts; see :meth:`HostAgents.start`."""

    def __init__(
        self, agents: HostAgents, seat: Seat, entry: Entry, settings: Any, turns: Any, kept: TCPStore | None
    ) -> None:
        self._agents = agents
        self.store = agents.store
        self.name = seat.job
        self._seat = seat
        self._kept = kept  # the ranks' own store, at MASTER_PORT
        self._processes: dict[int, BaseProcess] = {}
        agents._jobs.add(self)
        own = seat
        try:
            context = fork_server([rank_process.__name__, entry.__module__, *agents.modules])
            for own in [replace(seat, local_rank=local_rank) for local_rank in seat.placement.local_ranks]:
                process = context.Process(target=rank_process.run_rank, args=(own, entry, settings, turns))
                process.start()  # forked from a server that has imported all it needs: that takes some 10 ms
                self._processes[own.rank] = process
        except Exception as error:  # EOFError where the server may not fork; settings that cannot be sent
            rank_process.note_failure(self.store, self.name, own.rank, "crashed", f"{type(error).__name__}: {error}")

    def answers(self, turn: int) -> list[Any]:
        """The answer of every rank in a turn, in rank order, as JSON brings it: a tuple comes as a list.

        Raises:
            JobError: a rank has raised, has died or has not answered in time; the job is over.
        """
        num_ranks = self._seat.placement.world_size
        first_s = None
        while not self.store.check([rank_process.turn_key(turn)]):
            self._note_deaths(turn)
            if self._agents.prints and (failures := rank_process.failures(self.store, self.name)):
                first_s = first_s or time.monotonic()  # other ranks may be about to fail in the same way
                is_all = len(failures) == num_ranks or any(kind == "crashed" for kind, *_ in failures)
                if is_all or time.monotonic() - first_s > _GRACE_S:
                    self._agents._end_turn(turn, self._verdict(failures))
            time.sleep(_POLL_S)
        failure = json.loads(self.store.get(rank_process.turn_key(turn)))
        if failure is not None:
            self.kill()
            raise JobError(*failure)
        return rank_process.answers(self.store, turn, num_ranks)

    def _note_deaths(self, turn: int) -> None:
        for rank, process in list(self._processes.items()):
            status = process.exitcode
            # Asked in this order: a rank may end once its last turn is over.
            if status is not None and not self.store.check([rank_process.turn_key(turn)]):
                how = (
                    f"was ended by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
                )
                rank_process.note_failure(self.store, self.name, rank, "crashed", f"its process {how}")
                del self._processes[rank]

    def _verdict(self, failures: Sequence[tuple[str, int, str]]) -> tuple[str, bool, str]:
        """A death explains an exception of another rank, and an exception the wait of another."""
        kind = next(kind for kind in ("crashed", "failed", "timed out") if any(kind == each for each, *_ in failures))
        found = [(rank, what) for each, rank, what in failures if each == kind]
        what = found[0][1]  # the first in time: others may only have followed
        rank = min(rank for rank, other in found if other == what)
        of_all = len(found) == self._seat.placement.world_size
        return kind, of_all, what if kind == "timed out" else f"rank {rank}: {what}"

    def end(self) -> None:
        """Waits until the ranks of this host, whose turns are over, have ended; kills those that do not."""
        deadline = time.monotonic() + _END_S
        for process in self._processes.values():
            process.join(max(0.0, deadline - time.monotonic()))
        for process in self._processes.values():
            process.kill()
            process.join()
        self._agents._jobs.discard(self)

    def kill(self) -> None:
        """Ends the ranks of all hosts at once."""
        self.store.set(rank_process.end_key(self.name), "")
        self.end()


def _kept_store(address: str, port: int) -> TCPStore:
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
