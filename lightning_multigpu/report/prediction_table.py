"""Pipeline predictions as text, as JSON, and as a picture."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_multigpu.planning.numbers import number, size
from lightning_multigpu.planning.pipelines.balance import layers_text
from lightning_multigpu.planning.pipelines.pipeline_prediction import PipelinePlan, PipelinePlans
from lightning_multigpu.report import schedule_picture
from lightning_multigpu.report.schedule_picture import Panel
from lightning_multigpu.report.schema import attributes
from lightning_multigpu.report.terminal import narrow, say


def print_plans(console: Console, plans: PipelinePlans, link_gbit: float | None) -> None:
    """Prints the assumptions, a table with a row for each plan, at least one, and the stages of each plan."""
    say(console, _head(plans, link_gbit))
    console.print(_table(plans))
    say(console, *map(_stages, plans.plans), "", _choice(plans))


def as_json(plans: PipelinePlans, link_gbit: float | None) -> dict[str, Any]:
    """The object of ``--json``, whose keys :mod:`lightning_multigpu.commands.plans.plan` describes."""
    may_be_fastest = [plans.fastest, *plans.alike]
    return {
        **attributes(plans, "num_ranks", "tensor_parallel_size", "num_pipelines", "balance"),
        "link_gbit": link_gbit,
        "batch_samples": plans.num_samples,
        **attributes(plans, "one_device_s", "waiting"),
        "too_noisy": plans.is_too_noisy,
        "plans": [
            {
                **attributes(plan, "module", "schedule", "num_micro_batches", "step_s", "bubble"),
                **attributes(plan, "relative_throughput", "relative_throughput_range"),
                "step_s_of_rounds": [of_round.step_s for of_round in plan.rounds],
                **attributes(plan, "stages", "memory"),
                "may_be_fastest": any(plan is one for one in may_be_fastest),
            }
            for plan in plans.plans
        ],
    }


def picture(plans: PipelinePlans, suffix: str = ".svg") -> bytes:
    """The predicted schedules, one below the other on one scale of time, rank 0 at the bottom.

    ``suffix`` is that of the file: ".svg", ".png" or ".pdf".
    """
    return schedule_picture.picture(
        [
            Panel(
                f"{_name(plan)}: {number(1e3 * plan.step_s)} ms, bubble {100 * plan.bubble:.1f} %",
                [f"rank {memory.rank}" for memory in plan.memory],
                plan.timelines,
            )
            for plan in plans.plans
        ],
        suffix,
    )


def _head(plans: PipelinePlans, link_gbit: float | None) -> str:
    names = list(dict.fromkeys(plan.description for plan in plans.plans))
    samples = "the first batch" if plans.num_samples is None else f"the first {plans.num_samples} samples"
    side_by_side = f" in each of {plans.num_pipelines} pipelines" if plans.num_pipelines > 1 else ""
    link = f"at {link_gbit:g} Gbit/s" if link_gbit else "take no time (--link-gbit sets a bandwidth)"
    ranks, between = f"{plans.num_ranks} ranks", "ranks"
    if plans.tensor_parallel_size > 1:
        ranks, between = f"{plans.num_ranks} x {plans.tensor_parallel_size} ranks", "stages"
    return "\n".join(
        [
            f"Pipeline over {'; '.join(names)}, on {ranks}{side_by_side} by balance={plans.balance!r}",
            f"measured on {samples}; as a whole on one device they take {number(1e3 * plans.one_device_s)} ms",
            f"predicted are forward and backward of a batch, without the optimizer; messages between {between} {link}",
            *([plans.split] if plans.split else []),
        ]
    )


def _table(plans: PipelinePlans) -> Table:
    table = narrow()  # all columns fit on 80 characters
    table.add_column("schedule", no_wrap=True)
    for title in ("M", "step ms", "bubble", "x one device", "rounds", "largest memory", "activations"):
        longest = max(map(len, title.split()))
        table.add_column(title, justify="right", min_width=longest, no_wrap=title == "rounds")
    for plan in plans.plans:
        table.add_row(
            plan.schedule,
            str(plan.num_micro_batches),
            number(1e3 * plan.step_s),
            f"{100 * plan.bubble:.1f} %",
            f"{plan.relative_throughput:.2f}",
            "-".join(f"{x:.2f}" for x in plan.relative_throughput_range),
            size(plan.largest_memory.total),
            size(plan.largest_memory.activations_bytes),
        )
    return table


def _stages(plan: PipelinePlan) -> str:
    lines = [f"{_name(plan)}, for one micro-batch:"]
    for index, stage in enumerate(plan.stages):
        lines.append(
            f"  stage {index} on rank {stage.rank}: {layers_text(*stage.layers)}, "
            f"{size(stage.parameters_bytes)} of parameters, "
            f"forward {number(1e3 * stage.forward_s)} ms, backward {number(1e3 * stage.backward_s)} ms, "
            f"transfer {number(1e3 * stage.transfer_s)} ms"
        )
    most = plan.largest_memory
    recomputed = f", a recomputed layer {size(most.recomputed_bytes)}" if most.recomputed_bytes else ""
    lines.append(f"  rank {most.rank} needs most: {most.kinds}, activations {size(most.activations_bytes)}{recomputed}")
    return "\n".join(lines)


def _choice(plans: PipelinePlans) -> str:
    """The fastest plan, and those that may be; or why none can be chosen."""
    rounds = f"{len(plans.plans[0].rounds)} rounds of measurements"
    busy = f"; other processes had the core for {100 * plans.waiting:.0f} % of the time" if plans.waiting > 0.05 else ""
    if plans.is_too_noisy:
        widest = max(plans.plans, key=lambda plan: plan.spread)
        steps = [1e3 * of_round.step_s for of_round in widest.rounds]
        return (
            f"the machine is too noisy to choose: in {rounds} {_name(widest)} took {number(min(steps))} to "
            f"{number(max(steps))} ms{busy}. Repeat this on a quiet machine"
        )
    if not plans.alike:
        return f"fastest: {_name(plans.fastest)}, in each of {rounds}{busy}"
    alike = ", and ".join(_name(plan) for plan in plans.alike)
    return f"fastest: {_name(plans.fastest)}; {rounds} cannot tell it from {alike}{busy}"


def _name(plan: PipelinePlan) -> str:
    return f"{plan.schedule}, M = {plan.num_micro_batches}"
