"""The flight recorder: a rank's steps and collectives in memory that the guardian reads without asking.

Every rank of a host shares one page of memory with the guardian. It contains the number of completed steps, the main
thread's line at a time, and one row for each of the rank's process groups::

    page of a rank   | steps | line, time | row of group "data" | row of group "world" | ... | free rows |
    row of a group   | edition | state, begun, number, since, operation, group, ranks | edition |

A collective is identified by its group and its number in the group: ranks count from 1, and all begin a group's
collectives in the same order. The rank writes with plain stores; if a reader finds two different editions, the row has
changed while it was read.
"""

from __future__ import annotations

import struct
import sys
import threading
from typing import Any, NamedTuple

from lightning_multigpu.job.guardian.frames import own_collective, place, stack_of
from lightning_multigpu.job.guardian.proc import clock_s

PAGE_BYTES = 4096
FREE, ENDED, UNDER_WAY, AWAITED, BROKEN = range(5)

_STEPS = struct.Struct("q")
_LINE = struct.Struct("160s32sd")
_ROW = struct.Struct("Qqqqd24s24s40sQ")
_ROWS_FROM = 256
NUM_ROWS = (PAGE_BYTES - _ROWS_FROM) // _ROW.size
_FRESH_S = 3.0  # a rank notes its line twice a second, if it can


class Entry(NamedTuple):
    """One row of a rank's page.

    Attributes:
        state: :data:`ENDED`, nothing is under way; :data:`UNDER_WAY`, no thread waits for it so far; :data:`AWAITED`, a
            thread or the rank's device waits for it; :data:`BROKEN`, it has raised an error.
        begun: the number of the collective that was begun last.
        number: the number of the oldest collective that has not ended, or of the last one.
        since_s: the time at which the wait has begun, on CLOCK_BOOTTIME.
        operation: the name in ``torch.distributed`` of the collective that was begun last.
        group: the name of the process group: "data".
        ranks: its members, for :func:`parse_ranks`; empty if unknown.
    """

    state: int
    begun: int
    number: int
    since_s: float
    operation: str
    group: str
    ranks: str

    @property
    def name(self) -> str:
        """ "all_reduce #118 of group data"; just "all_reduce" without a number."""
        return f"{self.operation} #{self.number} of group {self.group}" if self.number else self.operation


class _Row:
    """The collectives of one group. They end in the order of their beginning, except in a user's hook."""

    __slots__ = ("at", "awaited", "begun", "edition", "ended", "names", "operation", "since_s")

    def __init__(self, at: int, group: bytes, ranks: bytes) -> None:
        self.at, self.names, self.operation = at, (group, ranks), b""
        self.edition = self.begun = self.ended = self.awaited = 0
        self.since_s = 0.0


class Note:
    """One collective of this rank that is under way, until :meth:`ended` or :meth:`broke` is called."""

    __slots__ = ("_is_awaited", "_recorder", "_row")

    def __init__(self, flight_recorder: FlightRecorder, row: _Row, *, is_awaited: bool) -> None:
        self._recorder, self._is_awaited = flight_recorder, is_awaited
        self._row: _Row | None = row

    def awaited(self) -> None:
        """Notes that a thread, or the rank's device, begins to wait for it."""
        with self._recorder.lock:
            if self._row is not None:
                self._row.awaited += not self._is_awaited
                self._is_awaited = True
                self._recorder.write(self._row)

    def broke(self) -> None:
        """Notes an error: the collective, and the begin of its wait, stay readable until the group's next one."""
        self.ended(BROKEN)

    def ended(self, state: int | None = None) -> None:
        with self._recorder.lock:
            row, self._row = self._row, None
            if row is not None:
                row.ended += 1
                row.awaited -= self._is_awaited
                self._recorder.write(row, state)


