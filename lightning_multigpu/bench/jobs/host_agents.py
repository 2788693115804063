"""Jobs over all hosts: every agent runs the same bench with the ranks of its own host.

::

    agent 0  -- answers of ranks 0, 1 -->  store  <-- answers of ranks 2, 3 --  agent 1
    agent 0  <--------- answers of all ranks, in rank order, as JSON --------->  agent 1

All agents get the same answers, and so make the same decisions without commands from each other.
"""

from __future__ import annotations

import contextlib
import json
import random
import socket
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import timedelta
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from lightning_multigpu.bench.jobs.local_ranks import Entry, LocalRanks, RankFailure, Seat
from lightning_multigpu.bench.jobs.placement import Placement
from lightning_multigpu.communication.main_store import listening_socket

_JOIN = timedelta(minutes=10)
_MARGIN = timedelta(minutes=1)


class JobError(RuntimeError):
    """A job has failed, and its ranks have been ended.

    Attributes:
        failure: the one that explains the others.
    """

    def __init__(self, failure: RankFailure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


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
        self._shared = 0
        is_master = placement.agent == 0 and not placement.has_store
        listener = listening_socket(placement.main_address, placement.main_port) if is_master else None
        store = TCPStore(
            placement.main_address,
            placement.main_port if listener is None else listener.getsockname()[1],
            is_master=is_master,
            timeout=_JOIN,
            wait_for_workers=False,
            master_listen_fd=None if listener is None else listener.detach(),
        )
        self._port = int(store.port)
        self._store = PrefixStore("lightning-multigpu-bench", store)

    def __enter__(self) -> HostAgents:
        return self

    def __exit__(self, *_: object) -> None:
        while self._jobs:
            self._jobs.pop().kill()
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
        for agent, theirs in enumerate(self._share(dict(settings), _JOIN)):
            for name, value in settings.items():
                if (other := theirs.get(name)) != value:
                    raise ValueError(f"{name}={value} here, {other} on host {agent}; run the same command on each host")

    def start(self, name: str, entry: Entry, settings: Any, *, one_process: bool = False) -> RankJob:
        """Starts a job; its ranks call ``entry(settings, seat, requests)``.

        Args:
            name: of the job.
            entry: the main function of a rank.
            settings: what it is given.
            one_process: the first rank of each host drives all devices, and is the only one that is started.
        """
        main_port = self._share(free_port(), _MARGIN)[0]
        job_name = f"{name}-{self._shared}"
        local_ranks = [*self.placement.local_ranks][: 1 if one_process else None]
        seats = [self._seat(local_rank, job_name, main_port) for local_rank in local_ranks]
        job = RankJob(self, LocalRanks(entry, settings, seats))
        self._jobs.add(job)
        return job

    def _share(self, value: Any, timeout: timedelta) -> list[Any]:
        """The values of all agents, in their order, as JSON brings them."""
        number, agent = self._shared, self.placement.agent
        self._shared += 1
        self._store.set(f"{number}/{agent}", json.dumps(value))
        values = []
        self._store.set_timeout(timeout)
        for other in range(self.placement.num_agents):
            values.append(json.loads(self._store.get(f"{number}/{other}")))
        if number:
            self._store.delete_key(f"{number - 1}/{agent}")  # all have read it: they have shared the next value
        return values

    def _seat(self, local_rank: int, job: str, main_port: int) -> Seat:
        return Seat(
            placement=self.placement,
            local_rank=local_rank,
            threads=self._threads,
            store_port=self._port,
            job=job,
            main_port=main_port,
            verbose=self._verbose,
        )


class RankJob:
    """One job on all hosts; see :meth:`Hosts.start`."""

    def __init__(self, hosts: HostAgents, ranks: LocalRanks) -> None:
        self._hosts = hosts
        self._ranks = ranks

    def ask(self, request: Any, timeout_s: float) -> list[Any]:
        """The answer of every rank, in rank order, as JSON brings it: a tuple comes as a list.

        Raises:
            JobError: a rank has raised, has died or has not answered within ``timeout_s``; the job is over.
        """
        answer = self._ranks.ask(request, timeout_s)
        own = {"failure": asdict(answer)} if isinstance(answer, RankFailure) else {"answers": answer}
        shared = self._hosts._share(own, timedelta(seconds=timeout_s) + _MARGIN)
        failures = [RankFailure(**each["failure"]) for each in shared if "failure" in each]
        if failures:
            self.kill()
            raise JobError(_cause(failures, len(shared)))
        return [answer for each in shared for answer in each["answers"]]

    def end(self) -> None:
        """Lets the ranks end in order; kills those that do not."""
        self._ranks.end()
        self._hosts._jobs.discard(self)

    def kill(self) -> None:
        """Ends the ranks at once."""
        self._ranks.kill()
        self._hosts._jobs.discard(self)


def _cause(failures: Sequence[RankFailure], num_agents: int) -> RankFailure:
    """The failure that explains the others: a death before an exception before a wait."""
    first = min(failures, key=lambda failure: ("died", "raised", "late").index(failure.kind))
    alike = [failure for failure in failures if failure.kind == first.kind and failure.all_ranks]
    ranks = tuple(rank for failure in failures if failure.kind == first.kind for rank in failure.ranks)
    return RankFailure(first.kind, ranks, len(alike) == num_agents, first.reason)


def free_port() -> int:
    """A free TCP port, below the range that the kernel gives to outgoing connections."""
    generator = random.SystemRandom()
    for _ in range(100):
        port = generator.randrange(20000, 32000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("", port))
            return port
    raise RuntimeError("no free TCP port between 20000 and 32000 was found in 100 tries; close some")
