"""The waits of a host's ranks that last too long, and the ranks as a look at all of them finds them."""

from __future__ import annotations

import time
from typing import Any

from lightning_multigpu.job.guardian.failure import host_name
from lightning_multigpu.job.guardian.hang.flight_recorder import AWAITED, BROKEN, Entry, read_entries, read_steps
from lightning_multigpu.job.guardian.hang.stacks import Question, Stacks
from lightning_multigpu.job.guardian.hang.waiting_graph import IDLE_TICKS, View, waits_for
from lightning_multigpu.job.guardian.proc import ENDED, STOPPED
from lightning_multigpu.job.guardian.ranks import Ranks, WatchedRank

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
