"""The operators of one step, by torch's profiler."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

_ANCHOR = "lightning_multigpu: clock"
_MOST_EVENTS = 20_000


class OperatorTrace:
    """Records the operators between :meth:`start` and :meth:`stop`, on the CPU and on a GPU.

    Args:
        now: the clock on which :attr:`events` are, in seconds.

    Attributes:
        most: the operators that take the most time by themselves: name, calls, seconds on the CPU, seconds on a GPU.
        events: of all operators, within each other, the longest first and at most 20,000 of them: name, thread, start
            and end in seconds. Threads of a GPU are its streams, below 0.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.most: list[tuple[str, int, float, float]] = []
        self.events: list[tuple[str, int, float, float]] = []
        self._now = now
        self._anchor_s = 0.0
        activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * torch.cuda.is_available()]
        self._profile: profile | None = profile(activities=activities)

    def start(self) -> None:
        """Begins; the first time in a process takes seconds, in which torch looks for what it can trace."""
        assert self._profile is not None
        level = os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it tells the terminal of its start and stop
        self._profile.start()
        if level == "99":
            del os.environ["KINETO_LOG_LEVEL"]
        with record_function(_ANCHOR):
            self._anchor_s = self._now()

    def stop(self, count: int = 12) -> None:
        """Ends; may be called more than once.

        Args:
            count: how many operators :attr:`most` has.
        """
        if self._profile is None or self._anchor_s == 0.0:
            return
        recorded, self._profile = self._profile, None
        recorded.stop()
        found: Any = recorded.events()  # type: ignore[no-untyped-call]
        anchor = next(event for event in found if event.name == _ANCHOR)
        origin_s = self._anchor_s - anchor.time_range.start / 1e6
        traced = [
            (
                event.name,
                event.thread if event.device_type.name == "CPU" else -1 - event.device_resource_id,
                origin_s + event.time_range.start / 1e6,
                origin_s + event.time_range.end / 1e6,
            )
            for event in found
            if event is not anchor
        ]
        self.events = sorted(traced, key=lambda event: event[2] - event[3])[:_MOST_EVENTS]
        totals: Any = recorded.key_averages()
        operators = [
            (total.key, total.count, total.self_cpu_time_total / 1e6, total.self_device_time_total / 1e6)
            for total in totals
            if total.key != _ANCHOR and not total.key.startswith("ProfilerStep")
        ]
        self.most = sorted(operators, key=lambda operator: -max(operator[2:]))[:count]
