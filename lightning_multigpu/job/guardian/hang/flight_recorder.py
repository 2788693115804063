"""The flight recorder: a rank's steps and collectives in memory that the guardian reads without asking.

Every rank of a host shares one page of memory with the guardian. It contains the number of completed steps, and one row
for each of the rank's process groups, with the group's oldest collective that has not ended::

    page of a rank   | steps | row of group "data" | row of group "world" | ... | free rows |
    row of a group   | edition | state, begun, number, since, thread, operation | edition | group, ranks, place |

A collective is identified by its group and its number in the group: ranks count from 1, and all begin a group's
collectives in the same order. The rank writes with plain stores; if a reader finds two different editions, the row has
changed while it was read.
"""

from __future__ import annotations

import struct
import sys
import threading
from typing import Any, NamedTuple

from lightning_multigpu.job.guardian.hang.stacks import place_of_frame
from lightning_multigpu.job.guardian.proc import clock_s

PAGE_BYTES = 4096
_MAX_RANKS = 1 << 14
_ROWS_FROM, _ROW_BYTES = 256, 256
NUM_ROWS = (PAGE_BYTES - _ROWS_FROM) // _ROW_BYTES

FREE, ENDED, UNDER_WAY, AWAITED, BROKEN = range(5)
DEVICE = 0

_STEPS = struct.Struct("q")
_CHANGING = struct.Struct("QqqqdQ24sQ")
_LASTING = struct.Struct("24s40s")
_PLACE = struct.Struct("96s")
_LASTING_AT = _CHANGING.size
_PLACE_AT = _LASTING_AT + _LASTING.size
assert _PLACE_AT + _PLACE.size <= _ROW_BYTES


class Entry(NamedTuple):
    """One row of a rank's page.

    Attributes:
        group: the name of the process group: "data".
        ranks: its members, for :func:`parse_ranks`; empty if unknown.
        state: :data:`ENDED`, nothing is under way; :data:`UNDER_WAY`, no thread waits for it so far; :data:`AWAITED`, a
            thread waits for it; :data:`BROKEN`, it has raised an error.
        begun: the number of the collective that was begun last.
        number: the number of the collective in this row, the oldest that has not ended.
        operation: its name in ``torch.distributed``.
        since_s: the time at which its thread began to wait, on CLOCK_BOOTTIME.
        thread: the ``threading.get_ident()`` of that thread; :data:`DEVICE` if the rank's device waits.
        place: for a broken one, the line of the main thread.
    """

    group: str
    ranks: str
    state: int
    begun: int
    number: int
    operation: str
    since_s: float
    thread: int
    place: str

    @property
    def name(self) -> str:
        """ "all_reduce #118 of group data"."""
        return f"{self.operation} #{self.number} of group {self.group}"


class Note:
    """One collective of this rank that is under way. Exactly one of :meth:`ended` and :meth:`broke` is called."""

    __slots__ = ("_recorder", "_row", "number", "operation", "since_s", "state", "thread")

    def __init__(self, flight_recorder: FlightRecorder, row: _Row, operation: bytes, state: int) -> None:
        self._recorder, self._row = flight_recorder, row
        self.operation, self.state = operation, state
        self.number = 0
        self.since_s = clock_s()
        self.thread = threading.get_ident()

    def awaited(self, *, by_device: bool = False) -> None:
        """Notes that the calling thread, or the rank's device, begins to wait for it."""
        self.state, self.since_s, self.thread = AWAITED, clock_s(), DEVICE if by_device else threading.get_ident()
        self._recorder._changed(self._row)

    def ended(self) -> None:
        self._recorder._remove(self._row, self, ENDED)

    def broke(self) -> None:
        """Notes an error: the collective stays readable until the group's next one, with the main thread's line."""
        self._recorder._remove(self._row, self, BROKEN)


class _Row:
    __slots__ = ("at", "begun", "edition", "pending")

    def __init__(self, at: int) -> None:
        self.at = at
        self.begun = self.edition = 0
        self.pending: list[Note] = []


