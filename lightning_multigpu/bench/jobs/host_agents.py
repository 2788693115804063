"""Jobs over all hosts: every agent runs the same bench, and starts the ranks of its own host by torchrun's API.

::

    agent 0 -- elastic_launch --> ranks 0, 1 --.          .-- ranks 2, 3 <-- elastic_launch -- agent 1
                                               |          |
                                  their answers, turn by turn, as JSON
                                               v          v
    agent 0 <-- answers of all ranks --------  store  -------- answers of all ranks --> agent 1

Jobs take turns, whose order all processes know from the start. Agents read the same answers, and so make the same
decisions without commands from each other. Where a job has failed, agent 0 ends its turns.
"""

from __future__ import annotations

import contextlib
import json
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from multiprocessing import forkserver
from tempfile import TemporaryDirectory
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lightning_multigpu.bench.jobs import rank_process
from lightning_multigpu.bench.jobs.placement import Placement
from lightning_multigpu.bench.jobs.rank_process import Entry, Seat
from lightning_multigpu.communication.main_store import listening_socket

_JOIN = timedelta(minutes=10)
_MARGIN = timedelta(minutes=1)
_POLL_S = 0.02
_MONITOR_S = 0.2  # many jobs sleep beside the one that is measured
_END_S = 15.0


class JobError(RuntimeError):
    """A job has failed, and its ranks have been ended; the message is one line.

    Attributes:
        kind: "died" where a process ended, "raised" where a rank raised an exception, "late" where the time was up.
        all_ranks: whether all ranks failed in this way.
    """

    def __init__(self, kind: str, all_ranks: bool, reason: str) -> None:
        super().__init__(reason)
        self.kind = kind
        self.all_ranks = all_ranks


class HostAgents:
    """A context manager: this agent's part in the jobs of all hosts. Every agent has to call the same methods.

    Args:
        placement: of this agent.
        threads: intra-op threads of each rank.
        verbose: what ranks print goes to standard error, and nowhere otherwise.
    """

    def __init__(self, placement: Placement, *, threads: int, verbose: bool = False) -> None:
        self.placement = placement
        self._threads = threads
        self._verbose = verbose
        self._jobs: set[RankJob] = set()
        self._shared = self._turns = 0
        self._folder = TemporaryDirectory(prefix="lightning-multigpu-bench-")  # torchrun's agents make files
        if self.prints and not placement.has_store:
            store = _kept_store(placement.main_address, placement.main_port)
        else:
            store = TCPStore(placement.main_address, placement.main_port, is_master=False, timeout=_JOIN)
        self._port = int(store.port)
        self._store = PrefixStore(rank_process.PREFIX, store)

    def __enter__(self) -> HostAgents:
        return self

    def __exit__(self, *_: object) -> None:
        for job in self._jobs:
            self._store.set(rank_process.end_key(job.name), "")
        for job in list(self._jobs):
            job.kill()
        self._folder.cleanup()
        os.environ.pop("TORCHELASTIC_SIGNALS_TO_HANDLE", None)  # torchrun's API has set it
        with contextlib.suppress(Exception):
            self._store.set(f"left/{self.placement.agent}", "")
            if self.prints:  # the store ends with this process
                self._store.wait([f"left/{agent}" for agent in range(self.placement.num_agents)], _MARGIN)

    @property
    def prints(self) -> bool:
        """Whether this agent prints the results; the others are silent."""
        return self.placement.agent == 0

    def check_settings(self, settings: Mapping[str, str]) -> None:
        """Checks that all agents have been started with the same settings.

        Raises:
            ValueError: they have not; the message names the setting.
        """
        for agent, theirs in enumerate(self._share(dict(settings))):
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
        one_process: bool = False,
    ) -> RankJob:
        """Starts a job; its ranks call ``entry(settings, seat, turns)``.

        Args:
            name: of the job.
            entry: the main function of a rank.
            settings: what it is given.
            turns: those of :meth:`turns` in which the job works.
            timeout_s: of a turn; a rank that takes longer is ended, and with it the job.
            start_timeout_s: the same from the start to the first turn.
            devices: ranks of this host, where there is one host, if not all.
            one_process: the first rank of each host drives all devices, and is the only one that is started.
        """
        placement = self.placement
        if devices is not None:
            placement = replace(placement, devices=devices, local_ranks=tuple(range(devices)))
        store = _kept_store(placement.main_address, 0) if self.prints else None
        seat = Seat(
            placement=placement,
            one_process=one_process,
            threads=self._threads,
            store_port=self._port,
            main_port=self._share(store and store.port)[0],
            job=f"{name}-{self._shared}",
            verbose=self._verbose,
            start_timeout_s=start_timeout_s,
            timeout_s=timeout_s,
        )
        job = RankJob(self, seat, (entry, settings, turns), store)
        self._jobs.add(job)
        return job

    def _share(self, value: Any) -> list[Any]:
        """The values of all agents, in their order, as JSON brings them."""
        number, agent = self._shared, self.placement.agent
        self._shared += 1
        self._store.set(f"{number}/{agent}", json.dumps(value))
        self._store.set_timeout(_JOIN)
        return [json.loads(self._store.get(f"{number}/{other}")) for other in range(self.placement.num_agents)]

    def _end_turn(self, turn: int, failure: Any) -> None:
        if self.prints:
            self._store.compare_set(rank_process.turn_key(turn), "", json.dumps(failure))


