"""Reports about hangs: collected from the guardians of all hosts, on the terminal of node 0 and in a file.

Each host's guardian finds the waits of its ranks. A wait that a rank has noted in its page is found there. A collective
that the user's code or a library has called outside of the strategy shows only in a stack: so an idle rank whose page
does not change is looked at too. A report ends the run only if it proves that ranks wait for each other.

::

    another host                       node 0
      waiting  (ranks, since)  ---->     notes it; with the first wait a report begins
                               <----   look
      view     (of one rank)   ---->
                               <----   next                 one view at a time, so that no socket is full
      seen                     ---->   the report: verdict, stacks
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from lightning_multigpu.job.guardian.blocking import append, show
from lightning_multigpu.job.guardian.failure import Failure, host_name
from lightning_multigpu.job.guardian.hang.flight_recorder import AWAITED, BROKEN, Entry, read_entries, read_steps
from lightning_multigpu.job.guardian.hang.stacks import Question, Stacks
from lightning_multigpu.job.guardian.hang.waiting_graph import (
    IDLE_TICKS,
    View,
    calls,
    deadlock,
    lasting,
    verdict,
    waits_for,
)
from lightning_multigpu.job.guardian.host_links import Hosts
from lightning_multigpu.job.guardian.proc import ENDED, STOPPED
from lightning_multigpu.job.guardian.protocol import Message
from lightning_multigpu.job.guardian.ranks import Found, Ranks, WatchedRank

KINDS = ("waiting", "look", "view", "next", "seen")

_COLLECT_S = 8.0
_SECOND_LOOK_S = 2.0
_OWN = "this host"
_DEADLOCK = "ranks wait for each other, and none can go on"
_FIX = (
    "Every rank has to call the same collectives in the same order: self.log(sync_dist=True), self.all_gather, saves "
    "and barriers on all ranks, or on none"
)
_ANSWER_S = 3.0
_IDLE_S = 2.0
# Looks for answers at a failure, and pauses between them. They are counted, without a clock: on a busy machine both the
# ranks and the guardian are late.
_LOOKS = 40
_PAUSE_S = 0.01
_MAX_MESSAGE_LINES = 64
_MAX_LINE = 200

# The name of each wait, and its beginning; that of a rank whose page does not change is just its number.
Waits = dict[str, float]


class HangWatch:
    """Finds waits of this host's ranks that are longer than ``limit_s``; with None it only looks when asked to."""

    def __init__(self, limit_s: float | None, ranks: Ranks, memory: Any) -> None:
        self.limit_s = limit_s
        self._ranks = ranks
        self._memory = memory
        self._unchanged: dict[int, tuple[object, float]] = {}  # by rank: the page's numbers, and since when it is idle
        self._ticks: dict[int, tuple[int, float]] = {}  # by rank: its processor time, and when
        self._waits: Waits = {}
        self._asked: list[tuple[WatchedRank, Question | None]] | None = None  # while a look is under way
        self._until_s = 0.0
        self._now_s = self._restarted_s = 0.0

    def restart_timers(self, now_s: float) -> None:
        """Restarts the waits, except those that were too long already: this process, or all ranks, were paused."""
        self._restarted_s = now_s
        self._unchanged = {rank: since for rank, since in self._unchanged.items() if str(rank) in self._waits}

    def observe(self, now_s: float) -> Waits:
        """Looks at all pages; returns the waits that have lasted too long."""
        self._now_s = now_s
        if self.limit_s is None:
            return {}
        at_work = self._ranks.at_work
        if at_work and all(rank.process.state() == STOPPED for rank in at_work):
            self.restart_timers(now_s)  # the whole job is suspended
        waits: Waits = {}
        for rank in at_work:
            entries = read_entries(self._memory, rank.slot)
            awaited = [entry for entry in entries if entry.state == AWAITED]
            for entry in awaited:
                name = f"{rank.rank}: {entry.name} {entry.ranks}"
                since_s = self._waits.get(name, max(entry.since_s, self._restarted_s))
                if now_s - since_s >= self.limit_s:
                    waits[name] = since_s
            numbers = read_steps(self._memory, rank.slot), [(e.group, e.ranks, e.begun, e.state) for e in entries]
            before, since_s = self._unchanged.get(rank.rank, (None, now_s))
            if self._works(rank) or numbers != before:
                since_s = now_s
            self._unchanged[rank.rank] = numbers, since_s
            if not awaited and now_s - since_s >= self.limit_s:
                waits[str(rank.rank)] = since_s
        self._waits = waits
        return waits

    def _works(self, rank: WatchedRank) -> bool:
        """Whether the rank's main thread has computed since the last call, or within two seconds."""
        ticks = rank.process.cpu_ticks()
        before, since_s = self._ticks.get(rank.rank, (ticks, self._now_s))
        works = ticks - before > IDLE_TICKS
        is_over = works or self._now_s - since_s >= _IDLE_S
        self._ticks[rank.rank] = (ticks, self._now_s) if is_over else (before, since_s)
        return works

    def waits_for(self, others: list[WatchedRank], *, at_least_s: float) -> bool:
        """Whether another rank of this host waits for one of ``others``, which begin no collective any more."""
        known = [self._view(rank, None) for rank in others]
        waiting = (self._view(rank, None) for rank in self._ranks.at_work if rank not in others)
        return any(waits_for(view, known, at_least_s=at_least_s) for view in waiting)

    def look(self) -> None:
        """Asks all ranks but the lost ones for their stacks; one look at a time, until :meth:`seen` returns it."""
        if self._asked is None:
            self._until_s = time.monotonic() + _ANSWER_S
            present = [rank for rank in self._ranks if rank.lost_since_s is None]
            self._asked = [(r, None if _gone(r) else Question(r.process, r.stack_signal)) for r in present]

    def seen(self) -> list[View] | None:
        """The ranks at a look, once all have answered or their time is over; None before, and without a look."""
        if self._asked is None:
            return None
        questions = [question for _, question in self._asked if question is not None]
        if time.monotonic() < self._until_s and not all(question.is_answered() for question in questions):
            return None
        asked, self._asked = self._asked, None
        return [self._view(rank, question) for rank, question in asked]

    def _view(self, rank: WatchedRank, question: Question | None) -> View:
        entries = read_entries(self._memory, rank.slot)
        return View(
            rank=rank.rank,
            host=host_name(),
            pid=rank.process.pid,
            step=read_steps(self._memory, rank.slot),
            entries=tuple(e._replace(since_s=self._now_s - max(e.since_s, self._restarted_s)) for e in entries),
            stacks=Stacks(_gone(rank)) if question is None else question.answer(),
            main_thread=0 if rank.stack_signal is None else rank.stack_signal.main_thread,
            gone=_gone(rank),
            cpu_ticks=rank.process.cpu_ticks(),
        )

    def last_waits(self, *, failed: int | None, now_s: float) -> list[str]:
        """The collectives in which the ranks wait or, once the failure has reached them, have waited.

        Call it before the ranks are informed of the failure; it takes up to 0.4 s, on a busy machine more. The rank
        ``failed`` waits for no other.
        """
        found: list[tuple[WatchedRank, Entry, Question | None]] = []
        for rank in self._ranks.at_work:
            entries = [e for e in read_entries(self._memory, rank.slot) if e.state in (AWAITED, BROKEN)]
            if entries and rank.rank != failed:
                entry = min(entries, key=lambda e: (e.state != AWAITED, e.since_s))
                waits = entry.state == AWAITED
                found.append((rank, entry, Question(rank.process, rank.stack_signal) if waits else None))
        for _ in range(_LOOKS):
            if all(question is None or question.is_answered() for *_, question in found):
                break
            time.sleep(_PAUSE_S)
        lines = []
        for rank, entry, question in sorted(found, key=lambda each: each[0].rank):
            answer = None if question is None else question.answer()
            # A rank that the failure has reached meanwhile answers from another place, and has noted the one before.
            again = read_entries(self._memory, rank.slot)
            now = [e for e in again if (e.group, e.number) == (entry.group, entry.number)]
            noted = next((e.place for e in now if e.state == BROKEN), entry.place)
            place = noted or (answer.place if answer is not None and answer.main else "")
            waited_s = max(0.0, now_s - entry.since_s)
            where = f", {place}" if place else ""
            lines.append(f"rank {rank.rank} waited in {entry.name} for {waited_s:.1f} s{where}")
        return in_message(lines)


