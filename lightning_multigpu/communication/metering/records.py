"""Transfers and waits, which the meter keeps until their optimizer step is summed up."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_multigpu.communication.metering.clocks import Clock
from lightning_multigpu.communication.metering.traffic import Interval

_LOOK_S = 0.5


@dataclass(kw_only=True)
class Wait:
    """A time in which the main thread, or the compute stream, does nothing but wait for transfers.

    Attributes:
        clock: the clock of the marks.
        origin: a mark of the clock and its time on the host's clock.
        start, end: its marks; None before the end.
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
            self.note.awaited()
        return False

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