class RankJob:
    """One job on all hosts; see :meth:`HostAgents.start`."""

    def __init__(self, agents: HostAgents, seat: Seat, arguments: tuple[Any, ...], kept: TCPStore | None) -> None:
        self._agents = agents
        self._store = agents._store
        self.name = seat.job
        self._seat = seat
        self._kept = kept  # the ranks' own store, at MASTER_PORT
        self._failed = f"failed {self.name}"
        # A daemon: an exception in the main thread is not to wait for ranks.
        self._thread = threading.Thread(target=self._run, args=arguments, name="bench-agent", daemon=True)
        self._thread.start()

    def answers(self, turn: int) -> list[Any]:
        """The answer of every rank in a turn, in rank order, as JSON brings it: a tuple comes as a list.

        Raises:
            JobError: a rank has raised, has died or has not answered in time; the job is over.
        """
        while not self._store.check([rank_process.turn_key(turn)]):
            if self._store.check([self._failed]):
                self._agents._end_turn(turn, json.loads(self._store.get(self._failed)))
            time.sleep(_POLL_S)
        failure = json.loads(self._store.get(rank_process.turn_key(turn)))
        if failure is not None:
            self.kill()
            raise JobError(*failure)
        return rank_process.answers(self._store, turn, self._seat.num_processes)

    def end(self) -> None:
        """Waits until the ranks, whose turns are over, have ended; kills those that do not."""
        self._thread.join(_END_S)
        self.kill()

    def kill(self) -> None:
        """Ends the ranks at once."""
        self._store.set(rank_process.end_key(self.name), "")
        self._thread.join(_END_S)
        self._agents._jobs.discard(self)

    def _run(self, entry: Entry, settings: Any, turns: Sequence[tuple[int, Any]]) -> None:
        """Runs the ranks of this host, forked from a server that has imported all they need: that takes some 10 ms."""
        place, seats = self._seat.placement, self._seat.of_agent()
        if not seats:
            return
        config = LaunchConfig(
            min_nodes=self._seat.num_processes // len(seats),
            max_nodes=self._seat.num_processes // len(seats),
            nproc_per_node=len(seats),
            run_id=self.name,
            rdzv_backend="static",
            rdzv_endpoint=f"{place.main_address}:{self._seat.main_port}",
            rdzv_configs={"rank": seats[0].process // len(seats)},
            max_restarts=0,
            monitor_interval=_MONITOR_S,
            start_method="forkserver",
            logs_specs=DefaultLogsSpecs(log_dir=self._agents._folder.name),
        )
        try:
            _start_forkserver([rank_process.__name__, entry.__module__])
            elastic_launch(config, rank_process.run_rank)(entry, settings, turns, seats)
            return  # which no rank does
        except ChildFailedError as error:
            failure = self._failure(*next(iter(error.failures.items())))
        except Exception as error:  # of the store, or of the system, which starts no process
            failure = "died", False, f"{type(error).__name__}: {error}"
        with contextlib.suppress(RuntimeError):  # the store has gone
            self._store.compare_set(self._failed, "", json.dumps(failure))
            self._store.set(rank_process.end_key(self.name), "")  # for the ranks of other hosts

    def _failure(self, rank: int, first: Any) -> tuple[str, bool, str]:
        """A death explains an exception of another rank, and an exception the wait of another."""
        found = rank_process.failures(self._store, self.name)
        if first.exitcode < 0:
            return "died", False, f"rank {rank}: its process was ended by {signal.Signals(-first.exitcode).name}"
        if first.exitcode != 1 or not found:
            return "died", False, f"rank {rank}: its process ended with exit status {first.exitcode}"
        raised = [(rank, what) for rank, what in found if isinstance(what, str)]
        if raised:
            what = raised[0][1]  # the first in time: others may only have followed
            rank = min(rank for rank, other in raised if other == what)
            return "raised", len(raised) == self._seat.num_processes, f"rank {rank}: {what}"
        return "late", len(found) == self._seat.num_processes, f"no answer within {found[0][1]:g} s"


def _kept_store(address: str, port: int) -> TCPStore:
    """A store that this process keeps at one interface; torchrun's agents of this process find it by its port."""
    listener = listening_socket(address, port)
    return TCPStore(
        address,
        port if listener is None else listener.getsockname()[1],
        is_master=True,
        timeout=_JOIN,
        wait_for_workers=False,
        multi_tenant=True,
        master_listen_fd=None if listener is None else listener.detach(),
    )


_starting = threading.Lock()


def _start_forkserver(modules: Sequence[str]) -> None:
    """Python starts it with ``-c``, which puts the working folder before all other folders."""
    with _starting:
        before = os.environ.get("PYTHONSAFEPATH")
        os.environ["PYTHONSAFEPATH"] = "1"
        try:
            multiprocessing.get_context("forkserver").set_forkserver_preload(list(modules))
            forkserver.ensure_running()
        finally:
            del os.environ["PYTHONSAFEPATH"]
            if before is not None:
                os.environ["PYTHONSAFEPATH"] = before
        for name in ("torch.distributed.elastic", "torch.multiprocessing"):  # the results have the failures
            logging.getLogger(name).addHandler(logging.NullHandler())
            logging.getLogger(name).propagate = False
