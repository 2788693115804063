"""Prediction of a pipeline's time and memory from layers measured on one device, without training."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from typing_extensions import override

from lightning_multigpu._lightning_internals import EndOfRun
from lightning_multigpu.engine.activation_checkpointing import layers_of
from lightning_multigpu.engine.batch_size import leading_size
from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.hugging_face import models_in_stages
from lightning_multigpu.engine.micro_batches import first_part, moved
from lightning_multigpu.engine.pipeline.measuring.layer_costs import layer_costs
from lightning_multigpu.engine.pipeline.measuring.use_probe import UseProbe
from lightning_multigpu.engine.pipeline.splitting.chain import Chain
from lightning_multigpu.engine.pipeline.splitting.ownership import Ownership
from lightning_multigpu.engine.training_memory import held_bytes
from lightning_multigpu.planning.pipelines.pipeline_prediction import PipelinePlan, median_costs, plan
from lightning_multigpu.planning.pipelines.stage_costs import PartCost, StageCosts
from lightning_multigpu.strategies.pipeline.pipeline_checks import check_callbacks, check_module, check_optimizers
from lightning_multigpu.strategies.pipeline.pipeline_options import PipelineOptions
from lightning_multigpu.strategies.steps.dry_run import QUIET_SETTINGS, unlogged_loss, without_trace

if TYPE_CHECKING:
    import lightning.pytorch as pl

NUM_ROUNDS = 5
"""Rounds of measurements: each measures every number of micro-batches, so that a busy moment affects all numbers."""


class PlanError(ValueError):
    """No plan is possible; nothing was measured."""


class FirstBatchStrategy(SingleDeviceStrategy):
    """Module, optimizers and precision as in training on one device; it trains nothing.

    In place of the first ``training_step`` it calls ``visit`` with itself, the batch and the further arguments.
    """

    def __init__(self, visit: Callable[[Any, Any, Sequence[Any]], None], **options: Any) -> None:
        super().__init__(**options)
        self._visit = visit

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        batch, *others = (*args, *kwargs.values())
        self._visit(self, batch, others)
        raise EndOfRun


Refused = dict[tuple[str, int], str]
"""A schedule and a number of ranks -> why the module cannot be split so."""


def pipeline_plans(
    options: Sequence[PipelineOptions],
    sizes: Sequence[int],
    module: pl.LightningModule,
    datamodule: pl.LightningDataModule | None,
    trainer_settings: Mapping[str, Any],
    *,
    device: torch.device,
    num_micro_batches: Sequence[int],
    callbacks: Sequence[pl.Callback] = (),
) -> tuple[list[PipelinePlan], Refused]:
    """Takes the first training batch, measures the layers on it and predicts; weights do not change.

    ``Trainer.fit`` runs in this process up to that batch, with the hooks of module and data and without loggers,
    checkpoints and callbacks, but for those that set the size of batches.

    Args:
        options: those of each schedule.
        sizes: ranks of a pipeline.
        trainer_settings: of which those about devices, logs and output are replaced.
        num_micro_batches: those for which the first batch has too few samples are left out.

    Raises:
        PlanError: the module or a callback cannot be used with a pipeline, or there is no batch.
    """
    plans: list[PipelinePlan] = []
    refused: Refused = {}

    def visit(one: FirstBatchStrategy, batch: Any, others: Sequence[Any]) -> None:
        combinations = [(each, size) for size in sizes for each in options]
        plans.extend(_plans(one, batch, others, combinations, num_micro_batches, refused))

    with _as_plan_errors():
        check_callbacks(callbacks)
        check_module(module)
    with _warnings_only():
        of_batches = [callback for callback in callbacks if hasattr(callback, "check_before_launch")]
        devices = {"devices": 1, "num_nodes": 1, "strategy": FirstBatchStrategy(visit, device=device)}
        settings = {**trainer_settings, **QUIET_SETTINGS, **devices, "callbacks": of_batches}
        Trainer(**settings).fit(module, datamodule=datamodule)
    if not plans and not refused:
        raise PlanError(
            "the training loader has no batch to measure; see to it that fit would train on one (data, "
            "limit_train_batches, max_epochs, max_steps)"
        )
    return plans, refused


def _plans(
    one: FirstBatchStrategy,
    batch: Any,
    others: Sequence[Any],
    combinations: Sequence[tuple[PipelineOptions, int]],
    num_micro_batches: Sequence[int],
    refused: Refused,
) -> Iterator[PipelinePlan]:
    """The plans of the first batch; notes what is ``refused``."""
    assert one.lightning_module is not None
    module, usual = one.lightning_module, combinations[0][0]
    with _as_plan_errors():
        check_optimizers(one.optimizers)
        batch = moved(batch, usual.batch_dim, 0)
        limit = leading_size(batch) or 1
        numbers = sorted({number for number in num_micro_batches if number <= limit})
        parts = {number: moved(first_part(batch, number), 0, usual.batch_dim) for number in (1, *numbers)}
    uses: dict[str, list[tuple[PipelineOptions, int]]] = {}
    chains: dict[str, Chain] = {}
    for options, size in combinations:
        try:
            chain = options.chain(module, size, module.device)
            if options.split_points is None:
                options.bounds(chain, size)
        except ValueError as error:
            refused[options.schedule, size] = str(error)
        else:
            chains[chain.name] = chain
            uses.setdefault(chain.name, []).append((options, size))
    for name, chain in chains.items():
        try:
            again = layers_of(name, chain.named_layers(), usual.activation_checkpointing)
            whole = 1, frozenset[int]()  # for the time on one device, which recomputes no layer
            measured = {
                (number, layers): Measurement(one, chain, parts[number], others, layers)
                for number, layers in dict.fromkeys([whole, *((number, again) for number in numbers)])
            }
            measured[numbers[0], again].watch()
            for _ in range(NUM_ROUNDS):
                for measurement in measured.values():
                    measurement.run()
        except (ValueError, PipelineError, RuntimeError) as error:
            refused |= {(options.schedule, size): str(error) for options, size in uses[name]}
            continue
        one_device_s = sum(part.forward_s + part.backward_s for part in median_costs(measured[whole].rounds))
        for options, size in uses[name]:
            for number in numbers:
                yield _plan(one, chain, options, size, number, measured[number, again].rounds, one_device_s)


def _plan(
    one: FirstBatchStrategy,
    chain: Chain,
    options: PipelineOptions,
    num_ranks: int,
    num_micro_batches: int,
    rounds: Sequence[Sequence[PartCost]],
    one_device_s: float,
) -> PipelinePlan:
    """The plan by the medians of the rounds; each round has its own step with the split of the medians."""
    assert one.lightning_module is not None
    sizes = chain.training_bytes(one.optimizers)
    even = options.bounds(chain, num_ranks)
    ends = Ownership(one.lightning_module, chain, even, 0, num_ranks).end_bytes(one.optimizers)

    def costs_of(parts: Sequence[PartCost]) -> StageCosts:
        return StageCosts(
            parts,
            sizes,
            schedule=options.schedule,
            num_ranks=num_ranks,
            stages_per_rank=options.num_stages_of_rank,
            num_micro_batches=num_micro_batches,
            end_bytes=ends,
        )

    costs = costs_of(median_costs(rounds))
    balance = options.measured_balance
    bounds = even if balance is None else costs.bounds(balance)
    holds = (
        Ownership(one.lightning_module, chain, bounds, position, num_ranks).held() for position in range(num_ranks)
    )
    return plan(
        options.schedule,
        costs,
        bounds,
        parameter_bytes=chain.parameter_bytes(),
        held=[held_bytes(parameters, one.optimizers) for parameters in holds],
        one_device_s=one_device_s,
        steps_s=[costs_of(parts).step_s(bounds) for parts in rounds],
    )


class Measurement:
    """Measures the parts of ``training_step``, round by round, on one device.

    Random states, gradients, and the module's buffers and attributes are restored after each round. ``recompute`` is as
    in :func:`.layer_costs`; ``rounds`` has the costs of the parts in each round.
    """

    def __init__(
        self,
        one: FirstBatchStrategy,
        chain: Chain,
        micro_batch: Any,
        others: Sequence[Any],
        recompute: Collection[int] = (),
    ) -> None:
        assert one.lightning_module is not None
        self._module, self._plugin = one.lightning_module, one.precision_plugin
        self._args = (micro_batch, *others)
        self._chain = chain
        self._ownership = Ownership(self._module, chain, [(0, len(chain))], 0, 1, device=one.root_device)
        self._recompute = recompute
        self.rounds: list[list[PartCost]] = []

    def watch(self) -> None:
        """Finds the stages that will use tensors outside of the layers."""
        with models_in_stages(self._module), without_trace(self._module):
            uses = UseProbe(self._ownership, 0).watch(
                self._step, lambda: [vars(part) for part in self._module.modules()]
            )
        self._chain.learn([uses])

    def run(self) -> None:
        """Measures once more."""
        with models_in_stages(self._module), without_trace(self._module):
            found = layer_costs(self._ownership, self._step, 0, self._recompute)
        self.rounds.append([found.get(part, PartCost()) for part in range(len(self._chain) + 2)])

    def _step(self) -> Any:
        return unlogged_loss(self._plugin, self._module, lambda: self._module.training_step(*self._args))


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
