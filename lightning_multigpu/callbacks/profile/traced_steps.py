"""Steps under torch's profiler: the launches of kernels, and reads of values."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.utilities import rank_zero_warn
from torch.autograd.profiler_util import FunctionEvent
from torch.profiler import ProfilerActivity, profile

from lightning_multigpu.report.rank_figures import LaunchQueue, ReadValues

_MOST_LINES = 5
_LAUNCHING = ("cuda_runtime", "cuda_driver", "cpu_op")
_READ = "aten::_local_scalar_dense"
"""The operator of ``item()``, ``float(tensor)``, ``if tensor`` and the like."""
_FUNCTION = re.compile(r"(?!torch/|lightning|torchmetrics/|<)\S+\(\d+\): ")


@contextmanager
def traced(read: Callable[[profile], None], *, with_stack: bool) -> Iterator[None]:
    """Records the block; ``read`` gets the record at its end. The first time in a process takes seconds."""
    devices = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * torch.cuda.is_available()]
    recorded, is_whole = profile(activities=devices, with_stack=with_stack), False
    level = os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it tells the terminal of its start and stop
    recorded.start()
    if level == "99":
        del os.environ["KINETO_LOG_LEVEL"]
    try:
        yield
        is_whole = True
    finally:
        recorded.stop()
        try:
            if is_whole:
                read(recorded)
        finally:
            # Freed here, and not by Python's garbage collector, where torch 2.13 crashed in a third of a test's runs.
            recorded.profiler = None


def launches_of(recorded: profile) -> LaunchQueue | None:
    """The queue of a GPU's kernels, by the numbers that a launch and its kernels have in common; None without room."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        try:
            recorded.export_chrome_trace(str(path))
            written: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
        except (OSError, ValueError) as error:  # training goes on: no room, or half a file
            rank_zero_warn(f"the kernels of a step were not counted: {error}")
            return None
    numbered = [event for event in written if event.get("ph") == "X" and "correlation" in event.get("args", {})]
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


def reads_of(recorded: profile) -> list[ReadValues]:
    """The five functions of the user's program that wait longest for values, from a record with stacks.

    A function waits where it reads a value, and on a GPU wherever it synchronises with the device.
    """
    found: dict[str, tuple[int, float]] = {}
    for event in recorded.events() or ():  # type: ignore[no-untyped-call]
        if event.name != _READ and not event.name.endswith("Synchronize"):
            continue
        around = list(_around(event))
        function = next((name for name in around if _FUNCTION.match(name)), None)
        if function is not None and _READ not in around:
            count, seconds = found.get(function, (0, 0.0))
            found[function] = count + 1, seconds + event.time_range.elapsed_us() / 1e6
    reads = [ReadValues(function, count, seconds) for function, (count, seconds) in found.items()]
    return sorted(reads, key=lambda read: -read.seconds)[:_MOST_LINES]


def _around(event: FunctionEvent) -> Iterator[str]:
    """The names of the operators and functions that an event is in, the innermost first."""
    parent = event.cpu_parent
    while parent is not None:
        yield parent.name
        parent = parent.cpu_parent
