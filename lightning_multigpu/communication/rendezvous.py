"""The rendezvous of ranks before there is a process group.

Every rank writes a note into the store of rank 0, and reads the other ranks' notes until all are there. So an error
names the missing rank and its host, where a back end would only wait::

    rank 0               rank 1               rank 2
    opens the store
    checks in      --->  checks in      --->  checks in         "rank 1, host b, pid 4, this is what I have"
    reads all            reads all            reads all         again and again, until there are as many as ranks
       |                    |                    |
       +------- all agree: init_process_group ---+              or: the first rank that sees a problem writes the
       verdict
"""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, NamedTuple

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from lightning_multigpu.communication.digest import disagreement, rank_list

_FIRST_POLL_S, _SHORTEST_POLL_S, _LONGEST_POLL_S = 0.005, 0.02, 0.5
_SETTLE_S = 3.0
QUIET_S = 10.0  # of a wait, before a line says who waits for whom
_TICKETS, _VERDICT, _READ = "tickets", "verdict", "read"


class RendezvousError(RuntimeError):
    """The ranks cannot join; the message names the ranks that came, the missing ones, and what to check."""


class Limit(NamedTuple):
    """The time by which all ranks have to come, on the monotonic clock, and the user's limit, for messages.

    ``check`` is called while a rank waits; it raises if the job has failed.
    """

    deadline_s: float
    timeout_s: float
    check: Callable[[], object]

    def tell(self, rank: int, what: str) -> None:
        """Prints for what a rank waits, and for how long it will at most."""
        left_s = max(0.0, self.deadline_s - time.monotonic())
        line = f"rank {rank} on {own_host()} {what}; {left_s:.0f} s are left (join_timeout_s)"
        print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Arrival:
    """One rank's note.

    Attributes:
        rank: the global rank that it claims.
        host, node_rank, pid: its host and process. Hosts may share a name, but not a node rank.
        world_size: the number of ranks that it expects.
        table: name -> value of settings that must be equal on all ranks.
        address: its host's source address towards the main address; empty if unknown.
        offer: what else it gives the others, as JSON has it.
    """

    rank: int
    host: str
    node_rank: int
    pid: int
    world_size: int
    table: dict[str, str] = field(default_factory=dict)
    address: str = ""
    offer: Any = None

    @classmethod
    def from_note(cls, note: bytes) -> Arrival:
        """Reads a note from the store; raises ValueError, TypeError or RecursionError if no rank has written it."""
        found = cls(**json.loads(note))
        kinds = [*map(type, (found.rank, found.node_rank, found.pid, found.world_size, found.host, found.table))]
        if kinds != [int, int, int, int, str, dict] or not all(type(each) is str for each in found.table.values()):
            raise ValueError(f"its values are {found!r:.200}")
        return found

    def name(self) -> str:
        return f"rank {self.rank} (host {self.host}, node {self.node_rank}, pid {self.pid})"


