"""Prediction of a pipeline's time and memory from layers measured on one device, without training."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy, Strategy
from typing_extensions import override

from lightning_multigpu._lightning_internals import EndOfRun
from lightning_multigpu.communication.metering.clocks import CoreWait
from lightning_multigpu.engine.activation_checkpointing import layers_of
from lightning_multigpu.engine.batch_size import leading_size
from lightning_multigpu.engine.hugging_face import models_in_stages
from lightning_multigpu.engine.micro_batches import first_part, moved
from lightning_multigpu.engine.pipeline.measuring.cost_probe import CostProbe
from lightning_multigpu.engine.pipeline.measuring.use_probe import UseProbe
from lightning_multigpu.engine.pipeline.splitting.chain import Chain
from lightning_multigpu.engine.pipeline.splitting.ownership import Ownership
from lightning_multigpu.engine.training_memory import held_bytes
from lightning_multigpu.planning.pipelines.pipeline_prediction import (
    PipelinePlan,
    PipelinePlans,
    median_costs,
    one_device_s,
    plan,
)
from lightning_multigpu.planning.pipelines.schedule_order import ScheduleName
from lightning_multigpu.planning.pipelines.stage_costs import LinkCost, PartCost, StageCosts
from lightning_multigpu.report.split_table import summary
from lightning_multigpu.strategies.pipeline.pipeline_checks import check_callbacks, check_module, check_optimizers
from lightning_multigpu.strategies.pipeline.pipeline_options import PipelineOptions
from lightning_multigpu.strategies.pipeline.strategy import PipelineStrategy
from lightning_multigpu.strategies.pipeline.tensor_axis import layers_within
from lightning_multigpu.strategies.steps.dry_run import QUIET_SETTINGS, unlogged_loss, without_trace
from lightning_multigpu.strategies.tensor_parallel.tensor_split import TensorSplitStrategy

if TYPE_CHECKING:
    import lightning.pytorch as pl

USUAL_NUM_MICRO_BATCHES = (1, 2, 4, 8, 16)
NUM_ROUNDS = 5
"""Rounds of measurements: each measures every number of micro-batches, so that a busy moment affects all numbers."""
_ROUND_S = 0.2


class PlanError(ValueError):
    """The requested plan is impossible; nothing was measured."""


class FirstBatchStrategy(Strategy):
    """Module, optimizers and precision as in training; it trains nothing.

    ``visit`` is called on every rank in place of the first ``training_step``, with this strategy, the batch and the
    further arguments.
    """

    def __init__(self, visit: Callable[[Any, Any, Sequence[Any]], None], **options: Any) -> None:
        super().__init__(**options)
        self._visit = visit

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        batch, *others = (*args, *kwargs.values())
        self._visit(self, batch, others)
        raise EndOfRun


class FirstBatchOnDevice(FirstBatchStrategy, SingleDeviceStrategy):
    """One device."""


class FirstBatchInGroup(FirstBatchStrategy, TensorSplitStrategy):
    """One tensor group."""

    def split(self, chain: Chain, micro_batch: Any, others: Sequence[Any]) -> str:
        """Splits the layers as a rank of a pipeline does; returns a description; a collective of the group."""
        assert self._tensor is not None
        self._layers = layers_within(chain, self._module, self._tensor, self._plan, self._sequence_split)
        self._decide(micro_batch, *others)
        assert self._split_plan is not None
        return summary(self._split_plan)

    def agreed(self, is_enough: bool) -> bool:
        """Whether any rank passes True; a collective of the group."""
        assert self._tensor is not None
        return self._tensor.any(is_enough, self.root_device)


class PipelinePlanner:
    """Predicts time and memory of pipelines under several schedules and with several numbers of micro-batches.

    Args:
        sizes: ranks of a pipeline; the first one decides what a batch is.
        num_pipelines: pipelines beside each other; each has its own batches.
        num_micro_batches: by default 1, 2, 4, 8, 16 and the strategy's own number, up to the batch's samples.
        clip_micro_batches: leave out numbers of micro-batches for which the batch has too few samples.

    Attributes:
        refused: a schedule and a size -> why the module cannot be split so.

    Raises:
        PlanError: a callback cannot be used with a pipeline.
    """

    def __init__(
        self,
        options: Sequence[PipelineOptions],
        sizes: Sequence[int],
        *,
        device: torch.device,
        num_pipelines: int = 1,
        num_micro_batches: Sequence[int] | None = None,
        link: LinkCost = LinkCost(0.0, 0.0),  # noqa: B008
        clip_micro_batches: bool = False,
        callbacks: Sequence[pl.Callback] = (),
        tensor_parallel_size: int = 1,
        split_options: Mapping[str, Any] | None = None,
    ) -> None:
        self._options, self._device = list(options), device
        self._num_micro_batches = num_micro_batches
        self._own_num_micro_batches = options[0].num_parts(sizes[0])
        self._clips = clip_micro_batches
        self._split_options = split_options or {}
        self._is_over = False
        self.refused: dict[tuple[str, int], str] = {}
        self._sizes = list(sizes)
        self._found = PipelinePlans(
            sizes[0], num_pipelines, options[0].balance, link, tensor_parallel_size=tensor_parallel_size
        )
        self._of_batches = [callback for callback in callbacks if hasattr(callback, "check_before_launch")]
        with _as_plan_errors():
            check_callbacks(callbacks)

    @classmethod
    def of_trainer(
        cls,
        trainer: pl.Trainer,
        *,
        schedules: Sequence[ScheduleName] | None,
        num_micro_batches: Sequence[int] | None,
        link: LinkCost,
    ) -> PipelinePlanner:
        """The planner of a Trainer whose strategy is the pipeline; the trainer itself does not run.

        Raises:
            PlanError: the strategy is no pipeline, or a schedule or a callback cannot be used with it.
        """
        strategy = trainer.strategy
        if not isinstance(strategy, PipelineStrategy):
            raise PlanError(
                f"strategy={type(strategy).__name__} is no pipeline; pass strategy='pipeline_1f1b', or another that "
                "'lightning-multigpu strategies' lists as a PipelineStrategy"
            )
        tensor, size = strategy.tensor_parallel_size, strategy.pipeline_parallel_size
        if size == 1:
            raise PlanError(
                f"pipeline_parallel_size=1, tensor_parallel_size={tensor}: the plan is for 2 stages or more; pass "
                "pipeline_parallel_size=2, or use 'lightning-multigpu plan --blocks'"
            )
        options = strategy.pipeline_options
        with _as_plan_errors():
            of_schedules = [options.with_schedule(schedule) for schedule in schedules or [options.schedule]]
        assert strategy.parallel_devices is not None
        return cls(
            of_schedules,
            [size],
            device=strategy.parallel_devices[0],
            num_pipelines=strategy.data_parallel_size,
            num_micro_batches=num_micro_batches,
            link=link,
            callbacks=trainer.callbacks,  # type: ignore[attr-defined]
            tensor_parallel_size=tensor,
            split_options=strategy.tensor_options,
        )

    def run(
        self, module: pl.LightningModule, datamodule: pl.LightningDataModule | None, trainer_settings: Mapping[str, Any]
    ) -> PipelinePlans:
        """Takes the first training batch, measures the layers on it and predicts; weights do not change.

        With a tensor axis, the ranks of one tensor group do so together; the first rank returns the plans. Beside the
        plans of all sizes these have the figures of the first size.

        ``Trainer.fit`` runs in this process up to that batch, with the hooks of module and data and without loggers,
        checkpoints and callbacks, but for those that set the size of batches. Of ``trainer_settings`` those about
        devices, logs and output are replaced.

        Raises:
            PlanError: the module cannot be split in this way, the batch has too few samples, or there is no batch.
            PipelineError: the layers turn out not to be a chain.
        """
        with _as_plan_errors():
            check_module(module)
        size = self._found.tensor_parallel_size
        strategy: FirstBatchStrategy
        if size == 1:
            strategy = FirstBatchOnDevice(self._visit, device=self._device)
        else:
            strategy = FirstBatchInGroup(self._visit, hang_report_s=None, **self._split_options)
        with _warnings_only():
            devices = {"devices": size, "num_nodes": 1, "strategy": strategy}
            settings = {**trainer_settings, **QUIET_SETTINGS, **devices, "callbacks": self._of_batches}
            Trainer(**settings).fit(module, datamodule=datamodule)
        if not self._is_over:
            raise PlanError(
                "the training loader has no batch to measure; see to it that fit would train on one (data, "
                "limit_train_batches, max_epochs, max_steps)"
            )
        return self._found

    def _visit(self, one: FirstBatchStrategy, batch: Any, others: Sequence[Any]) -> None:
        """Makes the plans, from the first batch of a whole module on one device or, split, on one tensor group."""
        assert one.lightning_module is not None
        module, found = one.lightning_module, self._found
        with _as_plan_errors():
            check_optimizers(one.optimizers)
            dim = self._options[0].batch_dim
            # A loader's batch is for one pipeline, unless a callback sets the batch of all pipelines together.
            batch = first_part(moved(batch, dim, 0), found.num_pipelines if self._of_batches else 1)
            found.num_samples = leading_size(batch)
            numbers = self._numbers_of_micro_batches(found.num_samples)
            parts = {number: moved(first_part(batch, number), 0, dim) for number in (1, *numbers)}
            wanted = [
                (options, size, chain)
                for options, size in self._combinations()
                if (chain := self._chain(options, module, size)) is not None
            ]
            chains = {chain.name: chain for _, _, chain in wanted}
            choice = self._options[0].activation_checkpointing
            again = {name: layers_of(name, chain.named_layers(), choice) for name, chain in chains.items()}
        self._is_over = True
        alone = next(iter(chains))  # for the time on one device, which recomputes no layer
        on_one = {
            (alone, number, False): Measurement(one, chains[alone], parts[number], others)
            for number in ((1, *numbers) if found.tensor_parallel_size > 1 else (1,))
        }
        measurements = dict(on_one) if found.tensor_parallel_size == 1 else {}
        agreed: Callable[[bool], bool] = one.agreed if isinstance(one, FirstBatchInGroup) else bool
        for name, chain in chains.items():
            for number in numbers:
                key = (name, number, bool(again[name]))
                if key not in measurements:
                    measurements[key] = Measurement(one, chain, parts[number], others, again[name], agreed)
        for chain in chains.values():
            measurements[chain.name, numbers[0], bool(again[chain.name])].watch()
        with CoreWait() as core_wait:
            begin_s, waited_s = time.perf_counter(), core_wait.seconds()
            if isinstance(one, FirstBatchInGroup):
                if one.is_global_zero:  # while the others wait
                    _run(on_one)
                one.barrier()
                micro_batch = moved(first_part(batch, self._own_num_micro_batches), 0, dim)
                found.split = one.split(chains[alone], micro_batch, others)
            _run(measurements)
            found.waiting = (core_wait.seconds() - waited_s) / (time.perf_counter() - begin_s)
        if not one.is_global_zero:
            return
        wholes = {number: [*each.rounds, median_costs(each.rounds)] for (_, number, _), each in on_one.items()}
        found.one_device_s = one_device_s(wholes[1][-1])
        for options, size, chain in wanted:
            for number in numbers:
                rounds = measurements[chain.name, number, bool(again[chain.name])].rounds
                whole_s = [one_device_s(parts) for parts in wholes[1]]
                if number in wholes:  # or its micro-batches one after the other
                    whole_s = [min(s, number * one_device_s(p)) for s, p in zip(whole_s, wholes[number], strict=True)]
                found.plans.append(self._plan(one, chains[chain.name], options, size, number, rounds, whole_s))

    def _numbers_of_micro_batches(self, num_samples: int | None) -> list[int]:
        limit = num_samples or 1
        usual = [number for number in (*USUAL_NUM_MICRO_BATCHES, self._own_num_micro_batches) if number <= limit]
        wanted = self._num_micro_batches or usual
        if self._clips:
            wanted = [number for number in wanted if number <= limit]
        for number in wanted:
            if number > limit:
                what = "no samples that can be counted" if num_samples is None else f"{num_samples} samples"
                raise PlanError(
                    f"num_micro_batches={number}: the first batch of a pipeline has {what}, and each micro-batch needs "
                    f"one; pass {limit} or less, or a larger batch"
                )
        return sorted(set(wanted))

    def _combinations(self) -> list[tuple[PipelineOptions, int]]:
        return [(options, size) for size in self._sizes for options in self._options]

    def _chain(self, options: PipelineOptions, module: pl.LightningModule, size: int) -> Chain | None:
        """The layers that the strategy would split; None where only this one of several sizes is impossible.

        Raises:
            ValueError: there are none, too few, or another number than a list as ``balance`` has.
        """
        try:
            chain = options.chain(module, size, module.device)
            if options.split_points is None:
                options.bounds(chain, size)
        except ValueError as error:
            if len(self._combinations()) == 1:
                raise
            self.refused[options.schedule, size] = str(error)
            if len(self.refused) == len(self._combinations()):
                raise
            return None
        return chain

    def _plan(
        self,
        one: FirstBatchStrategy,
        chain: Chain,
        options: PipelineOptions,
        num_ranks: int,
        num_micro_batches: int,
        rounds: Sequence[Sequence[PartCost]],
        whole_s: Sequence[float],
    ) -> PipelinePlan:
        """The plan by the medians of the rounds, and by each round with the split of the medians.

        ``whole_s`` has the seconds of one device, for each round and then for the medians.
        """
        assert one.lightning_module is not None
        sizes = chain.training_bytes(one.optimizers)
        even = options.bounds(chain, num_ranks)
        ends = Ownership(one.lightning_module, chain, even, 0, num_ranks).end_bytes(one.optimizers)
        on_all = any(uses > {0, 1 + len(chain)} for uses in chain.uses.values())

        def costs_of(parts: Sequence[PartCost]) -> StageCosts:
            return StageCosts(
                parts,
                sizes,
                self._found.link,
                schedule=options.schedule,
                num_ranks=num_ranks,
                stages_per_rank=options.num_stages_of_rank,
                num_micro_batches=num_micro_batches,
                end_bytes=ends,
                elsewhere_s=None if on_all else 0.0,
            )

        costs = costs_of(median_costs(rounds))
        balance = options.measured_balance
        bounds = even if balance is None else costs.bounds(balance)
        holds = (
            Ownership(one.lightning_module, chain, bounds, position, num_ranks).held() for position in range(num_ranks)
        )
        planned = functools.partial(
            plan,
            options.schedule,
            bounds=bounds,
            module=chain.name,
            description=chain.describe(),
            parameter_bytes=chain.parameter_bytes(),
            held=[held_bytes(parameters, one.optimizers) for parameters in holds],
            tensor_parallel_size=self._found.tensor_parallel_size,
        )
        of_rounds = [planned(costs_of(parts), one_device_s=s) for parts, s in zip(rounds, whole_s[:-1], strict=True)]
        return planned(costs, one_device_s=whole_s[-1], rounds=of_rounds)


class Measurement:
    """Measures the parts of ``training_step``, round by round, on one device with all layers, or with its part of each.

    Random states, gradients, and the module's buffers and attributes are restored after each round. ``recompute`` and
    ``agreed`` are as in :class:`.CostProbe`; ``rounds`` has the costs of the parts in each round.
    """

    def __init__(
        self,
        one: FirstBatchStrategy,
        chain: Chain,
        micro_batch: Any,
        others: Sequence[Any],
        recompute: Collection[int] = (),
        agreed: Callable[[bool], bool] = bool,
    ) -> None:
        assert one.lightning_module is not None
        self._module, self._plugin = one.lightning_module, one.precision_plugin
        self._args = (micro_batch, *others)
        self._chain = chain
        ownership = Ownership(self._module, chain, [(0, len(chain))], 0, 1, device=one.root_device)
        self._use_probe = UseProbe(ownership, 0)
        self._probe = CostProbe(ownership, 0, recompute, fewest_runs=1, enough_s=_ROUND_S, agreed=agreed)
        self.rounds: list[list[PartCost]] = []

    def watch(self) -> None:
        """Finds the stages that will use tensors outside of the layers."""
        with models_in_stages(self._module), without_trace(self._module):
            uses = self._use_probe.watch(self._step, lambda: [vars(part) for part in self._module.modules()])
        self._chain.learn([uses])

    def run(self) -> None:
        """Measures once more."""
        with models_in_stages(self._module), without_trace(self._module):
            found = self._probe.measure(self._step)
        self.rounds.append([found.get(part, PartCost()) for part in range(len(self._chain) + 2)])

    def _step(self) -> Any:
        return unlogged_loss(self._plugin, self._module, lambda: self._module.training_step(*self._args))


def _run(measurements: Mapping[Any, Measurement]) -> None:
    for _ in range(NUM_ROUNDS):
        for measurement in measurements.values():
            measurement.run()


@contextmanager
def _as_plan_errors() -> Iterator[None]:
    """Within the block a ValueError is a :class:`PlanError`."""
    try:
        yield
    except ValueError as error:
        raise PlanError(str(error)) from error


@contextmanager
def _warnings_only() -> Iterator[None]:
    """Within the block Lightning logs warnings only: its run is not the user's."""
    log = logging.getLogger("lightning.pytorch")
    before = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(before)
