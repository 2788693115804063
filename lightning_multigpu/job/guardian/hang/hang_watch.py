"""Reports about hangs: when a rank's page does not change, all ranks are looked at, and their collectives compared.

Node 0, or a single host, makes the report. Two looks have to show the same two ranks in different collectives: then
neither can come to the other's, and the run ends.
::

    another host                                node 0
      quiet    (ranks, and since when)  ---->     notes it; with the first quiet rank a look begins
                                        <----   look
      view     (of each rank), seen     ---->     compares them; the report
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from typing import Any

from lightning_multigpu.job.guardian.blocking import print_text
from lightning_multigpu.job.guardian.failure import Failure, host_name
from lightning_multigpu.job.guardian.hang import flight_recorder as pages
from lightning_multigpu.job.guardian.hang.comparison import (
    COLLECTIVES,
    Mismatch,
    View,
    absent,
    calls,
    hang_report,
    mismatch,
    mismatch_text,
)
from lightning_multigpu.job.guardian.host_links import Hosts
from lightning_multigpu.job.guardian.proc import ENDED, RUNNING, STOPPED, clock_s
from lightning_multigpu.job.guardian.protocol import Message
from lightning_multigpu.job.guardian.ranks import Found, Ranks, WatchedRank

KINDS = ("quiet", "look", "view", "seen")

_ANSWER_S, _COLLECT_S = 3.0, 6.0
# Looks for answers at a failure, and pauses between them. They are counted, without a clock: on a busy machine both the
# ranks and the guardian are late.
_LOOKS, _PAUSE_S = 40, 0.01
_MAX_LINES, _MAX_LINE = 64, 200
_MAY_RAISE_S = 0.5  # a rank that waits longer for a message, or for ranks that have raised, does not raise too
_OWN = "this host"
_FIX = (
    "Every rank has to call the same collectives in the same order: self.log(sync_dist=True), self.all_gather, saves "
    "and barriers on all ranks, or on none"
)

# The time since when a rank's page has not changed, by the rank and the number of its changes.
Quiet = dict[tuple[int, int], float]


class HangWatch:
    """This host's part in the reports. Without ``limit_s`` it looks at no page.

    ``ask`` sends the number of a look to the ranks, which answer in their pages.
    """

    def __init__(
        self, limit_s: float | None, ranks: Ranks, memory: Any, hosts: Hosts, ask: Callable[[int], None]
    ) -> None:
        self.limit_s = limit_s
        self._ranks, self._memory, self._hosts, self._ask = ranks, memory, hosts, ask
        self._progress: dict[int, tuple[bytes, int, float]] = {}  # by rank: the last, their number, the last one's time
        self._quiet: dict[Hashable, Quiet] = {}  # by host
        self._look = 0  # the number of the last one
        self._answer_s: float | None = None  # the time for answers, during a look at this host's ranks
        # On node 0
        self._begun_s: float | None = None
        self._awaited: set[Hashable] = set()  # hosts that have yet to send their views
        self._views: dict[int, View] = {}
        self._looked_at: Quiet = {}
        self._again_s = 0.0
        self._reported: Quiet = {}
        self._suspected: Mismatch = []  # of the last look

    def restart_timers(self, now_s: float) -> None:
        """Restarts the times that are not too long yet: this process, or all ranks, were paused."""
        for rank, (last, number, _) in self._progress.items():
            if (rank, number) not in self._quiet.get(_OWN, {}):
                self._progress[rank] = last, number, now_s

    def observe(self, now_s: float) -> Found | None:
        """Looks at the pages, and continues a report; returns the failure of ranks in different collectives."""
        quiet = self._quiet_ranks(now_s)
        if not self._hosts.is_first and quiet.keys() != self._quiet.get(_OWN, quiet).keys():
            self._hosts.send("quiet", ranks=[(*key, now_s - since_s) for key, since_s in quiet.items()])
        self._quiet[_OWN] = quiet
        if self._answer_s is not None and (now_s > self._answer_s or self._have_answered()):
            self._answer_s = None
            views = [self._view(rank) for rank in self._ranks if rank.lost_since_s is None]
            if self._hosts.is_first:
                self._views |= {view.rank: view for view in views}
                self._awaited.discard(_OWN)
            else:
                for view in views:
                    self._hosts.send("view", view=view)
                self._hosts.send("seen")
        if not self._hosts.is_first or self.limit_s is None:
            return None
        quiet = {key: since_s for of_host in self._quiet.values() for key, since_s in of_host.items()}
        if self._begun_s is not None:
            if not self._awaited or now_s > self._begun_s + _COLLECT_S:
                return self._compare(quiet, now_s, self.limit_s)
        elif self._reported and not self._reported.keys() & quiet.keys():
            waited_s = now_s - min(self._reported.values())
            self._reported = self._looked_at = {}
            print_text(f"The wait that was reported has ended after {waited_s:.0f} s, and the run goes on.\n")
        elif quiet.keys() - self._looked_at.keys() or (quiet and now_s > self._again_s):
            self._begin(now_s)
        return None

    def handle(self, host: Hashable, message: Message, now_s: float) -> None:
        """Handles a message of another host's guardian, of one of :data:`KINDS`."""
        kind = message["kind"]
        if kind == "quiet":
            self._quiet[host] = {(rank, number): now_s - age_s for rank, number, age_s in message["ranks"]}
        elif kind == "look":
            self._look_at_own(now_s)
        elif kind == "view":
            view = View.from_message(message["view"])
            self._views[view.rank] = view
        elif kind == "seen":
            self._awaited.discard(host)

    def _quiet_ranks(self, now_s: float) -> Quiet:
        at_work, quiet = self._ranks.at_work if self.limit_s is not None else [], Quiet()
        if at_work and all(rank.process.state() == STOPPED for rank in at_work):
            self.restart_timers(now_s)  # the whole job is suspended
        for rank in at_work:
            progress = pages.progress(self._memory, rank.slot)
            before, number, since_s = self._progress.get(rank.rank, (b"", 0, now_s))
            if progress != before:
                number, since_s = number + 1, now_s
            self._progress[rank.rank] = progress, number, since_s
            if now_s - since_s >= (self.limit_s or 0.0):
                quiet[rank.rank, number] = since_s
        return quiet

    def _begin(self, now_s: float) -> None:
        self._begun_s, self._views = now_s, {}
        self._awaited = {_OWN, *self._hosts.send("look")}
        self._look_at_own(now_s)

    def _compare(self, quiet: Quiet, now_s: float, limit_s: float) -> Found | None:
        self._begun_s, self._looked_at, self._again_s = None, quiet, now_s + limit_s
        found, before = mismatch(self._views), self._suspected
        self._suspected = found
        if found and found != before:
            self._begin(now_s)
            return None
        waits = {key: since_s for key, since_s in quiet.items() if key[0] in self._views and calls(self._views[key[0]])}
        if waits and (found or not self._reported):
            self._reported = waits
            print_text(hang_report(self._views, waited_s=now_s - min(waits.values()), limit_s=limit_s))
        if not found:
            return None
        return Found(Failure(f"{mismatch_text(found, self._views)}. {_FIX}", host=host_name()), now_s)

    # Looks at the ranks of this host

    def _look_at_own(self, now_s: float) -> None:
        self._look, self._answer_s = self._look + 1, now_s + _ANSWER_S
        self._ask(self._look)

    def _have_answered(self, without: int | None = None) -> bool:
        """Whether all ranks that can answer have done so."""
        able = [rank for rank in self._ranks.at_work if rank.rank != without and rank.process.state() == RUNNING]
        return all(pages.read_line(self._memory, rank.slot, self._look) is not None for rank in able)

    def _view(self, rank: WatchedRank) -> View:
        gone = "has finished" if rank.finished else "has ended" if rank.process.state() == ENDED else ""
        line = pages.read_line(self._memory, rank.slot, self._look) or ("", "")
        # After the line: a rank that waits now has answered from there.
        entries = pages.read_entries(self._memory, rank.slot)
        ages = tuple(entry._replace(since_s=clock_s() - entry.since_s) for entry in entries)
        step = pages.read_steps(self._memory, rank.slot)
        return View(rank.rank, host_name(), rank.process.pid, step, *line, gone, ages)

    # Failures

    def waits_for(self, others: list[WatchedRank]) -> bool:
        """Whether another rank of this host waits for a message, or for ``others``, which begin no collective."""
        known = {rank.rank: self._view(rank) for rank in others}
        waiting = [self._view(rank) for rank in self._ranks.at_work if rank not in others]
        return any(
            call.since_s >= _MAY_RAISE_S
            and (call.operation not in COLLECTIVES or bool(absent(call, [view.rank], known)))
            for view in waiting
            for call in calls(view)
        )

    def last_waits(self, failed: int | None, now_s: float) -> list[str]:
        """The collectives in which the ranks wait or, once the failure has reached them, have waited.

        Call it before the ranks are informed of the failure; it takes up to 0.4 s, on a busy machine more. The rank
        ``failed`` waits for no other.
        """
        self._look_at_own(now_s)
        for _ in range(_LOOKS):
            if self._have_answered(without=failed):
                break
            time.sleep(_PAUSE_S)
        lines = []
        for view in sorted(self._view(rank) for rank in self._ranks.at_work if rank.rank != failed):
            found = [entry for entry in view.entries if entry.state in (pages.AWAITED, pages.BROKEN)]
            for entry in sorted(found, key=lambda each: (each.state, -each.since_s))[:1]:
                # A rank that the failure has reached meanwhile has answered from another place.
                where = f", {view.place}" if entry.state == pages.AWAITED and view.place else ""
                lines.append(f"rank {view.rank} waited in {entry.name} for {entry.since_s:.1f} s{where}"[:_MAX_LINE])
        return lines[:_MAX_LINES]
