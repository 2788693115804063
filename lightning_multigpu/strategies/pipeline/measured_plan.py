"""Measures the layers of a pipeline on one device and predicts what it will take, without training."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning_multigpu.engine.batch_size import leading_size
from lightning_multigpu.engine.pipeline.measuring.cost_probe import ChainProbe
from lightning_multigpu.engine.pipeline.measuring.training_memory import held_bytes, layer_bytes
from lightning_multigpu.engine.pipeline.splitting.chain import Chain, find_chain
from lightning_multigpu.engine.pipeline.splitting.hugging_face import ModelsInStages
from lightning_multigpu.engine.pipeline.splitting.ownership import Ownership
from lightning_multigpu.engine.pipeline.splitting.traced_chain import TracedChain
from lightning_multigpu.engine.pipeline.stages.micro_batches import first_part
from lightning_multigpu.engine.pipeline.stages.recompute import layers_of
from lightning_multigpu.engine.pipeline.stages.runner import LOOPED_SCHEDULES
from lightning_multigpu.planning.balance import balanced_cuts, cuts_of_counts, stage_bounds
from lightning_multigpu.planning.pipeline_prediction import PipelinePlans, Plan, one_device_s, plan
from lightning_multigpu.planning.stage_costs import LinkCost, PartCost, StageCosts
from lightning_multigpu.strategies.pipeline.dry_run import unlogged_loss, without_trace
from lightning_multigpu.strategies.pipeline.first_batch import FirstBatchStrategy, visit_first_batch
from lightning_multigpu.strategies.pipeline.pipeline_checks import (
    check_activation_checkpointing,
    check_callbacks,
    check_module,
    check_num_split_points,
    check_optimizers,
)
from lightning_multigpu.strategies.pipeline.stage_logs import StageLogs
from lightning_multigpu.strategies.pipeline.strategy import PipelineStrategy

if TYPE_CHECKING:
    import lightning.pytorch as pl

USUAL_NUM_MICRO_BATCHES = (1, 2, 4, 8, 16)


class PlanError(ValueError):
    """What was asked for cannot be planned; nothing has been measured."""


class PipelinePlanner:
    """Predicts what a pipeline takes under several schedules and with several numbers of micro-batches.

    Args:
        trainer: has the pipeline as its strategy; it is read and not run.
        schedules: their names; by default the strategy's own.
        num_micro_batches: by default those of 1, 2, 4, 8, 16 and the strategy's own number that the batch has samples
            for.
        link: what messages between neighbouring ranks cost.

    Raises:
        PlanError: the strategy is no pipeline, a schedule does not go with its options, or a callback does not go with
            pipelines.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        *,
        schedules: Sequence[str] | None,
        num_micro_batches: Sequence[int] | None,
        link: LinkCost,
    ) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, PipelineStrategy):
            raise PlanError(
                f"strategy={type(strategy).__name__} is no pipeline; pass strategy='pipeline_1f1b', or another that "
                "'lightning-multigpu strategies' lists as a PipelineStrategy"
            )
        self._strategy = strategy
        self._options = strategy.options
        self._schedules = schedules or [self._options["schedule"]]
        self._asked = num_micro_batches
        size = strategy.pipeline_parallel_size
        num_devices = strategy.num_nodes * len(strategy.parallel_devices or [])
        self._found = PipelinePlans(size, num_devices // size, self._options["balance"], link)
        try:
            check_callbacks(trainer.callbacks)  # type: ignore[attr-defined]
            for schedule in self._schedules:
                check_activation_checkpointing(self._options["activation_checkpointing"], schedule)
        except ValueError as error:
            raise PlanError(str(error)) from error

    def run(
        self, module: pl.LightningModule, datamodule: pl.LightningDataModule | None, trainer_settings: Mapping[str, Any]
    ) -> PipelinePlans:
        """Takes the first training batch, measures the layers on it and predicts. Weights stay what they are.

        Args:
            module, datamodule: what is to be trained.
            trainer_settings: arguments of the Trainer.

        Raises:
            PlanError: the module cannot be split in this way, the batch has too few samples, or there is no batch.
            PipelineError: the layers turn out not to be a chain.
        """
        try:
            check_module(module)
        except ValueError as error:
            raise PlanError(str(error)) from error
        assert self._strategy.parallel_devices is not None
        visit_first_batch(module, datamodule, trainer_settings, self._strategy.parallel_devices[0], self._visit)
        if not self._found.plans:
            raise PlanError(
                "the training loader has given no batch to measure; see to it that fit would train on one (data, "
                "limit_train_batches, max_epochs, max_steps)"
            )
        return self._found

    def _visit(self, one: FirstBatchStrategy, batch: Any, others: Sequence[Any]) -> None:
        """Called with the first batch of a whole module on one device."""
        assert one.lightning_module is not None
        module, found = one.lightning_module, self._found
        try:
            check_optimizers(one.optimizers)
            batch = first_part(batch, found.num_pipelines)
            found.num_samples = leading_size(batch)
            numbers = self._numbers_of_micro_batches(found.num_samples)
            parts = {number: first_part(batch, number) for number in (1, *numbers)}
            wanted = {schedule: self._chain(module, schedule) for schedule in self._schedules}
            chains = {chain.name: chain for chain in wanted.values()}
            again = {name: layers_of(c, self._options["activation_checkpointing"]) for name, c in chains.items()}
        except ValueError as error:
            raise PlanError(str(error)) from error
        costs = {
            (name, number): measured_parts(one, chain, parts[number], others, again[name])
            for name, chain in chains.items()
            for number in numbers
        }
        name, chain = next(iter(chains.items()))
        known = None if again[name] else costs.get((name, 1))
        found.one_device_s = one_device_s(known or measured_parts(one, chain, parts[1], others))
        for schedule in wanted:
            chain = chains[wanted[schedule].name]
            for number in numbers:
                predicted = self._plan(one, chain, schedule, number, costs[chain.name, number], found.one_device_s)
                found.plans.append((chain, predicted))

    def _numbers_of_micro_batches(self, num_samples: int | None) -> list[int]:
        limit = num_samples or 1
        wanted = self._asked or [n for n in (*USUAL_NUM_MICRO_BATCHES, self._strategy.num_micro_batches) if n <= limit]
        for number in wanted:
            if number > limit:
                what = "no samples that can be counted" if num_samples is None else f"{num_samples} samples"
                raise PlanError(
                    f"num_micro_batches={number}: the first batch of a pipeline has {what}, and each micro-batch needs "
                    f"one; pass {limit} or less, or a larger batch"
                )
        return sorted(set(wanted))

    def _num_stages(self, schedule: str) -> int:
        return self._found.num_ranks * self._stages_per_rank(schedule)

    def _stages_per_rank(self, schedule: str) -> int:
        return (self._options["stages_per_rank"] or 2) if schedule in LOOPED_SCHEDULES else 1

    def _chain(self, module: pl.LightningModule, schedule: str) -> Chain:
        """The layers that the strategy would split.

        Raises:
            ValueError: there are none, too few, or others than a list as balance= counts.
        """
        num_stages = self._num_stages(schedule)
        points = self._options["split_points"]
        if points is not None:
            check_num_split_points(points, self._found.num_ranks, self._stages_per_rank(schedule))
            return TracedChain(module, self._options["module"], points, module.device)
        chain = find_chain(module, self._options["module"], num_stages)
        if not isinstance(self._found.balance, str):
            cuts_of_counts(self._found.balance, len(chain), num_stages)
        return chain

    def _plan(
        self,
        one: FirstBatchStrategy,
        chain: Chain,
        schedule: str,
        num_micro_batches: int,
        parts: Sequence[PartCost],
        alone_s: float,
    ) -> Plan:
        assert one.lightning_module is not None
        costs = StageCosts(
            parts,
            layer_bytes(chain, one.optimizers),
            self._found.link,
            schedule=schedule,
            num_ranks=self._found.num_ranks,
            stages_per_rank=self._stages_per_rank(schedule),
            num_micro_batches=num_micro_batches,
        )
        bounds = self._bounds(chain, costs)
        holds = (
            Ownership(one.lightning_module, chain, bounds, position, self._found.num_ranks).held()
            for position in range(self._found.num_ranks)
        )
        return plan(
            schedule,
            costs,
            bounds,
            parameter_bytes=chain.parameter_bytes(),
            held=[held_bytes(parameters, one.optimizers) for parameters in holds],
            one_device_s=alone_s,
        )

    def _bounds(self, chain: Chain, costs: StageCosts) -> list[tuple[int, int]]:
        balance = self._found.balance
        if balance in ("time", "memory"):
            return costs.bounds(balance)
        if balance == "parameters":
            return stage_bounds(balanced_cuts(chain.parameter_bytes(), costs.num_stages), len(chain))
        return stage_bounds(cuts_of_counts(balance, len(chain), costs.num_stages), len(chain))


def measured_parts(
    one: FirstBatchStrategy, chain: Chain, micro_batch: Any, others: Sequence[Any], recompute: Collection[int] = ()
) -> list[PartCost]:
    """What each part of ``training_step`` costs on one device that has all layers; see :mod:`.stage_costs`.

    Layers of ``recompute`` run again in backward.
    Random states, gradients, and the module's buffers and attributes are afterwards what they were.
    """
    module = one.lightning_module
    assert module is not None
    bounds = [(0, len(chain))]
    probe = ChainProbe(
        chain, bounds, Ownership(module, chain, bounds, 0, 1), None, one.root_device, 0, recompute=recompute
    )
    logs = StageLogs(module)

    def step() -> Any:
        return unlogged_loss(one.precision_plugin, logs, lambda: module.training_step(micro_batch, *others))

    models = ModelsInStages(module)
    try:
        with without_trace(module):
            found = probe.measure(step)
    finally:
        models.end()
    return [found.get(part, PartCost()) for part in range(len(chain) + 2)]
