"""The collectives in which ranks of this host wait: found when they take too long, and at a failure.

Two kinds of long waits are found. One is a wait that a rank has noted in its page. The other is a main thread whose
stack ends in the same collective twice, while the page does not change and the thread uses no processor: the user's
code or a library has called that collective outside of the strategy.
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from lightning_multigpu.job.guardian.failure import host_name, start_within
from lightning_multigpu.job.guardian.hang.flight_recorder import AWAITED, BROKEN, Entry, read_entries, read_steps
from lightning_multigpu.job.guardian.hang.stacks import CollectiveCall, Question, Stacks, StackSignal
from lightning_multigpu.job.guardian.hang.waiting_graph import View, unnoted_name, waits_for
from lightning_multigpu.job.guardian.proc import ENDED, STOPPED
from lightning_multigpu.job.guardian.ranks import Ranks, WatchedRank

# Between two looks at the same stack. A thread that uses less processor time than these ticks waits.
_SECOND_LOOK_S = 2.0
_IDLE_TICKS = 10
_ANSWER_S = 3.0

Waits = dict[str, float]  # the name of each wait, and its beginning


class _Silence:
    """A time without a change of a rank's page, and the collective that its stack has shown meanwhile."""

    def __init__(self, signature: object, since_s: float) -> None:
        self.signature = signature
        self.since_s = since_s
        self.look_at_s = since_s
        self.ticks = -1
        self.seen: CollectiveCall | None = None
        self.confirmed = False


class _Round:
    """Requests for stacks that were sent to ranks together."""

    def __init__(self, ranks: list[WatchedRank], signals: dict[int, StackSignal]) -> None:
        self.ranks = ranks
        self.questions = {r.rank: Question(r.process, signals.get(r.rank)) for r in ranks if not _gone(r)}
        self._until_s = time.monotonic() + _ANSWER_S

    def is_over(self) -> bool:
        return time.monotonic() >= self._until_s or all(q.is_answered() for q in self.questions.values())


class HangWatch:
    """Finds waits of this host's ranks.

    Args:
        limit_s: how long a rank may wait; None finds no waits, but :meth:`look` works.
        ranks: the ranks of this host.
        memory: their pages.

    Attributes:
        signals: the signal by which each rank is asked for its stacks.
    """

    def __init__(self, limit_s: float | None, ranks: Ranks, memory: Any) -> None:
        self.limit_s = limit_s
        self._ranks = ranks
        self._memory = memory
        self.signals: dict[int, StackSignal] = {}
        self._silences: dict[int, _Silence] = {}
        self._waits: Waits = {}
        self._wanted: list[tuple[list[WatchedRank], Callable[[list[View]], None]]] = []
        self._round: _Round | None = None
        self._now_s = self._restarted_s = 0.0

    def registered(self, rank: int, how: StackSignal) -> None:
        """Notes the signal that asks the rank for its stacks."""
        if rank in self.signals:
            os.close(self.signals[rank].descriptor)
        self.signals[rank] = how

    def restart_timers(self, now_s: float) -> None:
        """Restarts the waits, except those that were too long already: this process, or all ranks, were paused."""
        self._restarted_s = now_s
        self._silences = {rank: silence for rank, silence in self._silences.items() if silence.confirmed}

    def observe(self, now_s: float) -> Waits:
        """Looks at all pages; returns the waits that have lasted too long."""
        self._now_s = now_s
        self._advance()
        if self.limit_s is None:
            return {}
        at_work = self._ranks.at_work
        if at_work and all(rank.process.state() == STOPPED for rank in at_work):
            self.restart_timers(now_s)  # the whole job is suspended
        waits: Waits = {}
        for rank in at_work:
            entries = read_entries(self._memory, rank.slot)
            for entry in entries:
                name = f"{rank.rank}: {entry.name} {entry.ranks}"
                since_s = self._waits.get(name, max(entry.since_s, self._restarted_s))
                if entry.state == AWAITED and now_s - since_s >= self.limit_s:
                    waits[name] = since_s
            silence = self._silence(rank, entries)
            if silence.confirmed and silence.seen is not None:
                waits[unnoted_name(rank.rank, silence.seen.operation, silence.seen.place)] = silence.since_s
        self._waits = waits
        return waits

    def waits_for(self, others: list[WatchedRank], *, at_least_s: float) -> bool:
        """Whether another rank of this host waits for one of ``others``, which begin no collective any more."""
        known = [self._view(rank, None) for rank in others]
        waiting = (self._view(rank, None) for rank in self._ranks.at_work if rank not in others)
        return any(waits_for(view, known, at_least_s=at_least_s) for view in waiting)

    def look(self, seen: Callable[[list[View]], None], *, ranks: list[WatchedRank] | None = None) -> None:
        """Takes the views of ``ranks``, by default of all but the lost ones, and then calls ``seen``.

        A second call with the same ``seen`` before that does nothing.
        """
        if any(seen == waiting for _, waiting in self._wanted):
            return
        self._wanted.append(
            ([rank for rank in self._ranks if rank.lost_since_s is None] if ranks is None else ranks, seen)
        )
        self._advance()

    # Stacks

    def _advance(self) -> None:
        """Sends the next requests, or passes the answers on."""
        if self._round is None and self._wanted:
            self._round = _Round(self._wanted[0][0], self.signals)
        if self._round is not None and self._round.is_over():
            ended, self._round = self._round, None
            _, seen = self._wanted.pop(0)
            seen([self._view(rank, ended.questions.get(rank.rank)) for rank in ended.ranks])

    def _view(self, rank: WatchedRank, question: Question | None) -> View:
        entries = read_entries(self._memory, rank.slot)
        return View(
            rank=rank.rank,
            host=host_name(),
            pid=rank.process.pid,
            step=read_steps(self._memory, rank.slot),
            entries=tuple(e._replace(since_s=self._now_s - max(e.since_s, self._restarted_s)) for e in entries),
            stacks=Stacks(_gone(rank)) if question is None else question.answer(),
            main_thread=self.signals[rank.rank].main_thread if rank.rank in self.signals else 0,
            gone=_gone(rank),
        )

    # Waits that nobody has noted

    def _silence(self, rank: WatchedRank, entries: list[Entry]) -> _Silence:
        signature = read_steps(self._memory, rank.slot), [(e.group, e.ranks, e.begun, e.state) for e in entries]
        silence = self._silences.get(rank.rank)
        if silence is None or silence.signature != signature:
            silence = self._silences[rank.rank] = _Silence(signature, self._now_s)
        assert self.limit_s is not None
        if self._now_s - silence.since_s < self.limit_s or self._now_s < silence.look_at_s:
            return silence
        ticks, before = rank.process.cpu_ticks(), silence.ticks
        silence.ticks = ticks
        silence.look_at_s = self._now_s + _SECOND_LOOK_S
        if before < 0 or ticks - before > _IDLE_TICKS:
            # Unknown so far, or at work: a rank that has waited and now works has got on.
            silence.confirmed, silence.seen = False, None
        elif not silence.confirmed and not any(entry.state == AWAITED for entry in entries):
            silence.look_at_s = self._now_s + _ANSWER_S + _SECOND_LOOK_S
            self.look(lambda views: self._compare(silence, views), ranks=[rank])
        return silence

    def _compare(self, silence: _Silence, views: list[View]) -> None:
        """Two looks that show the same collective make a wait; otherwise the next look is later."""
        seen = views[0].stacks.collective if views else None
        silence.confirmed = seen is not None and seen == silence.seen
        silence.seen = seen
        silence.look_at_s = self._now_s + (_SECOND_LOOK_S if seen is not None else self.limit_s or 0.0)


