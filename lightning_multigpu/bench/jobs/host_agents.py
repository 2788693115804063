"""Jobs over all hosts: the first agent leads, the others follow, each with the ranks of its own host.

::

    leader  -- command 7 -->  store  -- command 7 -->  follower
      |                                                   |
      ranks 0, 1                                          ranks 2, 3
      |                                                   |
    leader  <-- answer 7 --   store  <-- answer 7 --   follower
"""

from __future__ import annotations

import base64
import contextlib
import pickle
import random
import socket
from collections.abc import Sequence
from datetime import timedelta
from types import TracebackType
from typing import Any

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from lightning_multigpu.bench.jobs.local_ranks import Entry, Failure, LocalRanks, Seat
from lightning_multigpu.bench.jobs.placement import Placement

_JOIN = timedelta(minutes=10)
_PATIENCE = timedelta(hours=24)
_MARGIN_S = 60.0


class JobError(RuntimeError):
    """A job has failed, and its ranks have been ended.

    Attributes:
        failure: the one that explains the others.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


class Hosts:
    """A context manager: the agents of all hosts, and the jobs that they run.

    Args:
        placement: of this agent.
        threads: intra-op threads of each rank.
        verbose: what ranks print goes to standard error, and nowhere otherwise.
    """

    def __init__(self, placement: Placement, *, threads: int, verbose: bool = False) -> None:
        self.placement = placement
        self._threads = threads
        self._verbose = verbose
        self._jobs: dict[str, LocalRanks] = {}
        self._commands = 0
        is_main = placement.agent == 0 and not placement.has_store
        store = TCPStore(
            placement.main_address, placement.main_port, is_master=is_main, timeout=_JOIN, wait_for_workers=False
        )
        self._port = int(store.port)
        self._store = PrefixStore("lightning-multigpu-bench", store)

    def __enter__(self) -> Hosts:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.leads:
            with contextlib.suppress(Exception):
                self._everywhere("stop", timeout_s=_MARGIN_S)
        self.stop()

    @property
    def leads(self) -> bool:
        """Whether this agent leads; the others :meth:`follow`."""
        return self.placement.agent == 0

    def start(self, name: str, entry: Entry, settings: Any) -> Job:
        """Starts a job; its ranks call ``entry(settings, seat, requests)``."""
        job = f"{name}-{self._commands}"
        self._everywhere("_start", job, entry, settings, self._port, free_port(), timeout_s=_MARGIN_S)
        return Job(self, job)

    def follow(self) -> None:
        """Does what the leader says until it says stop."""
        self._store.set_timeout(_PATIENCE)
        while True:
            number, self._commands = self._commands, self._commands + 1
            action, arguments = _unpacked(self._store.get(f"command/{number}"))
            answer = getattr(self, action)(*arguments)
            self._store.set(f"answer/{number}/{self.placement.agent}", _packed(answer))
            if action == "stop":
                return

    def stop(self) -> None:
        """Ends all jobs of this host."""
        while self._jobs:
            _, ranks = self._jobs.popitem()
            ranks.kill()

    def _everywhere(self, action: str, *arguments: Any, timeout_s: float) -> list[Any]:
        """Runs a method on every agent; its results, in the order of the agents."""
        number, self._commands = self._commands, self._commands + 1
        others = range(1, self.placement.num_agents)
        if others:
            self._store.set(f"command/{number}", _packed((action, arguments)))
        results = [getattr(self, action)(*arguments)]
        self._store.set_timeout(_JOIN if number == 0 else timedelta(seconds=timeout_s + _MARGIN_S))
        for agent in others:
            results.append(_unpacked(self._store.get(f"answer/{number}/{agent}")))
            self._store.delete_key(f"answer/{number}/{agent}")
        return results

    def _start(self, job: str, entry: Entry, settings: Any, store_port: int, main_port: int) -> None:
        seats = [self._seat(local_rank, job, store_port, main_port) for local_rank in self.placement.local_ranks]
        self._jobs[job] = LocalRanks(entry, settings, seats)

    def _seat(self, local_rank: int, job: str, store_port: int, main_port: int) -> Seat:
        placement = self.placement
        return Seat(
            rank=placement.rank(local_rank),
            local_rank=local_rank,
            node_rank=placement.node_rank,
            world_size=placement.world_size,
            devices=placement.devices,
            num_nodes=placement.num_nodes,
            threads=self._threads,
            address=placement.main_address,
            store_port=store_port,
            job=job,
            main_port=main_port,
            verbose=self._verbose,
        )

    def _ask(self, job: str, request: Any, timeout_s: float) -> list[Any] | Failure:
        answer = self._jobs[job].ask(request, timeout_s)
        if isinstance(answer, Failure):
            del self._jobs[job]
        return answer

    def _end(self, job: str, in_order: bool) -> None:
        ranks = self._jobs.pop(job, None)
        if ranks is not None:
            ranks.end() if in_order else ranks.kill()


class Job:
    """One job, as its leader sees it; see :meth:`Hosts.start`."""

    def __init__(self, hosts: Hosts, name: str) -> None:
        self._hosts = hosts
        self._name = name

    def ask(self, request: Any, timeout_s: float) -> list[Any]:
        """The answer of every rank, in rank order.

        Raises:
            JobError: a rank has raised, has died or has not answered within ``timeout_s``; the job is over.
        """
        results = self._hosts._everywhere("_ask", self._name, request, timeout_s, timeout_s=timeout_s)
        failures = [result for result in results if isinstance(result, Failure)]
        if failures:
            self._hosts._everywhere("_end", self._name, False, timeout_s=_MARGIN_S)
            raise JobError(_cause(failures, len(results)))
        return [answer for result in results for answer in result]

    def end(self) -> None:
        """Lets the ranks end in order; kills those that do not."""
        self._hosts._everywhere("_end", self._name, True, timeout_s=_MARGIN_S)


def _cause(failures: Sequence[Failure], num_agents: int) -> Failure:
    """The failure that explains the others: a death before an exception before a wait."""
    first = min(failures, key=lambda failure: ("died", "raised", "late").index(failure.kind))
    alike = [failure for failure in failures if failure.kind == first.kind and failure.all_ranks]
    ranks = tuple(rank for failure in failures if failure.kind == first.kind for rank in failure.ranks)
    return Failure(first.kind, ranks, len(alike) == num_agents, first.reason)


def _packed(value: Any) -> str:
    return base64.b64encode(pickle.dumps(value)).decode()


def _unpacked(text: bytes) -> Any:
    return pickle.loads(base64.b64decode(text))


def free_port() -> int:
    """A TCP port that nobody listens on, below those that the kernel gives to outgoing connections."""
    generator = random.SystemRandom()
    for _ in range(100):
        port = generator.randrange(20000, 32000)
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("", port))
            return port
    raise RuntimeError("no free TCP port between 20000 and 32000 was found in 100 tries; close some")
