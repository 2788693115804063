"""Counts where a program reads values of tensors, which makes the host wait for the device."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch

_READING = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__")
_LIBRARIES = ("torch", "lightning", "lightning_multigpu", "lightning_utilities", "torchmetrics")
_MOST_LINES = 5
_LOOP_READS = 20
_LOOP_TURN_S = 2e-4
_CALIBRATING_READS = 200


@dataclass
class _Line:
    start_s: float
    end_s: float = 0.0
    count: int = 0
    seconds: float = 0.0

    def cost_s(self, turn_s: float) -> float:
        """The time of its reads, or of its loop, without the time of counting, ``turn_s`` a read."""
        loop_s = self.end_s - self.start_s
        is_loop = self.count >= _LOOP_READS and loop_s < self.count * _LOOP_TURN_S
        return max(0.0, (loop_s if is_loop else self.seconds) - self.count * turn_s)


class ValueReads:
    """The reads of tensors' values within :meth:`watched`, by the line of the user's program that asks for them.

    A line that reads again and again without much in between is a loop: its time is that of the loop, with the
    indexing that selects each value.
    """

    def __init__(self) -> None:
        self._by_line: dict[str, _Line] = {}
        self._block_s = 0.0

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Counts and times each call of ``item()``, ``tolist()``, ``float(tensor)`` and the like in the block."""
        own = {name: torch.Tensor.__dict__[name] for name in _READING if name in torch.Tensor.__dict__}
        for name in _READING:
            setattr(torch.Tensor, name, self._counting(getattr(torch.Tensor, name)))
        start_s = time.perf_counter()
        try:
            yield
        finally:
            self._block_s = time.perf_counter() - start_s
            for name in _READING:
                delattr(torch.Tensor, name)
            for name, method in own.items():  # that somebody else has put there
                setattr(torch.Tensor, name, method)

    def most(self) -> list[tuple[str, int, float]]:
        """The five lines that take the most time: line, number of reads, and the share of the block's time."""
        turn_s = self._turn_s()
        block_s = self._block_s - turn_s * sum(line.count for line in self._by_line.values())
        reads = [(name, line.count, line.cost_s(turn_s) / block_s) for name, line in self._by_line.items()]
        return sorted(reads, key=lambda read: -read[2])[:_MOST_LINES]

    def _turn_s(self) -> float:
        """Seconds by which counting makes a read longer."""
        plain, counted, zero = torch.Tensor.item, ValueReads()._counting(torch.Tensor.item), torch.zeros(())
        took_s = []
        for read in (plain, counted):
            start_s = time.perf_counter()
            for _ in range(_CALIBRATING_READS):
                read(zero)
            took_s.append((time.perf_counter() - start_s) / _CALIBRATING_READS)
        return max(0.0, took_s[1] - took_s[0])

    def _counting(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            start_s = time.perf_counter()
            try:
                return read(*args, **kwargs)
            finally:
                end_s = time.perf_counter()
                line = self._by_line.setdefault(_line_of(sys._getframe(1)), _Line(start_s))
                line.count += 1
                line.seconds += end_s - start_s
                line.end_s = end_s

        return counted


def _line_of(frame: FrameType) -> str:
    """File and line of the innermost frame that is no library's; of the frame itself if all are."""
    found: FrameType | None = frame
    while found is not None and found.f_globals.get("__name__", "").partition(".")[0] in _LIBRARIES:
        found = found.f_back
    found = found or frame
    return f"{Path(found.f_code.co_filename).name}:{found.f_lineno}"
