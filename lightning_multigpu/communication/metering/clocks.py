"""Clocks of the host and of CUDA streams, which time work without waiting for the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch


class Clock(Protocol):
    """A source of opaque marks; on a GPU a mark's time is known only when the device has reached it."""

    def mark(self) -> Any:
        """The present moment."""

    def passed(self, mark: Any) -> bool:
        """Whether the time of the mark is known."""

    def wait(self, mark: Any) -> None:
        """Returns when the time of the mark is known."""

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds between two passed marks."""

    def origin(self) -> tuple[Any, float]:
        """A mark and its time on the host's clock, from which the times of other marks follow; waits for the device."""


class HostClock:
    """The host's clock, for devices on which an operation has ended when its call returns."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now

    def mark(self) -> float:
        return self._now()

    def passed(self, mark: float) -> bool:
        return True

    def wait(self, mark: float) -> None:
        return None

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def origin(self) -> tuple[float, float]:
        return 0.0, 0.0


class StreamClock:
    """Events on the current CUDA stream: the host runs ahead of a GPU, so its own clock would time the queueing only.

    ``now`` is the host's clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter, device: torch.device | None = None) -> None:
        self._now = now
        self._device = device

    def mark(self) -> torch.cuda.Event:
        return recorded_event()

    def passed(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())  # type: ignore[no-untyped-call]

    def wait(self, mark: torch.cuda.Event) -> None:
        mark.synchronize()

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end)) / 1e3

    def origin(self) -> tuple[torch.cuda.Event, float]:
        torch.cuda.synchronize(self._device)
        event = recorded_event()
        event.synchronize()
        return event, self._now()


def recorded_event() -> torch.cuda.Event:
    """A new event with timing, recorded on the current CUDA stream."""
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event


def clock_of(device: torch.device) -> Clock:
    """The clock that times the work of a device."""
    return StreamClock(device=device) if device.type == "cuda" else HostClock()


def synchronise(device: torch.device) -> None:
    """Returns when the device has completed all of its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
