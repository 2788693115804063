"""What the meter keeps of a transfer until its step is summed up: clock readings, or events on a CUDA stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from lightning_multigpu.communication.metering.collective_observer import Note
from lightning_multigpu.communication.metering.traffic import Interval


class Transfer(Protocol):
    """One transfer under way. :meth:`finish` is called once, by whichever thread sees it end, or else :meth:`broke`."""

    def finish(self) -> None: ...

    def awaited(self) -> None:
        """From now on the calling thread does nothing but wait for it."""

    def broke(self) -> None:
        """It has raised an error, and will not be finished."""


@dataclass
class HostRecord:
    """A transfer timed by the host's clock."""

    operation: str
    group: str
    group_size: int
    size_bytes: int
    sent_bytes: int
    blocking: bool
    start_s: float
    end_s: float | None = None
    memory_bytes: int = 0
    clock: Callable[[], float] = field(default=time.perf_counter, repr=False)
    note: Note | None = field(default=None, repr=False)

    def finish(self) -> None:
        self.end_s = self.clock()
        if self.note is not None:
            self.note.ended()

    def awaited(self) -> None:
        if self.note is not None:
            self.note.awaited()

    def broke(self) -> None:
        self.end_s = self.clock()
        if self.note is not None:
            self.note.broke()

    def done(self) -> bool:
        return self.end_s is not None

    def interval(self) -> Interval:
        assert self.end_s is not None
        return self.start_s, self.end_s


@dataclass
class CudaRecord:
    """A transfer timed on its stream: the host neither waits for it nor looks at a clock."""

    operation: str
    group: str
    group_size: int
    size_bytes: int
    sent_bytes: int
    blocking: bool
    epoch: tuple[torch.cuda.Event, float]
    start: torch.cuda.Event
    end: torch.cuda.Event
    recorded: bool = False
    memory_bytes: int = 0

    def finish(self) -> None:
        self.end.record()
        self.recorded = True

    def awaited(self) -> None:
        """Nothing to note: the host does not know when a stream waits."""

    def broke(self) -> None:
        self.finish()

    def done(self) -> bool:
        return self.recorded and bool(self.end.query())  # type: ignore[no-untyped-call]

    def interval(self) -> Interval:
        return _on_host_clock(self.epoch, self.start), _on_host_clock(self.epoch, self.end)


@dataclass
class CudaWait:
    epoch: tuple[torch.cuda.Event, float]
    start: torch.cuda.Event
    end: torch.cuda.Event

    def done(self) -> bool:
        return bool(self.end.query())  # type: ignore[no-untyped-call]

    def interval(self) -> Interval:
        return _on_host_clock(self.epoch, self.start), _on_host_clock(self.epoch, self.end)


@dataclass
class HostWait:
    start_s: float
    end_s: float

    def done(self) -> bool:
        return True

    def interval(self) -> Interval:
        return self.start_s, self.end_s


@dataclass
class PendingStep:
    index: int
    start_s: float
    end_s: float
    records: list[HostRecord | CudaRecord]
    waits: list[HostWait | CudaWait]

    def done(self) -> bool:
        return all(r.done() for r in self.records) and all(w.done() for w in self.waits)


def recorded_event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def _on_host_clock(epoch: tuple[torch.cuda.Event, float], event: torch.cuda.Event) -> float:
    origin, origin_s = epoch
    return origin_s + float(origin.elapsed_time(event)) / 1e3
