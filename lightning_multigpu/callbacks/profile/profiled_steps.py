"""The figures of a rank's profiled steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from lightning_multigpu.communication.metering.traffic import Interval, length, merged, overlaps
from lightning_multigpu.planning.rank_figures import TransferSums
from lightning_multigpu.planning.step_phases import PHASES, Span, seconds_of


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