def _gone(rank: WatchedRank) -> str:
    if rank.finished:
        return "it has finished"
    return "it has ended" if rank.process.state() == ENDED else ""


_MAX_MESSAGE_LINES = 128
_MAX_LINE_BYTES = 300
# Looks for answers at a failure, and pauses between them. They are counted, without a clock: on a busy machine both the
# ranks and the guardian are late.
_LOOKS = 40
_PAUSE_S = 0.01


def last_waits(
    ranks: Ranks, memory: Any, signals: Mapping[int, StackSignal], *, failed: int | None, now_s: float
) -> list[str]:
    """The collectives in which the ranks of a host wait or, once the failure has reached them, have waited.

    Call it before the ranks are informed of the failure; it takes up to 0.4 s, on a busy machine more.

    Args:
        ranks: the ranks of the host.
        memory: their pages.
        signals: the signals that ask them for their stacks.
        failed: the rank that has failed: it waits for no other.
        now_s: time on CLOCK_BOOTTIME.
    """
    found: dict[int, Entry] = {}
    questions: dict[int, Question] = {}
    slots: dict[int, int] = {}
    for rank in ranks.at_work:
        entries = [e for e in read_entries(memory, rank.slot) if e.state in (AWAITED, BROKEN)]
        if not entries or rank.rank == failed:
            continue
        entry = found[rank.rank] = min(entries, key=lambda e: (e.state != AWAITED, e.since_s))
        slots[rank.rank] = rank.slot
        if entry.state == AWAITED:
            questions[rank.rank] = Question(rank.process, signals.get(rank.rank))
    for _ in range(_LOOKS):
        if all(question.is_answered() for question in questions.values()):
            break
        time.sleep(_PAUSE_S)
    lines = []
    for number, entry in sorted(found.items()):
        answer = questions[number].answer() if number in questions else None
        # A rank that the failure has reached meanwhile answers from another place, and has noted the one before.
        now = [e for e in read_entries(memory, slots[number]) if (e.group, e.number) == (entry.group, entry.number)]
        noted = next((e.place for e in now if e.state == BROKEN), entry.place)
        place = noted or (answer.place if answer is not None and answer.main else "")
        waited_s = max(0.0, now_s - entry.since_s)
        lines.append(f"rank {number} waited in {entry.name} for {waited_s:.1f} s" + (f", {place}" if place else ""))
    return lines


def in_message(lines: Iterable[object]) -> list[str]:
    """The lines, cut to fit into a message beside a failure."""
    return [start_within(str(line), _MAX_LINE_BYTES) for line in itertools.islice(lines, _MAX_MESSAGE_LINES)]
