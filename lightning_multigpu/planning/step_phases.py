"""Phases of a training step on one rank: each moment of the main thread belongs to one phase.

::

    Lightning's actions   |data|move|     run_training_batch            |callbacks|
                                    |training_step| backward |optimizer |
    exposed transfers                                  |---|
    phases                 data  move   forward      back exp  optimizer  callbacks
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain, pairwise

PHASES = (
    "data_wait",
    "device_transfer",
    "forward",
    "backward",
    "communication",
    "stage_wait",
    "optimizer",
    "callbacks",
    "other",
)
"""In the order in which reports show them.

"communication" is the exposed part of the transfers; "stage_wait" the time in which a rank of a pipeline waits for
messages of other stages; "callbacks" the time of callbacks and hooks of the module; "other" the rest of Lightning's
loop: results of steps, loggers, learning-rate schedulers, the progress bar.
"""


@dataclass(frozen=True, order=True)
class Span:
    """An activity of the main thread from ``start_s`` to ``end_s``; spans of one rank are nested or disjoint."""

    start_s: float
    end_s: float
    name: str


def phase_of(action: str) -> str:
    """The phase of an action that Lightning reports to its profiler."""
    name = action.rpartition(".")[2]
    if name.endswith("_next"):
        return "data_wait"
    if name in ("batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device"):
        return "device_transfer"
    if name in ("training_step", "backward"):
        return "forward" if name == "training_step" else "backward"
    if name in ("optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping", "lr_scheduler_step"):
        return "optimizer"
    if action in ("run_training_batch", "run_training_epoch"):
        return "other"
    return "callbacks"


def partition(spans: Iterable[Span], overlays: Sequence[Sequence[Span]], start_s: float, end_s: float) -> list[Span]:
    """Cuts the time from ``start_s`` to ``end_s`` into spans named after phases, without gaps or overlaps.

    Args:
        spans: nested or disjoint, named after phases; the innermost counts.
        overlays: lists of disjoint spans, named after phases; each list overwrites the spans and the lists before it.
        start_s, end_s: start and end of the step.
    """
    by_depth = sorted(spans, key=lambda span: (span.start_s, -span.end_s))
    layers = [Span(start_s, end_s, "other"), *by_depth, *chain.from_iterable(overlays)]  # the last one on top
    moments = {moment for span in layers for moment in (span.start_s, span.end_s) if start_s < moment < end_s}
    coming = sorted(range(len(layers)), key=lambda place: layers[place].start_s, reverse=True)
    begun: list[int] = []  # a heap of places in layers, negative: the topmost comes first
    joined: list[Span] = []
    for from_s, to_s in pairwise([start_s, *sorted(moments), end_s]):
        while coming and layers[coming[-1]].start_s <= from_s:
            heappush(begun, -coming.pop())
        while layers[-begun[0]].end_s <= from_s:
            heappop(begun)
        name = layers[-begun[0]].name
        if joined and joined[-1].name == name:
            from_s = joined.pop().start_s
        joined.append(Span(from_s, to_s, name))
    return joined


def seconds_of(parts: Iterable[Span]) -> dict[str, float]:
    """Seconds of each phase that occurs, in the order of :data:`PHASES`."""
    totals = dict.fromkeys(PHASES, 0.0)
    for part in parts:
        totals[part.name] += part.end_s - part.start_s
    return {phase: seconds for phase, seconds in totals.items() if seconds > 0}
