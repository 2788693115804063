"""A pipeline from the setup of a run to its teardown: the split model, its steps, and what its ranks do together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.optim import Optimizer

from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.engine.data_parallel.agreement import LossReduction
from lightning_multigpu.engine.pipeline.measuring.cost_probe import ChainProbe
from lightning_multigpu.engine.pipeline.measuring.recorder import Recorder
from lightning_multigpu.engine.pipeline.splitting.hugging_face import ModelsInStages
from lightning_multigpu.engine.pipeline.stages.gradients import DataAxis, RemoteGradients, StageSums
from lightning_multigpu.engine.pipeline.stages.micro_batches import checksum_of, num_micro_batches_of
from lightning_multigpu.engine.pipeline.stages.recompute import layers_of
from lightning_multigpu.engine.pipeline.stages.runner import PipelineRunner
from lightning_multigpu.engine.pipeline.stages.step_state import seed_of
from lightning_multigpu.planning.stage_costs import MeasuredBalance, StageCosts
from lightning_multigpu.planning.timeline import StageRecord
from lightning_multigpu.strategies.hook_detection import has_hook
from lightning_multigpu.strategies.pipeline.last_stage_outputs import StageAgreement, gather_metrics_by
from lightning_multigpu.strategies.pipeline.pipeline_checks import describe_split
from lightning_multigpu.strategies.pipeline.pipeline_options import PipelineOptions
from lightning_multigpu.strategies.pipeline.split_model import SplitModel
from lightning_multigpu.strategies.pipeline.stage_balance import announce, measured_costs
from lightning_multigpu.strategies.pipeline.stage_steps import StageSteps

_SEED_BITS = 2**62 - 1


class RunningPipeline:
    """One rank's part of a pipeline that runs. It covers methods of other objects until :meth:`end`.

    Args:
        model: split, with its values on this rank's device.
        options: of the strategy.
        balance: what the layers are split by as soon as they have been measured, on the first batch; None if they are
            not.
        loss_reduction: what the losses of micro-batches count for.
        plugin: the Trainer's precision plugin.
        number: of this pipeline among those side by side.
        data_axis: to the ranks with the same stages in the other pipelines; None if there are none.
        group_of: the ranks of a process group, of the data axis for None; None where there is nobody to talk to.

    Raises:
        ValueError: there is no layer of a name or class in ``activation_checkpointing``.
    """

    def __init__(
        self,
        model: SplitModel,
        options: PipelineOptions,
        *,
        balance: MeasuredBalance | None,
        loss_reduction: LossReduction,
        plugin: Precision,
        number: int,
        data_axis: DataAxis | None,
        group_of: Callable[[Any], MeteredGroup | None],
    ) -> None:
        self.model = model
        self._options = options
        self._num_micro_batches = options.num_parts(model.line.num_ranks)
        self._balance_due = balance
        self._loss_reduction = loss_reduction
        self._number = number
        self._data_axis = data_axis
        self._group_of = group_of
        self._buffers_due = True
        self._will_train = model.module.trainer.state.fn == TrainerFn.FITTING
        self._sums = StageSums(model.line, model.meter)
        runner = self._new_runner()
        seed = model.stages.broadcast_object(torch.initial_seed() & _SEED_BITS, model.line.ranks[0])
        self.steps = StageSteps(model.module, runner, plugin, seed_of(seed, number), model.ownership.parameters)
        self._metrics = gather_metrics_by(model.module, self._gather_metric)
        self._models = ModelsInStages(model.module)
        self._gradients = RemoteGradients(model.ownership, self._sums)
        self._agreement = StageAgreement(plugin, model.ownership, self._sums, self._gradients)

    def _new_runner(self) -> PipelineRunner:
        model = self.model
        return PipelineRunner(
            model.chain,
            model.bounds,
            model.line,
            model.device,
            model.meter,
            schedule=self._options.schedule,
            parameters=model.ownership.held,
            recompute=layers_of(model.chain, self._options.activation_checkpointing),
            recorder=Recorder(model.meter, model.device, model.ownership.held, model.ownership.buffers),
        )

    def end(self) -> None:
        """Puts back what it has covered; no collective."""
        self._agreement.end()
        for metric in self._metrics:
            metric.dist_sync_fn = None
        self._models.end()
        if self._data_axis is not None:
            self._data_axis.close()

    # Training

    def has_same_batch(self, batch: Any) -> bool:
        """Whether all stages have loaded the same batch; a collective of the pipeline."""
        return self.model.line.same_everywhere(checksum_of(batch))

    def batch_of_last(self, batch: Any) -> Any:
        """The batch that the last stage has loaded, on every stage; a collective of the pipeline."""
        return self.model.stages.broadcast_object(batch, self.model.line.ranks[-1])

    def train(
        self,
        batch: Any,
        others: Sequence[Any],
        *,
        multiplier: float,
        accumulating: bool,
        optimizers: Sequence[Optimizer],
    ) -> dict[str, Any]:
        """Forward and backward of a batch; a collective of the world.

        Args:
            batch: the same on every stage.
            others: further arguments of ``training_step``.
            multiplier: of the loss, before its backward.
            accumulating: more batches follow before the optimizer's step, and gradients stay with their ranks.
            optimizers: whose states move where the first batch decides how the layers are split.

        Returns:
            What :meth:`.StageSteps.train` returns.
        """
        if self._buffers_due:
            self.share_buffers()
        self._buffers_due = not accumulating
        if self.model.is_untraced:
            with self.steps.dry_run(batch, others, self._num_micro_batches) as step:
                self._arrange(step, optimizers, will_train=True)
        if self._balance_due is not None:
            balance, self._balance_due = self._balance_due, None
            self._split_by_measure(balance, batch, others, optimizers)
        outputs = self.steps.train(
            batch,
            others,
            multiplier=multiplier,
            num_micro_batches=self._num_micro_batches,
            loss_reduction=self._loss_reduction,
        )
        if not accumulating:
            self._reduce_gradients()
        return outputs

    def hooks_see_gradients(self, hook: str) -> AbstractContextManager[None]:
        """Within the block parameters have gradients that other stages hold, if the user's code has such a hook."""
        return self._gradients.shown() if has_hook(hook, self.model.module) else nullcontext()

    def _reduce_gradients(self) -> None:
        """A stage's own gradients first: later stages have them while earlier ones still run backward."""
        common = self.model.ownership.common()
        if self._data_axis is not None:
            of_all = {id(parameter) for parameter in common}
            self._data_axis.average_gradients([p for p in self.model.ownership.held() if id(p) not in of_all])
        self._sums.sum_gradients(common)
        if self._data_axis is not None:
            self._data_axis.average_gradients(common)

    def share_buffers(self) -> None:
        """Gives all pipelines the buffers of the first; a collective of the data axis."""
        if self._data_axis is not None:
            self._data_axis.share_buffers(self.model.ownership.buffers())

    def _split_by_measure(
        self, balance: MeasuredBalance, batch: Any, others: Sequence[Any], optimizers: Sequence[Optimizer]
    ) -> None:
        """Measures the layers on the first batch, which is trained on afterwards, and splits them accordingly."""
        model = self.model
        costs = self._measured_costs(batch, others, optimizers)
        before = model.bounds
        model.split_again(self._broadcast(costs.bounds(balance)), optimizers)
        recorded = self.steps.runner.recorder
        self.steps.runner = self._new_runner()
        self.record(steps=recorded.notes_steps, activations=recorded.counts_activations)
        model.meter.discard()
        announce(balance, costs, model.bounds, before, model.chain.name, model.line)

    def _measured_costs(self, batch: Any, others: Sequence[Any], optimizers: Sequence[Optimizer]) -> StageCosts:
        model = self.model
        seed = self._broadcast(torch.initial_seed() & _SEED_BITS)
        again = layers_of(model.chain, self._options.activation_checkpointing)
        probe = ChainProbe(model.chain, model.bounds, model.ownership, model.line, model.device, seed, again)
        with self.steps.dry_run(batch, others, self._num_micro_batches) as step:
            return measured_costs(
                probe,
                step,
                model.stages,
                model.line,
                model.chain,
                optimizers,
                schedule=self._options.schedule,
                num_ranks=model.line.num_ranks,
                stages_per_rank=self._options.num_stages_of_rank,
                num_micro_batches=num_micro_batches_of(batch, self._num_micro_batches),
            )

    def _arrange(self, step: Callable[[], Any], optimizers: Sequence[Optimizer], *, will_train: bool) -> None:
        model = self.model
        model.arrange(step, optimizers, will_train=will_train)
        rank_zero_info(describe_split(model.chain, model.bounds, model.line.ranks))

    # Evaluation

    def evaluate(
        self, hook: str, args: tuple[Any, ...], kwargs: dict[str, Any], optimizers: Sequence[Optimizer]
    ) -> Any:
        """Runs ``validation_step``, ``test_step`` or ``predict_step``; a collective of the pipeline.

        Returns:
            What :meth:`.StageSteps.evaluate` returns.
        """
        if self.model.is_untraced:
            with self.steps.evaluation_dry_run(hook, *args, **kwargs) as step:
                self._arrange(step, optimizers, will_train=self._will_train)
        return self.steps.evaluate(hook, *args, **kwargs)

    # Messages

    def _broadcast(self, obj: Any) -> Any:
        """``obj`` of rank 0, on all ranks of all pipelines."""
        world = self._group_of(dist.group.WORLD)
        return obj if world is None else world.broadcast_object(obj, 0)

    def _gather_metric(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        """The states of a metric on the last stages, where its samples are.

        Within a step only those ask; outside, all ranks do.
        """
        asked = self._group_of(dist.group.WORLD)
        if asked is None:
            return [tensor]
        states = asked.gather_objects((self.steps.runner.is_last, tensor.cpu()))
        return [state.to(tensor.device) for counts, state in states if counts]

    # What it did

    def record(self, *, steps: bool, activations: bool) -> None:
        """Whether steps are noted from now on and, in one of them, what autograd keeps for backward is counted."""
        recorder = self.steps.runner.recorder
        recorder.notes_steps, recorder.counts_activations = steps, activations

    def stage_record(self, optimizers: Sequence[Optimizer]) -> StageRecord:
        """What this rank's stages did in the newest steps, and hold with the optimizers' states."""
        runner = self.steps.runner
        return StageRecord(
            pipeline=self._number,
            position=runner.position,
            num_ranks=runner.line.num_ranks,
            stages_per_rank=self._options.num_stages_of_rank,
            schedule=self._options.schedule,
            steps=runner.recorder.steps(),
            memory=runner.recorder.memory(optimizers),
        )
