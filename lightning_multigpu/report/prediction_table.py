"""What pipelines are predicted to take: as text, for programs, and as a picture."""

from __future__ import annotations

from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_multigpu.planning.pipeline_prediction import PipelinePlans, Plan
from lightning_multigpu.report.numbers import number, size
from lightning_multigpu.report.schedule_picture import Panel, draw


def print_plans(console: Console, plans: PipelinePlans, link_gbit: float | None) -> None:
    """Assumptions, a row a plan, and its stages.

    Args:
        console: to print to.
        plans: at least one.
        link_gbit: as it was given.
    """
    console.print(_head(plans, link_gbit), highlight=False, soft_wrap=True)
    console.print(_table(plans))
    for _, plan in plans.plans:
        console.print(_stages(plan), highlight=False, soft_wrap=True)
    _, best = min(plans.plans, key=lambda entry: entry[1].step_s)
    console.print(f"\nfastest: {_name(best)}", highlight=False, soft_wrap=True)


def as_json(plans: PipelinePlans, link_gbit: float | None) -> dict[str, Any]:
    """The object of ``--json``, whose keys :mod:`lightning_multigpu.commands.pipeline_plan` describes."""
    return {
        "num_ranks": plans.num_ranks,
        "num_pipelines": plans.num_pipelines,
        "balance": plans.balance,
        "link_gbit": link_gbit,
        "batch_samples": plans.num_samples,
        "one_device_s": plans.one_device_s,
        "plans": [{"module": chain.name, **_plan_json(plan)} for chain, plan in plans.plans],
    }


def picture(plans: PipelinePlans) -> str:
    """The predicted schedules one below the other, on one scale of time, rank 0 at the bottom; as an SVG document."""
    return draw(
        [
            Panel(
                f"{_name(plan)}: {number(1e3 * plan.step_s)} ms, bubble {100 * plan.bubble:.1f} %",
                [f"rank {memory.rank}" for memory in plan.memory],
                plan.timelines,
            )
            for _, plan in plans.plans
        ]
    )


def _head(plans: PipelinePlans, link_gbit: float | None) -> str:
    names = list(dict.fromkeys(chain.describe() for chain, _ in plans.plans))
    samples = "the first batch" if plans.num_samples is None else f"the first {plans.num_samples} samples"
    side_by_side = f" in each of {plans.num_pipelines} pipelines" if plans.num_pipelines > 1 else ""
    link = f"at {link_gbit:g} Gbit/s" if link_gbit else "take no time (--link-gbit sets a bandwidth)"
    return "\n".join(
        [
            f"Pipeline over {'; '.join(names)}, on {plans.num_ranks} ranks{side_by_side} by balance={plans.balance!r}",
            f"measured on {samples}; as a whole on one device they take {number(1e3 * plans.one_device_s)} ms",
            f"predicted are forward and backward of a batch, without the optimizer; messages between ranks {link}",
        ]
    )


def _table(plans: PipelinePlans) -> Table:
    table = Table(box=box.SIMPLE, pad_edge=False)
    table.add_column("schedule", no_wrap=True)
    for title in ("M", "step ms", "bubble", "x one device", "fullest rank", "activations"):
        table.add_column(title, justify="right")
    for _, plan in plans.plans:
        table.add_row(
            plan.schedule,
            str(plan.num_micro_batches),
            number(1e3 * plan.step_s),
            f"{100 * plan.bubble:.1f} %",
            f"{plan.relative_throughput:.2f}",
            size(plan.fullest.total),
            size(plan.fullest.activations),
        )
    return table


def _stages(plan: Plan) -> str:
    lines = [f"{_name(plan)}, for one micro-batch:"]
    for index, stage in enumerate(plan.stages):
        start, stop = stage.layers
        layers = f"layers {start} to {stop - 1}" if stop - start > 1 else f"layer {start}"
        lines.append(
            f"  stage {index} on rank {stage.rank}: {layers}, {size(stage.parameters_bytes)} of parameters, "
            f"forward {number(1e3 * stage.forward_s)} ms, backward {number(1e3 * stage.backward_s)} ms, "
            f"transfer {number(1e3 * stage.transfer_s)} ms"
        )
    fullest, held = plan.fullest, plan.fullest.held
    again = f", a layer that runs again {size(fullest.recomputed)}" if fullest.recomputed else ""
    lines.append(
        f"  rank {fullest.rank} needs most: parameters {size(held.parameters)}, gradients {size(held.gradients)}, "
        f"optimizer {size(held.optimizers)}, activations {size(fullest.activations)}{again}"
    )
    return "\n".join(lines)


def _name(plan: Plan) -> str:
    return f"{plan.schedule}, M = {plan.num_micro_batches}"


def _plan_json(plan: Plan) -> dict[str, Any]:
    return {
        "schedule": plan.schedule,
        "num_micro_batches": plan.num_micro_batches,
        "step_s": plan.step_s,
        "bubble": plan.bubble,
        "relative_throughput": plan.relative_throughput,
        "stages": [
            {
                "rank": stage.rank,
                "layers": list(stage.layers),
                "parameters_bytes": stage.parameters_bytes,
                "forward_s": stage.forward_s,
                "backward_s": stage.backward_s,
                "transfer_s": stage.transfer_s,
            }
            for stage in plan.stages
        ],
        "memory": [
            {
                "rank": rank.rank,
                "parameters_bytes": rank.held.parameters,
                "gradients_bytes": rank.held.gradients,
                "optimizer_bytes": rank.held.optimizers,
                "activations_bytes": rank.activations,
                "recomputed_bytes": rank.recomputed,
            }
            for rank in plan.memory
        ],
    }
