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
messages of other stages; "callbacks" the time of callbacks, hooks of the module and loggers; "other" the rest of
Lightning's loop: results of steps, learning-rate schedulers, the progress bar.
"""


@dataclass(frozen=True, order=True)
class Span:
    """An activity of the main thread from ``start_s`` to ``end_s``; spans of one rank are nested or disjoint."""

    start_s: float
    end_s: float
    name: str


def phase_of(action: str) -> str | None:
    """The phase of an action that Lightning reports to its profiler; None for the phase of the action around it."""
    name = action.rpartition(".")[2]
    if name.endswith("_next"):
        return "data_wait"
    if name in ("batch_to_device", "on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device"):
        return "device_transfer"
    if name in ("training_step", "backward"):
        return {"training_step": "forward"}.get(name, name)
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
    cut = [Span(start_s, end_s, "other")]
    by_depth = sorted(spans, key=lambda span: (span.start_s, -span.end_s))
    for layer in (by_depth, *overlays):
        for span in layer:
            cut = _covered(cut, span)
    joined: list[Span] = []
    for span in cut:
        if joined and joined[-1].name == span.name:
            joined[-1] = Span(joined[-1].start_s, span.end_s, span.name)
        else:
            joined.append(span)
    return joined


def seconds_of(parts: Iterable[Span]) -> dict[str, float]:
    """Seconds of each phase that occurs, in the order of :data:`PHASES`."""
    totals = dict.fromkeys(PHASES, 0.0)
    for part in parts:
        totals[part.name] += part.end_s - part.start_s
    return {phase: seconds for phase, seconds in totals.items() if seconds > 0}


def _covered(cut: list[Span], top: Span) -> list[Span]:
    """``cut`` overwritten by ``top``; parts of ``top`` outside of ``cut`` are left out."""
    result: list[Span] = []
    for span in cut:
        start_s, end_s = max(span.start_s, top.start_s), min(span.end_s, top.end_s)
        if start_s >= end_s:
            result.append(span)
            continue
        if span.start_s < start_s:
            result.append(Span(span.start_s, start_s, span.name))
        result.append(Span(start_s, end_s, top.name))
        if end_s < span.end_s:
            result.append(Span(end_s, span.end_s, span.name))
    return result
