"""Records of transfers and waits, which the meter keeps until their optimizer step is summed up."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lightning_multigpu.communication.metering.clocks import Clock
from lightning_multigpu.communication.metering.collective_observer import CollectiveNote
from lightning_multigpu.communication.metering.traffic import Interval


@dataclass(kw_only=True)
class Wait:
    """A time in which the main thread, or the compute stream, does nothing but wait for transfers.

    Attributes:
        clock: the clock of the marks.
        origin: a mark of the clock and its time on the host's clock.
        start: the mark of its start.
        end: the mark of its end; None before the end.
    """

    clock: Clock = field(repr=False)
    origin: tuple[Any, float] = field(repr=False)
    start: Any
    end: Any = None

    def done(self) -> bool:
        # The two may be on different streams, of which either may be behind.
        return self.end is not None and self.clock.passed(self.end) and self.clock.passed(self.start)

    def interval(self) -> Interval:
        """Start and end on the host's clock."""
        mark, mark_s = self.origin
        return mark_s + self.clock.seconds(mark, self.start), mark_s + self.clock.seconds(mark, self.end)


@dataclass(kw_only=True)
class Transfer(Wait):
    """One transfer under way; the thread that sees its end calls :meth:`finish`, or :meth:`broke` at an error.

    As a context manager it ends with the block. On a CUDA stream the host does not wait for the end of a transfer:
    :meth:`report` checks for it.
    """

    operation: str
    group: str
    group_size: int
    size_bytes: int
    sent_bytes: int
    blocking: bool
    memory_bytes: int = 0
    note: CollectiveNote | None = field(default=None, repr=False)
    is_reached: bool = False

    def __enter__(self) -> Transfer:
        return self

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if error is None:
            self.finish()
        else:
            self.broke()

    def finish(self) -> None:
        self.end = self.clock.mark(self.start)
        if self.note is not None and self.clock.passed(self.end):
            self.note.ended()

    def report(self) -> bool:
        """Reports that the device has reached, or ended, the transfer; returns whether it has ended."""
        if self.done():
            if self.note is not None:
                self.note.ended()
            return True
        if self.note is not None and not self.is_reached and self.clock.passed(self.start):
            self.is_reached = True
            self.note.awaited(by_device=True)
        return False

    def awaited(self) -> None:
        """Reports that the calling thread waits for the transfer from now on."""
        if self.note is not None:
            self.note.awaited()

    def broke(self) -> None:
        """Ends the transfer after an error."""
        self.end = self.clock.mark(self.start)
        if self.note is not None:
            self.note.broke()


@dataclass
class PendingStep:
    """An optimizer step that has ended; its transfers may still be under way."""

    index: int
    start_s: float
    end_s: float
    transfers: list[Transfer]
    waits: list[Wait]

    def done(self) -> bool:
        return all(record.done() for record in (*self.transfers, *self.waits))
