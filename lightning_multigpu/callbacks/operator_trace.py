"""The operators of one step, by torch's profiler."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.profiler import ProfilerActivity, profile, record_function

_ANCHOR = "lightning_multigpu: clock"
_MOST_EVENTS = 20_000
_GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
_CATEGORIES = ("cpu_op", "user_annotation", *_GPU_CATEGORIES)


class OperatorTrace:
    """Records the operators between :meth:`start` and :meth:`stop`, on the CPU and on a GPU.

    Args:
        now: the clock on which :attr:`events` are, in seconds.

    Attributes:
        most: the operators that take the most time by themselves: name, calls, seconds on the CPU, seconds on a GPU.
        events: of all operators, within each other, the longest first and at most 20,000 of them: name, thread, start
            and end in seconds. Threads are numbered in the order of their first operators, from 0 up, and streams of
            a GPU from -1 down.
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
        try:
            with tempfile.TemporaryDirectory() as directory:
                path = Path(directory) / "trace.json"
                recorded.export_chrome_trace(str(path))
                written = json.loads(path.read_text())["traceEvents"]
        except (OSError, ValueError) as error:  # training goes on: no room, or half a file
            rank_zero_warn(f"the operators of a step are not in the profile: {error}")
            return
        finally:
            # Freed here, and not by Python's garbage collector, where torch 2.13 crashed in a third of a test's runs.
            recorded.profiler = None
        self._read(written, count)

    def _read(self, written: list[dict[str, Any]], count: int) -> None:
        """Sums up the events of a trace file."""
        spans = [event for event in written if event.get("ph") == "X" and event.get("cat") in _CATEGORIES]
        anchor = next(event for event in spans if event["name"] == _ANCHOR)
        origin_s = self._anchor_s - float(anchor["ts"]) / 1e6
        threads: dict[bool, dict[Any, int]] = {False: {}, True: {}}
        of_operators: dict[str, list[float]] = {}
        open_spans: dict[int, list[tuple[str, float]]] = {}
        for event in sorted(spans, key=lambda event: (event["ts"], -event["dur"])):
            if event is anchor:
                continue
            on_gpu = event["cat"] in _GPU_CATEGORIES
            number = threads[on_gpu].setdefault(event["tid"], len(threads[on_gpu]))
            thread = -1 - number if on_gpu else number
            start_s, seconds = origin_s + event["ts"] / 1e6, event["dur"] / 1e6
            self.events.append((event["name"], thread, start_s, start_s + seconds))
            total = of_operators.setdefault(event["name"], [0, 0.0, 0.0])
            total[0] += 1
            total[2 if on_gpu else 1] += seconds
            around = open_spans.setdefault(thread, [])
            while around and around[-1][1] <= start_s:
                around.pop()
            if around and not on_gpu:  # the time of an operator within another one is not the other's own
                of_operators[around[-1][0]][1] -= seconds
            around.append((event["name"], start_s + seconds))
        self.events = sorted(self.events, key=lambda event: event[2] - event[3])[:_MOST_EVENTS]
        operators = [(name, int(calls), cpu_s, gpu_s) for name, (calls, cpu_s, gpu_s) in of_operators.items()]
        self.most = sorted(operators, key=lambda operator: -max(operator[2:]))[:count]