class Rendezvous:
    """The notes of one attempt to join.

    Args:
        store: connected to every rank; rank 0's process may keep it.
        attempt: the attempt's name, the same on all ranks; no earlier attempt in the store had it.
    """

    def __init__(self, store: Store, own: Arrival, limit: Limit, *, attempt: str) -> None:
        self._store = PrefixStore(f"lightning-multigpu/{attempt}", store)
        self._own = own
        self._limit = limit
        self._ticket = 0
        self._arrivals: dict[int, Arrival] = {}  # by ticket

    @property
    def group_store(self) -> Store:
        """A store for the process group, without keys of other attempts."""
        return PrefixStore("group", self._store)

    def check_in(self) -> None:
        """Writes this rank's note."""

        def write() -> None:
            self._ticket = self._store.add(_TICKETS, 1) - 1
            self._store.set(_note(self._ticket), json.dumps(asdict(self._own)))

        self._guard(write)

    def withdraw(self) -> None:
        """Deletes this rank's note, which all have read."""
        self._guard(lambda: self._store.delete_key(_note(self._ticket)))

    def wait_for(self, *ranks: int) -> list[Arrival]:
        """Waits until these ranks, by default all, have checked in; returns their notes in the order of ranks.

        Raises:
            RendezvousError: not all come in time, two claim to be the same rank, tables differ, or the store has ended.
        """
        # All ranks together read 50 times a second: fast for two ranks, and not too much for the store with hundreds.
        longest_s = min(_LONGEST_POLL_S, _SHORTEST_POLL_S * self._own.world_size)
        pause_s, tell_s = _FIRST_POLL_S, time.monotonic() + QUIET_S
        while True:
            problem = self._guard(self._look)  # raises the verdict of another rank
            self._limit.check()
            missing = self._missing()
            if problem is None and not missing & set(ranks or missing):
                wanted = [each for each in self._arrivals.values() if not ranks or each.rank in ranks]
                return sorted(wanted, key=lambda arrival: arrival.rank)
            if problem is None and time.monotonic() > self._limit.deadline_s:
                problem = self._who_is_missing()
            if problem is not None:
                self._conclude(problem)
            if self._own.rank == 0 and time.monotonic() > tell_s:
                tell_s = float("inf")
                self._limit.tell(0, f"waits for {rank_list(missing)} of {self._own.world_size}")
            time.sleep(pause_s)
            pause_s = min(longest_s, 1.5 * pause_s)

    def _look(self) -> str | None:
        """Reads new notes; returns the problem that keeps the ranks from joining, or None."""
        self._raise_verdict()
        for ticket in range(self._store.add(_TICKETS, 0)):
            if ticket not in self._arrivals and self._store.check([_note(ticket)]):
                try:
                    self._arrivals[ticket] = Arrival.from_note(self._store.get(_note(ticket)))
                except (ValueError, TypeError, RecursionError) as error:
                    return (
                        f"{self._own.name()} cannot read a note in the store of rank 0 ({error}): it is of another "
                        "version, or another program's. Install the same version on all hosts, and set another "
                        "MASTER_PORT for each job"
                    )
        return conflict(list(self._arrivals.values()))

    def _conclude(self, problem: str) -> None:
        """Raises, on all ranks, the problem that the first rank has found."""

        def settle() -> None:
            self._store.compare_set(_VERDICT, "", problem)
            self._raise_verdict()

        self._guard(settle)

    def _raise_verdict(self) -> None:
        """Raises the verdict, if any, once all ranks have read it: an earlier end would cause other errors."""
        if not self._store.check([_VERDICT]):
            return
        verdict = self._store.get(_VERDICT).decode()
        self._store.add(_READ, 1)
        deadline_s = time.monotonic() + _SETTLE_S
        with contextlib.suppress(RuntimeError):  # the store's process may have ended
            while time.monotonic() < deadline_s and self._store.add(_READ, 0) < self._store.add(_TICKETS, 0):
                time.sleep(_SHORTEST_POLL_S)
        raise RendezvousError(verdict)

    def _guard(self, work: Callable[[], Any]) -> Any:
        """Runs work on the store. If the store has ended, the guardian may report the cause within seconds."""
        try:
            return work()
        except RendezvousError:
            raise
        except RuntimeError as error:
            deadline_s = time.monotonic() + _SETTLE_S
            while time.monotonic() < deadline_s:
                self._limit.check()
                time.sleep(_SHORTEST_POLL_S)
            if self._missing() and time.monotonic() > self._limit.deadline_s:
                raise RendezvousError(self._who_is_missing()) from error
            raise RendezvousError(
                f"{self._own.name()} has lost the connection to the store of rank 0 while joining; rank 0 has ended, "
                "or the network to its host is down. Its own output says more"
            ) from error

    def _missing(self) -> set[int]:
        return set(range(self._own.world_size)) - {arrival.rank for arrival in self._arrivals.values()}

    def _who_is_missing(self) -> str:
        arrivals = sorted(self._arrivals.values(), key=lambda arrival: arrival.rank)
        came = ", ".join(arrival.name() for arrival in arrivals) or "nobody"
        return (
            f"{rank_list(self._missing())} of {self._own.world_size} did not come within {self._limit.timeout_s:g} s "
            f"(join_timeout_s). There are: {came}. See what the missing ranks say, whether they were started at all, "
            "and whether MASTER_ADDR and MASTER_PORT are the same for all"
        )


def conflict(arrivals: list[Arrival]) -> str | None:
    """The problem that keeps ranks from joining, or None.

    A problem is a rank out of range, two processes that claim one rank, or tables that differ.
    """
    by_rank: dict[int, Arrival] = {}
    for arrival in arrivals:
        if not 0 <= arrival.rank < arrival.world_size:
            return (
                f"{arrival.name()} is out of range: of {arrival.world_size} ranks, the last is "
                f"{arrival.world_size - 1}; check RANK, NODE_RANK and LOCAL_RANK there"
            )
        other = by_rank.setdefault(arrival.rank, arrival)
        if other is not arrival:
            return (
                f"two processes claim to be rank {arrival.rank}: {other.name()} and {arrival.name()}; set another "
                "NODE_RANK on each host, and another LOCAL_RANK (or RANK) in each of its processes"
            )
    tables = {rank: {"world size": str(a.world_size), **a.table} for rank, a in by_rank.items()}
    found = disagreement(tables, "are not set up alike")
    if found is None:
        return None
    return f"{found}\nGive all of them the same script, arguments, configuration and versions"


def own_host() -> str:
    """The name of this host."""
    return socket.gethostname()


def _note(ticket: int) -> str:
    return f"note/{ticket}"
