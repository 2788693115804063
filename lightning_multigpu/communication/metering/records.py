"""Transfers and waits, which the meter keeps until their optimizer step is summed up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_multigpu.communication.metering.clocks import recorded_event
from lightning_multigpu.communication.metering.traffic import Interval

_LOOK_S = 0.5


Mark = float | torch.cuda.Event
"""A moment: seconds on the host's clock, or an event on a CUDA stream, whose time is known when it has passed."""


@dataclass(kw_only=True, slots=True)
class Wait:
    """A time in which the main thread, or the compute stream, does nothing but wait for transfers.

    Attributes:
        start, end: None before the end.
        origin: of events: an event and its time on the host's clock.
    """

    start: Any
    end: Any = None
    origin: tuple[torch.cuda.Event, float] | None = field(default=None, repr=False)

    def done(self) -> bool:
        # Two events may be on different streams, of which either may be behind.
        return self.end is not None and (self.origin is None or (self.end.query() and self.start.query()))

    def interval(self) -> Interval:
        """Start and end on the host's clock."""
        if self.origin is None:
            return self.start, self.end
        event, event_s = self.origin
        return event_s + event.elapsed_time(self.start) / 1e3, event_s + event.elapsed_time(self.end) / 1e3


@dataclass(kw_only=True, slots=True)
class Transfer(Wait):
    """One transfer under way; the thread that sees its end calls :meth:`finish`, or :meth:`broke` at an error.

    As a context manager it ends with the block. On a CUDA stream the host does not wait for the end of a transfer:
    :meth:`report` checks for it. ``now`` is the host's clock.
    """

    operation: str
    group: str
    group_size: int
    size_bytes: int
    sent_bytes: int
    blocking: bool
    now: Callable[[], float] = field(repr=False)
    memory_bytes: int = 0
    note: Any = field(default=None, repr=False)  # what Meter.notes has returned
    is_reached: bool = False

    def __enter__(self) -> Transfer:
        return self

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if error is None:
            self.finish()
        else:
            self.broke()

    def finish(self) -> None:
        self.end = self.now() if self.origin is None else event_beside(self.start)
        if self.note is not None and (self.origin is None or self.end.query()):
            self.note.ended()

    def report(self) -> bool:
        """Reports that the device has reached, or ended, the transfer; returns whether it has ended."""
        if self.done():
            if self.note is not None:
                self.note.ended()
            return True
        if self.note is not None and not self.is_reached and self.start.query():
            self.is_reached = True
            self.note.awaited()
        return False

    def broke(self) -> None:
        """Ends the transfer after an error."""
        self.end = self.now() if self.origin is None else event_beside(self.start)
        if self.note is not None:
            self.note.broke()


def event_beside(event: torch.cuda.Event) -> torch.cuda.Event:
    """A new event on the device of another one: the thread that sees a transfer's end may have another device."""
    if event.device.index == torch.cuda.current_device():
        return recorded_event()
    with torch.cuda.device(event.device):
        return recorded_event()


@dataclass
class PendingStep:
    """An optimizer step that has ended; its transfers may still be under way."""

    index: int
    start_s: float
    end_s: float
    transfers: list[Transfer]
    waits: list[Wait]

    def __post_init__(self) -> None:
        self.num_records = 1 + len(self.transfers) + len(self.waits)

    def done(self) -> bool:
        return all(record.done() for record in (*self.transfers, *self.waits))


class StreamWatch:
    """Checks the events of transfers that the host has put on a stream and does not wait for.

    The host continues, or waits for the device in a CUDA function such as ``.item()``; only the events show what the
    device waits for. A thread checks them twice a second, from the first transfer until :meth:`stop`.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: list[Transfer] = []
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    def add(self, transfer: Transfer) -> None:
        """Adds a transfer whose begin was noted."""
        with self._lock:
            self._under_way.append(transfer)
            if self._thread is None:
                device = torch.cuda.current_device()
                self._thread = threading.Thread(target=self._run, args=(device,), name="stream-watch", daemon=True)
                self._thread.start()

    def look(self) -> None:
        """Reports the transfers that the device has reached or ended."""
        with self._lock:
            transfers = list(self._under_way)
        ended = {id(transfer) for transfer in transfers if transfer.report()}
        with self._lock:
            self._under_way = [transfer for transfer in self._under_way if id(transfer) not in ended]

    def stop(self) -> None:
        """Ends the thread; transfers under way are forgotten."""
        self._stopping.set()
        if self._thread is not None:
            self._thread.join(timeout=5)
        self._thread, self._under_way, self._stopping = None, [], threading.Event()

    def _run(self, device: int) -> None:
        stopping = self._stopping
        torch.cuda.set_device(device)  # a new thread uses device 0, which is another rank's
        while not stopping.wait(_LOOK_S):
            try:
                self.look()
            except RuntimeError:  # the device has failed; every thread that waits for it gets the error too
                return
