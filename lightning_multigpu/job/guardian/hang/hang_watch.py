"""Reports about hangs: while a rank's page does not change, all ranks' collectives are compared once a second.

::

    rank 0   all_reduce #6 of group data     rank 1 never came to it
    rank 1   barrier #9 of group world       rank 0 never came to it: neither can come before the other goes on

Node 0, or a single host, compares and makes the report; the guardian of another host with such a rank sends it what it
has seen of its ranks. Two comparisons have to show the same, since hosts look at different times. If they show two
ranks in different collectives, the run ends.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping
from itertools import combinations
from typing import Any, NamedTuple

from lightning_multigpu.job.guardian.blocking import print_text
from lightning_multigpu.job.guardian.failure import Failure, host_name
from lightning_multigpu.job.guardian.hang import flight_recorder as pages
from lightning_multigpu.job.guardian.hang.flight_recorder import AWAITED, UNDER_WAY, Entry, parse_ranks
from lightning_multigpu.job.guardian.host_links import Hosts
from lightning_multigpu.job.guardian.proc import STOPPED, clock_s
from lightning_multigpu.job.guardian.protocol import Message
from lightning_multigpu.job.guardian.ranks import Ranks, WatchedRank

_LOOK_EVERY_S = 1.0
_MAX_VIEWS = 24  # of a host: they fit into a message
_FIX = (
    "Every rank has to call the same collectives in the same order: self.log(sync_dist=True), self.all_gather, saves "
    "and barriers on all ranks, or on none"
)
# Operations that all ranks of a group call in the same order; and groups whose ranks count messages to one rank, too.
_COLLECTIVES = ("all_gather", "all_reduce", "barrier", "broadcast", "reduce", "reduce_scatter")
_POINT_TO_POINT = ("pipeline", "checkpoint")

Mismatch = list[tuple[int, str]]  # two ranks, and the collective in which each waits

Quiet = dict[int, float]  # by rank, the time since when its page has not changed


class View(NamedTuple):
    """One rank, as its host's guardian has seen it: its main thread's line and collective, and the rows of its page.

    Here ``since_s`` of entries counts seconds back from now, since the clocks of hosts differ.
    """

    rank: int
    host: str
    pid: int
    step: int
    place: str = ""
    own: str = ""
    entries: tuple[Entry, ...] = ()


Views = dict[int, View]


def calls(view: View) -> list[Entry]:
    """The collectives in which a rank waits: those that it has noted, else the one that its stack shows, number 0."""
    noted = [entry for entry in view.entries if entry.state == AWAITED]
    return noted or [Entry(AWAITED, 0, 0, 0.0, view.own, "", "")] * bool(view.own)


def _absent(call: Entry, there: Collection[int], views: Mapping[int, View]) -> list[int]:
    """The ranks that certainly have not come to ``call``, or have come with another operation."""
    if not call.operation.startswith(_COLLECTIVES) or call.group in _POINT_TO_POINT:
        return []
    if not call.number:
        # Only the stack shows it, and not its group: several ranks may be all of the group.
        return [rank for rank in views if rank not in there] if len(there) == 1 else []
    members = parse_ranks(call.ranks) or views
    return [rank for rank in members if rank in views and rank not in there and _is_elsewhere(views[rank], call)]


def _is_elsewhere(view: View, call: Entry) -> bool:
    entry = next((e for e in view.entries if (e.group, e.ranks) == (call.group, call.ranks)), None)
    if entry is None or entry.state not in (UNDER_WAY, AWAITED):
        return entry is None or entry.begun < call.number
    # A thread at an earlier collective of the group may still come; an operation is sure if the group has no other.
    is_only = entry.begun == entry.number == call.begun == call.number
    return entry.state == AWAITED and is_only and entry.operation != call.operation


def compare(views: Mapping[int, View]) -> list[tuple[Entry, list[View], list[int]]]:
    """The collectives in which ranks wait, with those, and with the ranks that certainly have not come to them."""
    found: dict[Entry, list[View]] = {}
    for _, view in sorted(views.items()):
        for call in calls(view):
            found.setdefault(call._replace(since_s=0.0), []).append(view)
    return [(call, there, _absent(call, {view.rank for view in there}, views)) for call, there in found.items()]


def mismatch(views: Mapping[int, View]) -> Mismatch:
    """Two ranks that wait for each other, and their different collectives; empty if there are none."""
    for pair in combinations(compare(views), 2):
        ranks = [
            [(view.rank, call.name) for view in there if view.rank in absent_elsewhere]
            for (call, there, _), (_, _, absent_elsewhere) in (pair, pair[::-1])
        ]
        if all(ranks):
            return [each[0] for each in ranks]
    return []


def mismatch_text(found: Mismatch, views: Mapping[int, View]) -> str:
    """The verdict about two such ranks."""
    named = ", ".join(f"rank {rank} {name} ({views[rank].place})" for rank, name in found)
    return f"ranks have called different collectives, and cannot go on: {named}"


def hang_report(views: Mapping[int, View], *, waited_s: float, limit_s: float) -> str:
    """The text of a report: the verdict, and a table of the ranks, first those that wait in no collective."""
    if found := mismatch(views):
        outcome, verdict = "The run ends", [mismatch_text(found, views)]
    else:
        outcome = "The run goes on; this is only a report"
        verdict = [f"{_ranks(absent)} never came to {call.name}" for call, _, absent in compare(views) if absent]
    lines = [f"{line[0].upper()}{line[1:]}." for line in verdict]
    rows = [("rank", "host", "pid", "step", "waits in", "main thread")]
    for view in sorted(views.values(), key=lambda view: (bool(calls(view)), view.rank)):
        waits = "; ".join(c.name + f" for {c.since_s:.0f} s" * bool(c.number) for c in calls(view)) or "-"
        place = view.place or "does not answer: it is stopped, or in C code that holds Python's lock"
        rows.append((str(view.rank), view.host, str(view.pid), str(view.step), waits, place))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines += ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
    heading = f"No progress for {waited_s:.0f} s (hang_report_s={limit_s:g}). {outcome}."
    return "".join(f"{line}\n" for line in [heading, *(f"  {line}" for line in lines)])


def _ranks(ranks: list[int]) -> str:
    *most, last = map(str, sorted(ranks))
    return f"ranks {', '.join(most)} and {last}" if most else f"rank {last}"


class HangWatch:
    """This host's part in the reports. Without ``limit_s`` it looks at no page."""

    def __init__(self, limit_s: float | None, ranks: Ranks, memory: Any, hosts: Hosts) -> None:
        self.limit_s = limit_s
        self._ranks, self._memory, self._hosts = ranks, memory, hosts
        self._progress: dict[int, tuple[bytes, float]] = {}  # by rank: the last, and its time
        self._looked_s = 0.0
        self._quiet: Quiet = {}
        # On node 0
        self._of_others: dict[Hashable, tuple[Quiet, Views]] = {}  # by host
        self._last: tuple[Mismatch, set[int]] = [], set()
        self._reported: set[int] = set()
        self._reported_since_s = 0.0

    def restart_timers(self, now_s: float) -> None:
        """Restarts the times that are not too long yet: this process, or all ranks, were paused."""
        for rank, (last, _) in self._progress.items():
            if rank not in self._quiet:
                self._progress[rank] = last, now_s

    def observe(self, now_s: float) -> Failure | None:
        """Looks at the pages; returns the failure of ranks in different collectives."""
        if self.limit_s is None or now_s - self._looked_s < _LOOK_EVERY_S:
            return None
        self._looked_s = now_s
        was_quiet, self._quiet = bool(self._quiet), self._quiet_ranks(now_s, self.limit_s)
        if self._hosts.is_first:
            return self._compare(now_s, self.limit_s)
        if self._quiet or was_quiet:
            views = [*self._views().values()][:_MAX_VIEWS] if self._quiet else []
            ages = [(rank, now_s - since_s) for rank, since_s in self._quiet.items()]
            self._hosts.send("views", quiet=ages, views=views)
        return None

    def receive(self, host: Hashable, message: Message, now_s: float) -> None:
        """Notes what the guardian of another host has seen of its ranks."""
        views = [View(*each)._replace(entries=tuple(Entry(*entry) for entry in each[-1])) for each in message["views"]]
        quiet = {rank: now_s - age_s for rank, age_s in message["quiet"]}
        self._of_others[host] = quiet, {view.rank: view for view in views}

    def last_waits(self, failed: int | None) -> list[str]:
        """The collectives in which the ranks, other than ``failed``, wait, or waited until a failure came."""
        lines = []
        for rank in sorted(self._ranks.at_work, key=lambda rank: rank.rank):
            entries = self._entries(rank) if rank.rank != failed else ()
            found = [entry for entry in entries if entry.state in (pages.AWAITED, pages.BROKEN)]
            for entry in sorted(found, key=lambda each: (each.state, -each.since_s))[:1]:
                lines.append(f"rank {rank.rank} waited in {entry.name} for {entry.since_s:.1f} s")
        return lines

    def _quiet_ranks(self, now_s: float, limit_s: float) -> Quiet:
        at_work, quiet = self._ranks.at_work, Quiet()
        if at_work and all(rank.process.state() == STOPPED for rank in at_work):
            self.restart_timers(now_s)  # the whole job is suspended
        for rank in at_work:
            progress = pages.progress(self._memory, rank.slot)
            before, since_s = self._progress.get(rank.rank, (b"", now_s))
            since_s = since_s if progress == before else now_s
            self._progress[rank.rank] = progress, since_s
            if now_s - since_s >= limit_s:
                quiet[rank.rank] = since_s
        return quiet

    def _compare(self, now_s: float, limit_s: float) -> Failure | None:
        quiet, views = dict(self._quiet), Views()
        for quiet_there, views_there in self._of_others.values():
            quiet |= quiet_there
            views |= views_there
        if quiet:
            views |= self._views()
        if self._reported and not self._reported & quiet.keys():
            waited_s, self._reported = now_s - self._reported_since_s, set()
            print_text(f"The wait that was reported has ended after {waited_s:.0f} s, and the run goes on.\n")
        self._reported &= quiet.keys()  # the others have gone on
        waits = {rank for rank in quiet if rank in views and calls(views[rank])}
        before, self._last = self._last, (mismatch(views), waits)
        found = self._last[0]
        if not waits or self._last != before:
            return None
        if found or not self._reported:
            self._reported, self._reported_since_s = waits, min(quiet[rank] for rank in waits)
            print_text(hang_report(views, waited_s=now_s - self._reported_since_s, limit_s=limit_s))
        if not found:
            return None
        return Failure(f"{mismatch_text(found, views)}. {_FIX}", host=host_name())

    def _views(self) -> Views:
        return {rank.rank: self._view(rank) for rank in self._ranks.at_work}

    def _view(self, rank: WatchedRank) -> View:
        line, step = pages.read_line(self._memory, rank.slot), pages.read_steps(self._memory, rank.slot)
        return View(rank.rank, host_name(), rank.process.pid, step, *line, self._entries(rank))

    def _entries(self, rank: WatchedRank) -> tuple[pages.Entry, ...]:
        entries = pages.read_entries(self._memory, rank.slot)
        return tuple(entry._replace(since_s=clock_s() - entry.since_s) for entry in entries)
