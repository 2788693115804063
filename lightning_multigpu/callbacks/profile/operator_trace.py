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

from lightning_multigpu.planning.rank_figures import LaunchQueue

_ANCHOR = "lightning_multigpu: clock"
_MOST_OPERATORS = 12
_MOST_EVENTS = 20_000
_GPU_CATEGORIES = ("kernel", "gpu_memcpy", "gpu_memset")
_CATEGORIES = ("cpu_op", "user_annotation", *_GPU_CATEGORIES)
_LAUNCHING = ("cuda_runtime", "cuda_driver", "cpu_op")


class OperatorTrace:
    """The operators of a training step, on the CPU and on a GPU.

    They are recorded between :meth:`start` and :meth:`stop`.

    Args:
        now: the clock on which :attr:`events` are, in seconds.

    Attributes:
        most: the 12 operators that take the most time by themselves: name, calls, seconds on the CPU and on a GPU.
        events: of all operators, within each other, the longest first and at most 20,000 of them: name, thread, start
            and end in seconds. Threads are numbered in the order of their first operators, from 0 up, and streams of
            a GPU from -1 down.
        launches: of the GPU's kernels; None without a GPU.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.most: list[tuple[str, float, float, float]] = []
        self.events: list[tuple[str, int, float, float]] = []
        self.launches: LaunchQueue | None = None
        self._now = now
        self._anchor_s = 0.0
        self._profile: profile | None = None

    def start(self) -> None:
        """Begins; the first time in a process takes seconds, in which torch looks for what it can trace."""
        self._profile = profile(activities=[ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * torch.cuda.is_available()])
        level = os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it tells the terminal of its start and stop
        self._profile.start()
        if level == "99":
            del os.environ["KINETO_LOG_LEVEL"]
        with record_function(_ANCHOR):
            self._anchor_s = self._now()

    def stop(self) -> None:
        """Ends; may be called more than once."""
        if self._profile is None:
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
        anchor = next(event for event in written if event.get("name") == _ANCHOR)
        self._read(written, self._anchor_s - float(anchor["ts"]) / 1e6)

    def _read(self, written: list[dict[str, Any]], origin_s: float) -> None:
        """Sums up the events of a trace; ``origin_s`` is the clock at its 0."""
        written = [e for e in written if e.get("ph") == "X" and e["name"] != _ANCHOR]
        spans = [event for event in written if event.get("cat") in _CATEGORIES]
        threads: dict[bool, dict[Any, int]] = {False: {}, True: {}}
        of_operators: dict[str, list[float]] = {}
        open_spans: dict[int, list[tuple[str, float]]] = {}
        for event in sorted(spans, key=lambda event: (event["ts"], -event["dur"])):
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
        operators = [(name, calls, cpu_s, gpu_s) for name, (calls, cpu_s, gpu_s) in of_operators.items()]
        self.most = sorted(operators, key=lambda operator: -max(operator[2:]))[:_MOST_OPERATORS]
        self.launches = _launches(written)


def _launches(written: list[dict[str, Any]]) -> LaunchQueue | None:
    """The queue of a step, by the numbers that a launch and its kernels have in common."""
    numbered = [event for event in written if "correlation" in event.get("args", {})]
    launched_us = {
        event["args"]["correlation"]: event["ts"]
        for event in numbered
        if "Launch" in event["name"] and event.get("cat") in _LAUNCHING
    }
    kernels = [
        (launched_us[event["args"]["correlation"]] / 1e6, event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
        for event in numbered
        if event.get("cat") == "kernel" and event["args"]["correlation"] in launched_us
    ]
    return LaunchQueue.of(kernels)
