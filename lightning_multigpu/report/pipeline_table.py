"""The pipelines of a report as tables for people: each rank's use of a step, and its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_multigpu.planning.numbers import number, size

_SECONDS = ("forward", "backward", "weight", "send", "receive", "idle")
_MEMORY = {
    "parameters_bytes": "parameters",
    "gradients_bytes": "gradients",
    "optimizer_bytes": "optimizer",
    "activations_bytes": "activations",
    "device_peak_bytes": "GPU, at most",
}
_PREDICTED = ("parameters_bytes", "gradients_bytes", "optimizer_bytes")


def show(section: Mapping[str, Any], console: Console) -> None:
    """Prints two tables for each pipeline, with a row for each rank; the first is left out if no step was timed."""
    pipelines = section["pipelines"]
    for index, pipeline in enumerate(pipelines):
        name = section["schedule"] if len(pipelines) == 1 else f"{section['schedule']}, pipeline {index}"
        if "wall_s" in pipeline:
            console.print(_times(pipeline, name, terminal=console.is_terminal))
        console.print(memory(pipeline["ranks"], name, terminal=console.is_terminal))


def _times(pipeline: Mapping[str, Any], name: str, *, terminal: bool) -> Table:
    ranks = pipeline["ranks"]
    shown = [kind for kind in _SECONDS if kind != "weight" or any(rank["weight_passes"] for rank in ranks)]
    table = _table(f"{name}, {pipeline['num_micro_batches']} micro-batches: ms of the median step", terminal=terminal)
    for column in (*shown, "bubble %", "theory %"):
        table.add_column(column, justify="right", no_wrap=True)
    for rank in ranks:
        shares = (rank["bubble"], rank["theoretical_bubble"])
        table.add_row(
            str(rank["rank"]),
            *(number(1e3 * rank[f"{kind}_s"]) for kind in shown),
            *(f"{100 * share:.1f}" for share in shares),
        )
    measured, theory = (f"{100 * pipeline[key]:.1f} %" for key in ("bubble", "theoretical_bubble"))
    table.caption = (
        f"of {number(1e3 * pipeline['wall_s'])} ms the ranks do not work for {measured}; in theory {theory}\n"
        "from the first pass to the last: the rest of a step is loading, hooks and the optimizer"
    )
    return table


def memory(ranks: Sequence[Mapping[str, Any]], name: str, *, terminal: bool) -> Table:
    """The bytes that each rank holds; ``ranks`` are MEMORY of the schema, with the rank and, of a pipeline, stages."""
    table = _table(f"{name}: memory of the ranks", terminal=terminal)
    in_stages = "stages" in ranks[0]
    if in_stages:
        table.add_column("stages")
    shown = [key for key in _MEMORY if any(key in rank for rank in ranks)]
    for key in shown:
        table.add_column(_MEMORY[key], justify="right", no_wrap=True)
    for rank in ranks:
        stages = [", ".join(str(stage) for stage in rank["stages"])] if in_stages else []
        table.add_row(str(rank["rank"]), *stages, *(size(rank[key]) if key in rank else "" for key in shown))
    if f"predicted_{_PREDICTED[0]}" in ranks[0]:  # not in reports of earlier versions
        held = [f"{size(sum(rank[f'predicted_{key}'] for key in _PREDICTED))} on rank {rank['rank']}" for rank in ranks]
        table.caption = f"predicted for parameters, gradients and optimizer together:\n{', '.join(held)}"
    return table


def _table(title: str, *, terminal: bool) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD if terminal else box.ASCII)
    table.add_column("rank", justify="right")
    return table
