"""Chooses the split of a pipeline by what its layers cost, measured on the first batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch.utilities import rank_zero_info
from torch.optim import Optimizer

from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.engine.pipeline.measuring.cost_probe import ChainProbe, slowest_link
from lightning_multigpu.engine.pipeline.measuring.training_memory import layer_bytes
from lightning_multigpu.engine.pipeline.splitting.chain import Chain
from lightning_multigpu.engine.pipeline.stages.stage_messages import PipelineGroup
from lightning_multigpu.planning.stage_costs import LinkCost, MeasuredBalance, PartCost, StageCosts

Bounds = list[tuple[int, int]]


def measured_costs(
    probe: ChainProbe,
    step: Callable[[], Any],
    stages: MeteredGroup,
    line: PipelineGroup,
    chain: Chain,
    optimizers: Sequence[Optimizer],
    **pipeline: Any,
) -> StageCosts:
    """What the layers cost, the same on all stages; a collective of the pipeline.

    Args:
        probe: measures.
        step: the user's step on a micro-batch.
        stages: all of the pipeline's ranks, to exchange what each has measured.
        line: between them, which is measured too.
        chain, optimizers: what takes memory.
        pipeline: the further arguments of :class:`StageCosts`.
    """
    mine = (probe.measure(step), slowest_link(line))
    parts: dict[int, PartCost] = {}
    links: list[LinkCost] = []
    for found, link in stages.gather_objects(mine):
        parts.update(found)
        links.append(link)
    return StageCosts(
        [parts.get(part, PartCost()) for part in range(len(chain) + 2)],
        layer_bytes(chain, optimizers),
        max(links, key=lambda link: link.seconds(1 << 20)),
        **pipeline,
    )


def announce(
    balance: MeasuredBalance, costs: StageCosts, bounds: Bounds, before: Bounds, name: str, line: PipelineGroup
) -> None:
    """Prints the split on rank 0, and what it is predicted to gain."""

    def predicted(split: Bounds) -> str:
        return f"{1e3 * costs.step_s(split):.3g} ms, {costs.fullest_bytes(split) / 1e6:.3g} MB on the fullest rank"

    rank_zero_info(
        f"Pipeline over {name!r}, {costs.num_layers} layers in {len(bounds)} stages by balance={balance!r}; per "
        f"micro-batch, as measured on the first batch:\n{costs.describe(bounds, line.ranks)}\n"
        f"  predicted for a batch of {costs.num_micro_batches} micro-batches, without the optimizer: "
        f"{predicted(bounds)}\n  by balance='parameters' it would be: {predicted(before)}"
    )