def in_message(lines: list[str]) -> list[str]:
    """The lines, cut to fit into a message beside a failure."""
    return [line[:_MAX_LINE] for line in lines[:_MAX_MESSAGE_LINES]]


def _gone(rank: WatchedRank) -> str:
    if rank.finished:
        return "it has finished"
    return "it has ended" if rank.process.state() == ENDED else ""


class HangReports:
    """This host's part in the reports; on node 0, and with a single host, the reports themselves.

    ``directory`` returns the present directory of the file, or None.
    """

    def __init__(self, watch: HangWatch, hosts: Hosts, directory: Callable[[], str | None]) -> None:
        self._watch, self._hosts, self._directory = watch, hosts, directory
        self._now_s = 0.0
        self._waits: dict[Hashable, Waits] = {}
        self._reported: Waits = {}
        self._seen: set[str] = set()  # waits since the last look
        self._again_s = 0.0  # the time of the next look, if nothing changes
        self._looks_twice = False
        self._begun_s = 0.0
        # On node 0 while a report is being collected: the deadline, the hosts that have yet to answer, and the views.
        self._until_s: float | None = None
        self._awaited: set[Hashable] = set()
        self._views: list[View] = []
        self._before: list[View] = []  # of the look before
        # On the other hosts: the waits that node 0 knows, and the views that it has not fetched yet.
        self._sent: set[str] = set()
        self._unsent: list[View] = []

    def observe(self, now_s: float) -> Found | None:
        """Looks at this host's ranks, and continues a report under way.

        Returns the failure of ranks that wait for each other, once a report has proved it.
        """
        self._now_s = now_s
        waits, views = self._watch.observe(now_s), self._watch.seen()
        if not self._hosts.is_first:
            if views is not None:
                self._unsent = views
                self._send_next()
            if waits.keys() != self._sent:
                self._sent = set(waits)
                self._hosts.send("waiting", waits={name: now_s - since_s for name, since_s in waits.items()})
            return None
        if views is not None:
            self._views += views
            self._awaited.discard(_OWN)
        self._waits[_OWN] = waits
        limit_s = self._watch.limit_s
        if limit_s is None:
            return None
        current = {name: since_s for of_host in self._waits.values() for name, since_s in of_host.items()}
        if self._until_s is not None:
            if not self._awaited or now_s >= self._until_s:
                return self._report(current, limit_s)
        elif self._reported and not self._reported.keys() & current.keys():
            waited_s = now_s - min(self._reported.values())
            self._reported, self._seen = {}, set()
            self._write(f"The wait that was reported has ended after {waited_s:.0f} s, and the run goes on.\n", "")
        elif current.keys() - self._seen or (current and now_s >= self._again_s):
            self._collect()
        else:
            self._seen &= set(current)
        return None

    def handle(self, host: Hashable, message: Message) -> None:
        """Handles a message of another host's guardian, of one of :data:`KINDS`."""
        kind = message["kind"]
        if kind == "waiting":
            self._waits[host] = {name: self._now_s - age_s for name, age_s in message["waits"].items()}
        elif kind == "look":
            self._watch.look()
        elif kind == "next":
            self._send_next()
        elif kind == "view" and host in self._awaited:
            self._views.append(View.from_message(message["view"]))
            self._hosts.send("next", to=host)
        elif kind == "seen":
            self._awaited.discard(host)

    def _collect(self) -> None:
        self._begun_s, self._until_s = self._now_s, self._now_s + _COLLECT_S
        self._views = []
        self._awaited = {_OWN, *self._hosts.send("look")}
        self._watch.look()

    def _send_next(self) -> None:
        if self._unsent:
            self._hosts.send("view", view=self._unsent.pop(0).to_message())
        else:
            self._hosts.send("seen")

    def _report(self, current: Waits, limit_s: float) -> Found | None:
        self._until_s, self._seen = None, set(current)
        unchanged = {int(name) for name in current if name.isdigit()}
        idle = lasting(self._before, self._views) & unchanged
        # A wait is noted, or two looks have shown it; a rank that computes does not wait.
        waits = {name: since_s for name, since_s in current.items() if not name.isdigit() or int(name) in idle}
        taken_s = self._now_s - self._begun_s
        ranks = deadlock(self._views, lasting=idle, at_least_s=taken_s) if waits else ""
        if waits and (ranks or not self._reported):
            waited_s = self._now_s - min(waits.values())
            text = hang_report(self._views, waited_s=waited_s, limit_s=limit_s, file=self._path(), ends=bool(ranks))
            self._write(text, full_stacks(self._views))
        self._reported = self._reported or waits
        is_new = any(not call.number and view.rank not in idle for view in self._views for call in calls(view))
        self._looks_twice = is_new and not self._looks_twice
        self._again_s = self._now_s + (_SECOND_LOOK_S if self._looks_twice else limit_s)
        self._before, self._views = self._views, []
        return Found(Failure(f"{_DEADLOCK}: {ranks}. {_FIX}", host=host_name()), self._now_s) if ranks else None

    def _path(self) -> str | None:
        directory = self._directory()
        return None if directory is None else os.path.join(directory, f"hang-{host_name()}.txt")

    def _write(self, text: str, details: str) -> None:
        path = self._path()
        if path is not None:
            entry = f"{time.strftime('%Y-%m-%d %H:%M:%S')}\n{text}{details}"
            append(path, entry, "The report about a hang")
        show(text)