class FlightRecorder:
    """The writer of page ``slot`` of the host's pages. Any thread may write."""

    def __init__(self, memory: Any, slot: int) -> None:
        self._memory = memory
        self._at = PAGE_BYTES * slot
        self._rows: dict[tuple[str, str], _Row | None] = {}
        self._lock = threading.Lock()

    def completed(self, step: int) -> None:
        """Notes that ``step`` optimizer steps are done."""
        _STEPS.pack_into(self._memory, self._at, step)

    def began(self, operation: str, *, group: str, ranks: str, awaited: bool = True) -> Note | None:
        """Notes that this rank begins a collective; None if the page has no row left for the group.

        Args:
            ranks: its members ("0-3", "0-6:2", "0,3,4"), or empty: then only its name identifies it.
            awaited: the calling thread waits for it from now on.
        """
        row = self._row(group, ranks)
        if row is None:
            return None
        note = Note(self, row, _text(operation, 24), AWAITED if awaited else UNDER_WAY)
        with self._lock:
            row.begun += 1
            note.number = row.begun
            row.pending.append(note)
            self._write(row, row.pending[0], row.pending[0].state)
        return note

    def detach(self) -> None:
        """Releases the shared memory: nobody reads later notes."""
        # The old memory is freed with its last user: a thread may be writing to it now.
        self._memory = bytearray(self._at + PAGE_BYTES)

    def _row(self, group: str, ranks: str) -> _Row | None:
        try:
            return self._rows[group, ranks]
        except KeyError:
            pass
        with self._lock:
            if (group, ranks) not in self._rows:
                index = len(self._rows)
                row = _Row(self._at + _ROWS_FROM + _ROW_BYTES * index) if index < NUM_ROWS else None
                if row is not None:
                    shown = ranks.encode() if len(ranks) < 40 else b""
                    _LASTING.pack_into(self._memory, row.at + _LASTING_AT, _text(group, 24), shown)
                self._rows[group, ranks] = row
            return self._rows[group, ranks]

    def _changed(self, row: _Row) -> None:
        with self._lock:
            if row.pending:
                self._write(row, row.pending[0], row.pending[0].state)

    def _remove(self, row: _Row, note: Note, state: int) -> None:
        frame = sys._current_frames().get(threading.main_thread().ident or 0) if state == BROKEN else None
        while frame is not None and frame.f_code.co_filename == __file__:
            frame = frame.f_back
        place = "" if frame is None else place_of_frame(frame)
        with self._lock:
            if note not in row.pending:
                return
            row.pending.remove(note)
            if state == BROKEN:
                _PLACE.pack_into(self._memory, row.at + _PLACE_AT, _text(place, _PLACE.size))
                self._write(row, note, BROKEN)
            elif row.pending:
                self._write(row, row.pending[0], row.pending[0].state)
            else:
                self._write(row, note, ENDED)

    def _write(self, row: _Row, note: Note, state: int) -> None:
        row.edition += 1
        _CHANGING.pack_into(
            self._memory, row.at, row.edition, state, row.begun, note.number, note.since_s, note.thread,
            note.operation, row.edition,
        )  # fmt: skip


def read_steps(memory: Any, slot: int) -> int:
    """Optimizer steps that the rank of that page has completed."""
    (steps,) = _STEPS.unpack_from(memory, PAGE_BYTES * slot)
    return int(steps)


def read_entries(memory: Any, slot: int, *, attempts: int = 5) -> list[Entry]:
    """The rows of a page, in the order of the rank's first use of its groups.

    A row that changes faster than it can be read is left out: nothing waits in it.
    """
    entries = []
    for index in range(NUM_ROWS):
        at = PAGE_BYTES * slot + _ROWS_FROM + _ROW_BYTES * index
        for _ in range(attempts):
            first, again = (bytes(memory[at : at + _ROW_BYTES]) for _ in range(2))
            edition, state, begun, number, since_s, thread, operation, last = _CHANGING.unpack_from(first)
            if first == again and edition == last:
                break
        else:
            continue
        if state == FREE:
            break  # rows are taken in their order
        group, ranks = _LASTING.unpack_from(first, _LASTING_AT)
        place = _read(*_PLACE.unpack_from(first, _PLACE_AT)) if state == BROKEN else ""
        changing = state, begun, number, _read(operation), since_s, thread
        entries.append(Entry(_read(group), _read(ranks), *changing, place))
    return entries


def parse_ranks(text: str) -> tuple[int, ...]:
    """The members of a group: "0-3" are four, "0-6:2" every second of seven, "0,3,4" just these; empty: unknown.

    An invalid text, or one with more than 16,384 members, gives no members either.
    """
    ranks: list[int] = []
    try:
        for part in filter(None, text.split(",")):
            span, _, stride = part.partition(":")
            first, _, last = span.partition("-")
            members = range(int(first), int(last or first) + 1, int(stride or 1))
            if len(ranks) + len(members) > _MAX_RANKS:
                return ()
            ranks += members
    except (ValueError, OverflowError):  # the length of a range, too, has a limit
        return ()
    return tuple(ranks)


def _text(text: str, size_bytes: int) -> bytes:
    return text.encode(errors="replace")[: size_bytes - 1]


def _read(data: bytes) -> str:
    return data.rstrip(b"\0").decode(errors="replace")
