"""The ranking of strategies and worlds by their predicted samples a second, with remedies for the first choice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from lightning_multigpu.planning.numbers import ms
from lightning_multigpu.planning.scaling.machine import Machine, World
from lightning_multigpu.planning.scaling.model_profile import ModelProfile
from lightning_multigpu.planning.scaling.step_model import (
    RATIOS,
    Candidate,
    ImpossibleError,
    Prediction,
    one_device,
    predict,
)

_BATCH_FACTOR = 4
_WORTH = 1.05
"""A remedy is shown if it gives so many times the samples a second."""


@dataclass(frozen=True)
class Remedy:
    """A change of the first choice, and what it gives."""

    change: str
    prediction: Prediction


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The predictions of a model on a machine.

    Attributes:
        one: one device alone.
        predictions: those that fit in memory, the most samples a second first.
        too_large: those that do not fit.
        impossible: candidate, world and the reason.
        remedies: for the first prediction of the largest world.
    """

    model: ModelProfile
    machine: Machine
    one: Prediction
    predictions: Sequence[Prediction]
    too_large: Sequence[Prediction]
    impossible: Sequence[tuple[Candidate, World, str]]
    remedies: Sequence[Remedy]

    @property
    def first(self) -> Prediction:
        return self.predictions[0]

    def explanation(self) -> list[str]:
        """The first choice in two sentences, and a line for each remedy."""
        if not self.predictions:
            return ["No strategy fits: see the reasons above."]
        first = self.first
        low, high = first.interval_s
        others = [each for each in self.predictions if each.candidate.strategy != first.candidate.strategy]
        lines = [
            f"First choice: {first.candidate} on {first.world}: {ms(first.step_s)} a step ({ms(low)} to {ms(high)}), "
            f"{first.samples_per_s / self.one.samples_per_s:.2f} times the samples a second of one device."
        ]
        part = first.parts_s[first.limit] / first.step_s
        instead = (
            f"; the next is {others[0].candidate} on {others[0].world} with "
            f"{others[0].samples_per_s / self.one.samples_per_s:.2f} times"
            if others
            else ""
        )
        lines.append(f"Its step is limited by {first.limit}, {100 * part:.0f} %{instead}.")
        if first.samples_per_s < self.one.samples_per_s:
            lines.append("One device alone is faster: this model does not scale here with these batches.")
        lines += [
            f"{remedy.change}: {remedy.prediction.samples_per_s / self.one.samples_per_s:.2f} times on "
            f"{remedy.prediction.world}"
            for remedy in self.remedies
        ]
        return lines


def ranked(model: ModelProfile, machine: Machine, candidates: Sequence[Candidate], worlds: Iterable[World]) -> Ranking:
    """Predicts every candidate in every world; what a strategy cannot have is named with its reason.

    Raises:
        ValueError: no candidate is possible in any of the worlds; the message has each reason once.
    """
    found: list[Prediction] = []
    impossible: list[tuple[Candidate, World, str]] = []
    for world in worlds:
        for candidate in candidates:
            try:
                found.append(predict(model, machine, candidate, world))
            except ImpossibleError as error:
                impossible.append((candidate, world, str(error)))
    if not found:
        raise ValueError("; ".join(dict.fromkeys(reason for _, _, reason in impossible)))
    found.sort(key=lambda each: -each.samples_per_s)
    limit = machine.rank_memory_bytes
    fits = [each for each in found if each.memory_bytes <= limit]
    one = one_device(model, machine, candidates[0].accumulate)
    largest = max((each.world for each in fits), key=lambda world: world.size, default=World(1, 1))
    first = next((each for each in fits if each.world == largest), None)
    return Ranking(
        model=model,
        machine=machine,
        one=one,
        predictions=fits,
        too_large=[each for each in found if each.memory_bytes > limit],
        impossible=impossible,
        remedies=[] if first is None else _remedies(model, machine, first),
    )


def _remedies(model: ModelProfile, machine: Machine, first: Prediction) -> list[Remedy]:
    """Larger batches, and fewer or smaller messages."""
    candidate, world, factor = first.candidate, first.world, _BATCH_FACTOR
    changes = {f"With batches {factor} times as large": (model.with_batches(factor), candidate)}
    several = replace(candidate, accumulate=factor * candidate.accumulate)
    changes[f"With accumulate_grad_batches={several.accumulate}"] = model, several
    if candidate.strategy.startswith("ring_ddp"):
        settings: list[dict[str, Any]] = [{"average_every": 8}]
        settings += [{"compression": coding} for coding in RATIOS if world.nodes > 1]
        for [(name, value)] in map(dict.items, settings):
            if name not in candidate.options:
                changed = replace(candidate, options={**candidate.options, name: value})
                changes[f"With {name}={value!r}"] = model, changed
    found = []
    for change, (its_model, its) in changes.items():
        with suppress(ImpossibleError):
            prediction = predict(its_model, machine, its, world)
            if prediction.samples_per_s >= _WORTH * first.samples_per_s:
                found.append(Remedy(change, prediction))
    return sorted(found, key=lambda remedy: -remedy.prediction.samples_per_s)