class FlightRecorder:
    """The writer of page ``slot`` of the host's pages. Any thread may write."""

    def __init__(self, memory: Any, slot: int) -> None:
        self._memory = memory
        self._at = PAGE_BYTES * slot
        self._rows: dict[tuple[str, str], _Row] = {}
        self.lock = threading.Lock()

    def completed(self, step: int) -> None:
        """Notes that ``step`` optimizer steps are done."""
        _STEPS.pack_into(self._memory, self._at, step)

    def note_line(self) -> None:
        """Notes the main thread's line; called from time to time, by another thread."""
        frames = stack_of(sys._current_frames().get(threading.main_thread().ident or 0))
        line = _text(place(frames), 160), _text(own_collective(frames), 32)
        _LINE.pack_into(self._memory, self._at + _STEPS.size, *line, clock_s())

    def began(self, operation: str, *, group: str, ranks: str, awaited: bool = True) -> Note | None:
        """Notes that this rank begins a collective; None if the page has no row left for the group.

        ``ranks``: its members ("0-3", "0-6:2", "0,3,4"), or empty. ``awaited``: this thread waits for it from now on.
        """
        with self.lock:
            row = self._rows.get((group, ranks))
            if row is None:
                if len(self._rows) == NUM_ROWS:
                    return None
                at = self._at + _ROWS_FROM + _ROW.size * len(self._rows)
                row = _Row(at, _text(group, 24), ranks.encode() if len(ranks) < 40 else b"")
                self._rows[group, ranks] = row
            row.begun += 1
            row.awaited += awaited
            row.operation = _text(operation, 24)
            self.write(row)
        return Note(self, row, is_awaited=awaited)

    def detach(self) -> None:
        """Releases the shared memory: nobody reads later notes."""
        # The old memory is freed with its last user: a thread may be writing to it now.
        self._memory = bytearray(self._at + PAGE_BYTES)

    def write(self, row: _Row, state: int | None = None) -> None:
        """Writes a row, whose collective has changed now; the caller has the lock."""
        if state is None:
            row.since_s = clock_s()
            state = AWAITED if row.awaited else UNDER_WAY if row.ended < row.begun else ENDED
        number = row.ended if state == BROKEN else min(row.ended + 1, row.begun)
        row.edition += 1
        counts = row.edition, state, row.begun, number, row.since_s
        _ROW.pack_into(self._memory, row.at, *counts, row.operation, *row.names, row.edition)


def read_steps(memory: Any, slot: int) -> int:
    """Optimizer steps that the rank of that page has completed."""
    (steps,) = _STEPS.unpack_from(memory, PAGE_BYTES * slot)
    return int(steps)


def read_line(memory: Any, slot: int) -> tuple[str, str]:
    """The main thread's line, and the collective that its stack shows; both empty if the rank cannot note them now."""
    line, own, noted_s = _LINE.unpack_from(memory, PAGE_BYTES * slot + _STEPS.size)
    return (_read(line), _read(own)) if clock_s() - noted_s < _FRESH_S else ("", "")


def read_entries(memory: Any, slot: int) -> list[Entry]:
    """The rows of a page; one that changes while it is read is left out: nothing waits in it."""
    entries = []
    for index in range(NUM_ROWS):
        at = PAGE_BYTES * slot + _ROWS_FROM + _ROW.size * index
        edition, state, *numbers, operation, group, ranks, last = _ROW.unpack_from(memory, at)
        if edition == last and state != FREE:
            entries.append(Entry(state, *numbers, *map(_read, (operation, group, ranks))))
    return entries


def progress(memory: Any, slot: int) -> bytes:
    """The part of a page that changes with each step and collective."""
    at = PAGE_BYTES * slot
    return bytes(memory[at : at + _STEPS.size]) + bytes(memory[at + _ROWS_FROM : at + PAGE_BYTES])


def parse_ranks(text: str) -> tuple[int, ...]:
    """The members of a group: "0-3" are four, "0-6:2" every second of seven, "0,3,4" just these; empty: unknown."""
    ranks: list[int] = []
    for part in filter(None, text.split(",")):
        span, _, stride = part.partition(":")
        first, _, last = span.partition("-")
        ranks += range(int(first), int(last or first) + 1, int(stride or 1))
    return tuple(ranks)


def _text(text: str, size_bytes: int) -> bytes:
    return text.encode(errors="replace")[: size_bytes - 1]


def _read(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")