_SHOWN_RANKS = 16
_SHOWN_FRAMES = 8


def hang_report(views: Sequence[View], *, waited_s: float, limit_s: float, file: str | None, ends: bool = False) -> str:
    """The text of a report: the verdict, then the place of each rank.

    ``file`` has all stacks. With ``ends``, ranks wait for each other, so that the run is ended.
    """
    views = sorted(views, key=_most_telling_first)
    outcome = "Ranks wait for each other: the run ends" if ends else "The run goes on; this is only a report"
    lines = [
        f"No progress for {waited_s:.0f} s (hang_report_s={limit_s:g}). {outcome}.",
        *(f"  {line}." for line in verdict(views)),
        "",
    ]
    for view in views[:_SHOWN_RANKS]:
        lines += _short_stack(view)
    if len(views) > _SHOWN_RANKS:
        lines.append(f"{len(views) - _SHOWN_RANKS} more ranks are not shown.")
    lines.append(
        "The stacks of all threads are in " + file if file else "No directory is known for the stacks of all threads."
    )
    return "\n".join(lines) + "\n"


def full_stacks(views: Sequence[View]) -> str:
    """The stacks of all threads of all ranks, for the file only."""
    return "".join(
        f"\n--- rank {view.rank} (host {view.host}, pid {view.pid}) ---\n{view.stacks.text}\n"
        for view in sorted(views, key=lambda view: view.rank)
    )


def _most_telling_first(view: View) -> tuple[bool, int]:
    """Sorts ranks that do not wait in a collective first."""
    return bool(calls(view)), view.rank


def _short_stack(view: View) -> list[str]:
    """The main thread's frames: the user's, and around them the innermost of the libraries."""
    name = f"Rank {view.rank} (host {view.host}, pid {view.pid}, last completed step {view.step})"
    if not view.stacks.main:
        return [f"{name}: {view.gone or view.stacks.text}"]
    frames = view.stacks.main
    users = [index for index, frame in enumerate(frames) if frame.is_users][:_SHOWN_FRAMES]
    others = [index for index, frame in enumerate(frames) if not frame.is_users]
    shown = sorted([*users, *others[: max(_SHOWN_FRAMES - len(users), 2)]])
    lines = [frames[index].text for index in shown]
    return [f"{name}, main thread, most recent call first:", *(f"    {line}" for line in lines)]
