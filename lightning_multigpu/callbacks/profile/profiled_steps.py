"""The phases of a rank's profiled steps, and their figures. Each moment of the main thread belongs to one phase.

::

    Lightning's actions   |data|move|     run_training_batch            |callbacks|
                                    |training_step| backward |optimizer |
    exposed transfers                                  |---|
    phases                 data  move   forward      back exp  optimizer  callbacks
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import chain, pairwise
from statistics import median
from typing import Any, NamedTuple

from lightning_multigpu.communication.metering.traffic import Interval, length, merged, overlaps
from lightning_multigpu.report.rank_figures import PHASES, TransferSums


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


class TimedTransfer(NamedTuple):
    """A transfer between ranks, as the meter has it."""

    operation: str
    group: str
    group_size: int
    start_s: float
    end_s: float
    size_bytes: float
    sent_bytes: float
    memory_bytes: float

    @property
    def carries(self) -> str | None:
        """What a group of the meter carries, where its length follows the steps or the samples, not the batches."""
        if self.group in ("data", "shards", "servers", "host"):
            return "gradients"
        return "activations" if self.group.startswith("tensor") else None


@dataclass(frozen=True, kw_only=True)
class ProfiledStep:
    """An optimizer step; its parts are named after phases, have no gaps and do not overlap."""

    batches: int
    parts: Sequence[Span]
    transfers: Sequence[TimedTransfer]

    @property
    def seconds(self) -> float:
        return self.parts[-1].end_s - self.parts[0].start_s

    def under_way(self, carries: str | None = None) -> list[Interval]:
        """When transfers were under way, of all kinds or of one."""
        return merged((t.start_s, t.end_s) for t in self.transfers if carries in (None, t.carries))

    def waiting(self, *phases: str) -> list[Interval]:
        """When the rank was in these phases."""
        return [(part.start_s, part.end_s) for part in self.parts if part.name in phases]


def figures_of(steps: Sequence[ProfiledStep]) -> dict[str, Any]:
    """The fields of :class:`.RankFigures` that follow from its steps, at least one."""
    phases_s = medians([seconds_of(step.parts) for step in steps])
    # What is long by chance in a step is another phase each time: medians alone add up to less than a step.
    scale = max(1.0, median(step.seconds for step in steps) / sum(phases_s.values()))
    activations = [t for step in steps for t in step.transfers if t.carries == "activations"]
    activations_s = sum(length(step.under_way("activations")) for step in steps)
    return {
        "steps": len(steps),
        "phases_s": {phase: seconds * scale for phase, seconds in phases_s.items()},
        "hidden_s": median(_hidden_s(step) for step in steps),
        "waits_s": medians([_waits(step) for step in steps]),
        "activations_rate": sum(t.sent_bytes for t in activations) / (activations_s or 1.0),
        "transfers": _transfers(steps),
        "batches": round(median(step.batches for step in steps)),
        "adding_s": _adding_s(steps),
    }


def _adding_s(steps: Sequence[ProfiledStep]) -> float:
    passes = [[part.end_s - part.start_s for part in step.parts if part.name == "backward"] for step in steps]
    pairs = [each for each in passes if len(each) == 2]
    return max(0.0, median(second - first for first, second in pairs)) if pairs else 0.0


def medians(steps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The median over the steps of each figure by name, phases in their order before other names."""
    names = dict.fromkeys(name for step in steps for name in step)
    order = [*(phase for phase in PHASES if phase in names), *(name for name in names if name not in PHASES)]
    return {name: median(step.get(name, 0.0) for step in steps) for name in order}


def _hidden_s(step: ProfiledStep) -> float:
    waits = step.waiting("communication", "stage_wait")
    return length(step.under_way()) - length(overlaps(step.under_way(), waits))


def _waits(step: ProfiledStep) -> dict[str, float]:
    """Seconds of "communication" in which gradients, or activations of split layers, were under way."""
    exposed, carried = step.waiting("communication"), dict.fromkeys(t.carries for t in step.transfers)
    return {kind: length(overlaps(step.under_way(kind), exposed)) for kind in carried if kind is not None}


def _transfers(steps: Sequence[ProfiledStep]) -> list[TransferSums]:
    found: dict[tuple[str, str, int], list[list[TimedTransfer]]] = {}
    for number, step in enumerate(steps):
        for t in step.transfers:
            found.setdefault((t.operation, t.group, t.group_size), [[] for _ in steps])[number].append(t)
    return [
        TransferSums(
            operation=operation,
            group=group,
            group_size=group_size,
            count=sum(map(len, of_steps)) / len(steps),
            size_bytes=sum(t.size_bytes for of_step in of_steps for t in of_step) / len(steps),
            sent_bytes=sum(t.sent_bytes for of_step in of_steps for t in of_step) / len(steps),
            memory_bytes=sum(t.memory_bytes for of_step in of_steps for t in of_step) / len(steps),
            seconds=sum(length(merged((t.start_s, t.end_s) for t in of_step)) for of_step in of_steps) / len(steps),
        )
        for (operation, group, group_size), of_steps in found.items()
    ]
