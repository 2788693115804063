"""Reports about hangs: while a rank's page does not change, all ranks' collectives are compared once a second.

Node 0, or a single host, compares and makes the report; the guardian of another host with such a rank sends it what it
has seen of its ranks. Two comparisons have to show the same, since hosts look at different times. If they show two
ranks in different collectives, neither can come to the other's, and the run ends.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from lightning_multigpu.job.guardian.blocking import print_text
from lightning_multigpu.job.guardian.failure import Failure, host_name
from lightning_multigpu.job.guardian.hang import flight_recorder as pages
from lightning_multigpu.job.guardian.hang.comparison import (
    Mismatch,
    View,
    calls,
    hang_report,
    mismatch,
    mismatch_text,
)
from lightning_multigpu.job.guardian.host_links import Hosts
from lightning_multigpu.job.guardian.proc import ENDED, STOPPED, clock_s
from lightning_multigpu.job.guardian.protocol import Message
from lightning_multigpu.job.guardian.ranks import Found, Ranks, WatchedRank

_LOOK_EVERY_S = 1.0
_MAX_VIEWS = 24  # of a host: they fit into a message
_MAX_LINES, _MAX_LINE = 64, 200
_FIX = (
    "Every rank has to call the same collectives in the same order: self.log(sync_dist=True), self.all_gather, saves "
    "and barriers on all ranks, or on none"
)

Quiet = dict[int, float]  # by rank, the time since when its page has not changed
Views = dict[int, View]


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

    def observe(self, now_s: float) -> Found | None:
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
        views = map(View.from_message, message["views"])
        quiet = {rank: now_s - age_s for rank, age_s in message["quiet"]}
        self._of_others[host] = quiet, {view.rank: view for view in views}

    def last_waits(self, failed: int | None) -> list[str]:
        """The collectives in which the ranks wait or, once the failure has reached them, have waited.

        The rank ``failed`` waits for no other.
        """
        lines = []
        for rank in sorted(self._ranks.at_work, key=lambda rank: rank.rank):
            entries = self._entries(rank) if rank.rank != failed else ()
            found = [entry for entry in entries if entry.state in (pages.AWAITED, pages.BROKEN)]
            for entry in sorted(found, key=lambda each: (each.state, -each.since_s))[:1]:
                lines.append(f"rank {rank.rank} waited in {entry.name} for {entry.since_s:.1f} s"[:_MAX_LINE])
        return lines[:_MAX_LINES]

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

    def _compare(self, now_s: float, limit_s: float) -> Found | None:
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
        return Found(Failure(f"{mismatch_text(found, views)}. {_FIX}", host=host_name()), now_s)

    # Looks at the ranks of this host

    def _views(self) -> Views:
        return {rank.rank: self._view(rank) for rank in self._ranks if rank.lost_since_s is None}

    def _view(self, rank: WatchedRank) -> View:
        gone = "has finished" if rank.finished else "has ended" if rank.process.state() == ENDED else ""
        line, step = pages.read_line(self._memory, rank.slot), pages.read_steps(self._memory, rank.slot)
        return View(rank.rank, host_name(), rank.process.pid, step, *line, gone, self._entries(rank))

    def _entries(self, rank: WatchedRank) -> tuple[pages.Entry, ...]:
        entries = pages.read_entries(self._memory, rank.slot)
        return tuple(entry._replace(since_s=clock_s() - entry.since_s) for entry in entries)
