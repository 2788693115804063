"""The pipelines of a report as tables for people: each rank's use of a step, and its memory."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from lightning_multigpu.planning.numbers import number, size
from lightning_multigpu.report.document import HeldMemory, PipelineSection, PipelineStep
from lightning_multigpu.report.schema import as_json
from lightning_multigpu.report.terminal import framed

_SECONDS = ("forward", "backward", "weight", "send", "receive", "idle")
_MEMORY = {
    "parameters_bytes": "parameters",
    "gradients_bytes": "gradients",
    "optimizer_bytes": "optimizer",
    "activations_bytes": "activations",
    "device_peak_bytes": "GPU, at most",
}
_PREDICTED = ("parameters_bytes", "gradients_bytes", "optimizer_bytes")


def show(section: PipelineSection, console: Console) -> None:
    """Prints two tables for each pipeline, with a row for each rank; the first is left out if no step was timed."""
    for index, pipeline in enumerate(section.pipelines):
        name = section.schedule if len(section.pipelines) == 1 else f"{section.schedule}, pipeline {index}"
        if pipeline.wall_s is not None:
            console.print(_times(pipeline, name, terminal=console.is_terminal))
        console.print(memory(pipeline.ranks, name, terminal=console.is_terminal))


def _times(pipeline: PipelineStep, name: str, *, terminal: bool) -> Table:
    ranks = [as_json(rank) for rank in pipeline.ranks]
    shown = [kind for kind in _SECONDS if kind != "weight" or any(rank["weight_passes"] for rank in ranks)]
    table = framed(f"{name}, {pipeline.num_micro_batches} micro-batches: ms of the median step", terminal=terminal)
    for column in ("rank", *shown, "bubble %", "theory %"):
        table.add_column(column, justify="right", no_wrap=True)
    for rank in ranks:
        times = (number(1e3 * rank[f"{kind}_s"]) for kind in shown)
        table.add_row(str(rank["rank"]), *times, *(f"{100 * rank[b]:.1f}" for b in ("bubble", "theoretical_bubble")))
    measured, theory, wall_s = (x or 0.0 for x in (pipeline.bubble, pipeline.theoretical_bubble, pipeline.wall_s))
    table.caption = (
        f"of {number(1e3 * wall_s)} ms the ranks do not work for {100 * measured:.1f} %; in theory "
        f"{100 * theory:.1f} %\nfrom the first pass to the last: the rest of a step is loading, hooks and the optimizer"
    )
    return table


def memory(held: Sequence[HeldMemory], name: str, *, terminal: bool) -> Table:
    """The bytes that each rank holds."""
    ranks = [as_json(rank) for rank in held]
    table = framed(f"{name}: memory of the ranks", terminal=terminal)
    table.add_column("rank", justify="right")
    in_stages = "stages" in ranks[0]
    if in_stages:
        table.add_column("stages")
    shown = [key for key in _MEMORY if any(key in rank for rank in ranks)]
    for key in shown:
        table.add_column(_MEMORY[key], justify="right", no_wrap=True)
    for rank in ranks:
        stages = [", ".join(map(str, rank["stages"]))] if in_stages else []
        table.add_row(str(rank["rank"]), *stages, *(size(rank[key]) if key in rank else "" for key in shown))
    if f"predicted_{_PREDICTED[0]}" in ranks[0]:  # not in reports of earlier versions
        sizes = {rank["rank"]: size(sum(rank[f"predicted_{key}"] for key in _PREDICTED)) for rank in ranks}
        needs = ", ".join(f"{needed} on rank {rank}" for rank, needed in sizes.items())
        table.caption = f"predicted for parameters, gradients and optimizer together:\n{needs}"
    return table
