"""A pipeline during a run: training of micro-batches and evaluation of whole batches on the stages of one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities import move_data_to_device
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_map, tree_map_only
from torchmetrics import Metric

from lightning_multigpu.engine.activation_checkpointing import layers_of
from lightning_multigpu.engine.batch_size import leading_size
from lightning_multigpu.engine.data_parallel.agreement import LossReduction
from lightning_multigpu.engine.data_parallel.module_buffers import ModuleBuffers
from lightning_multigpu.engine.hugging_face import models_in_stages
from lightning_multigpu.engine.micro_batches import (
    checksum_of,
    cloned,
    combined_loss,
    moved,
    num_micro_batches_of,
    signature_of,
    split_batch,
    weights_of,
)
from lightning_multigpu.engine.one_process.gathering import gathered
from lightning_multigpu.engine.pipeline.measuring.recorder import Recorder
from lightning_multigpu.engine.pipeline.splitting.chain import Chain
from lightning_multigpu.engine.pipeline.stages.gradients import DataAxis
from lightning_multigpu.engine.pipeline.stages.runner import PipelineRunner
from lightning_multigpu.engine.step_state import seed_of, without_differentiation
from lightning_multigpu.engine.tensor_split.parts import whole
from lightning_multigpu.planning.pipelines.balance import Bounds
from lightning_multigpu.planning.pipelines.timeline import StageRecord
from lightning_multigpu.strategies.pipeline.clipping import StageClipping
from lightning_multigpu.strategies.pipeline.last_stage_outputs import LastStageOutputs
from lightning_multigpu.strategies.pipeline.preparation import Preparation
from lightning_multigpu.strategies.pipeline.proof import form_of
from lightning_multigpu.strategies.pipeline.split_model import SplitModel
from lightning_multigpu.strategies.pipeline.tensor_axis import TensorAxis
from lightning_multigpu.strategies.steps.dry_run import unlogged_loss
from lightning_multigpu.strategies.steps.same_batches import same_batch
from lightning_multigpu.strategies.steps.step_logs import Record, StepLogs, combined, uncounted_logs

if TYPE_CHECKING:
    from lightning_multigpu.strategies.pipeline.strategy import PipelineStrategy

_SEED_BITS = 2**62 - 1


class RunningPipeline:
    """One rank's part of a pipeline during a run. Methods are collectives of the pipeline unless they say otherwise.

    To make one splits the module over the ranks, a collective of the world. It ends with the strategy's ``_undo``.

    Attributes:
        data_axis: the ranks that hold the same stages in other pipelines; None for one pipeline.
        tensor_axis: the ranks that split the layers of this rank's stages; None without a tensor split.
        in_step: a step of the user is running, so other stages are elsewhere in the program.
        step_args: the arguments of the ``training_step`` under way.

    Raises:
        ValueError: no layer has a name or class that is listed in ``activation_checkpointing``.
    """

    def __init__(self, strategy: PipelineStrategy, chain: Chain, bounds: Bounds) -> None:
        module, undo, plugin = strategy._module, strategy._undo, strategy.precision_plugin
        self.strategy, self.options = strategy, strategy.pipeline_options
        self.model = model = SplitModel(strategy, chain, bounds)
        self.data_axis = self._data_axis()
        self.tensor_axis = axis = None if strategy.tensor_parallel_size == 1 else TensorAxis(model, strategy)
        self.clipping = StageClipping(plugin, model, None if axis is None else axis.group)
        undo.callback(self.clipping.end)
        is_last = model.is_last
        self.outputs = LastStageOutputs(module, model.group, is_last=is_last, at_end=self.clipping.hide_gradients)
        self.outputs.add_first()
        undo.callback(self.outputs.add_first, leaves=True)
        undo.enter_context(models_in_stages(module))
        strategy.remote = model.remote
        if axis is None:  # else all ranks of a tensor group gather
            strategy.stream_saves(module.trainer, undo)
        else:
            undo.callback(axis.layers.follow_updates(plugin, strategy._watch_states).end)
        self.recorder = Recorder(model.meter, model.device)
        self.logs = StepLogs(module)
        self.loss_reduction = _of_micro_batches(strategy.feed.loss_reduction, self.options.batch_dim)
        self.num_micro_batches = self.options.num_parts(model.group.num_ranks)
        seed = strategy.collectives.world.broadcast_object(torch.initial_seed() & _SEED_BITS, 0)
        self.seed = seed_of(seed, strategy.data_parallel_rank)
        self.in_step = False
        self.step_args: tuple[Any, ...] = ()
        self.recompute = layers_of(chain.name, chain.named_layers(), self.options.activation_checkpointing)
        self.runner = self.new_runner(self.recorder)
        self._preparation = Preparation(self)
        self._loss_form: set[Any] = set()  # of all losses so far: a new term is proved
        self._metrics = [part for part in module.modules() if isinstance(part, Metric)]
        self._num_evaluated = 0

    def new_runner(self, recorder: Recorder) -> PipelineRunner:
        """What runs the stages that this rank has now; no collective."""
        ownership, schedule = self.model.ownership, self.options.schedule
        return PipelineRunner(ownership, schedule=schedule, recompute=self.recompute, recorder=recorder)

    def _data_axis(self) -> DataAxis | None:
        """The ranks that hold the same stages in other pipelines; a collective of the world."""
        strategy = self.strategy
        if strategy.data_parallel_size == 1:
            return None
        reducer = strategy._transport.open(
            strategy.groups, strategy.meter, ranks_per_host=strategy.num_processes, hook=None
        )
        control = strategy.metered(strategy.collectives.data.group, "control")
        strategy.reducer, strategy.buffers = reducer, ModuleBuffers(strategy._module, control)
        return DataAxis(reducer, control)

    # The user's steps; no collectives

    def call(self, hook: str, *args: Any, **kwargs: Any) -> Any:
        """The output of a step of the module, in which parts over the tensor group are gathered.

        A ``training_step`` gets a micro-batch, cut along dimension 0.
        """
        if hook == "training_step":
            args = (moved(args[0], 0, self.options.batch_dim), *args[1:])
        axis, self.in_step = self.tensor_axis, True
        try:
            with nullcontext() if axis is None else axis.group.showing(parts=False):
                output = getattr(self.model.module, hook)(*args, **kwargs)
                return output if axis is None else tree_map(whole, output)
        finally:
            self.in_step = False
            # A metric that this stage computed alone within the step has to be computed by all stages.
            for metric in self._metrics:
                metric._computed = None

    def loss_of(self, micro_batch: Any, others: Sequence[Any]) -> Any:
        """The loss of a dry run of ``training_step``, whose logs are dropped."""
        plugin, module = self.strategy.precision_plugin, self.model.module
        return unlogged_loss(plugin, module, lambda: self.call("training_step", micro_batch, *others))

    # Training

    def same_batch(self, batch: Any, device: torch.device, checksum: int | None) -> Any:
        """The batch on the device; if its ranks have loaded different ones, the first rank's of the last stage."""
        model = self.model
        if not model.on_hosts.same_everywhere(checksum_of(batch) if checksum is None else checksum):
            # Without the module's hooks: the last stage has called them for this batch.
            batch, checksum = model.stages.broadcast_object(batch, model.group.ranks[-1]), None
            batch = move_data_to_device(batch, device)
        if self.tensor_axis is None or self.strategy.failure_watch.failed:
            return batch
        return same_batch(batch, self.tensor_axis.peers, device, checksum)

    def train(self, *, multiplier: float, accumulating: bool) -> dict[str, Any]:
        """Forward and backward of a batch; a collective of the world. The step's logs are logged once, on every stage.

        Args:
            accumulating: more batches follow before the optimizer's step, so gradients stay on their ranks.

        Returns:
            The loss of the whole batch, and the step's further outputs on the last stage, or on all if a hook reads
            them.

        Raises:
            ValueError, PipelineError: as :meth:`.Preparation.prepare`.
        """
        if self.strategy.buffers is not None:
            self.strategy.buffers.before_step(accumulates=accumulating)
        trainer = self.model.module.trainer
        (whole, *others), self.step_args = self.step_args, ()
        whole = moved(whole, self.options.batch_dim, 0)
        parts = split_batch(whole, num_micro_batches_of(whole, self.num_micro_batches))
        trainable = tuple(parameter.requires_grad for parameter in self.model.ownership.parameters())
        batch = TrainingBatch(whole, others, parts, weights_of(parts, self.loss_reduction), multiplier, trainable)
        self._preparation.prepare(batch)
        batch.without_gradient = [p for p in self.model.ownership.held() if p.grad is None]
        # Whether sent tensors have a gradient depends on what is trained.
        kinds = [(signature_of(part), batch.trainable) for part in batch.parts]
        seed = (self.seed, 0, trainer.current_epoch, trainer.fit_loop.batch_idx)
        with self.outputs.noting():
            batch.losses = self.runner.train(partial(self._training_step, batch), kinds, batch.scales, seed)
        outputs = self._share_outputs(batch)
        if batch.has_new_term and batch.counts:
            self._preparation.prove(batch)
        if not accumulating:
            self._reduce_gradients()
        return outputs

    def _training_step(self, batch: TrainingBatch, micro_batch: int) -> Any:
        """The loss of a micro-batch; no collective."""
        part = batch.parts[micro_batch]
        if len(self.runner.stages) > 1:  # a step may change its batch in place, and each stage runs it
            part = cloned(part)
        with (
            self.strategy.precision_plugin.train_step_context(),
            self.logs.recording(pass_on=False) as batch.records[micro_batch],
            without_differentiation(),
        ):
            loss = self.call("training_step", part, *batch.others)
        if isinstance(loss, Mapping):
            batch.outputs[micro_batch] = {key: value for key, value in loss.items() if key != "loss"}
            loss = loss.get("loss")
        if micro_batch == 0 and self.options.verify_steps and isinstance(loss, Tensor):
            form = form_of(loss)
            batch.has_new_term = bool(self._loss_form) and not form <= self._loss_form
            self._loss_form |= form
        return loss

    def _share_outputs(self, batch: TrainingBatch) -> dict[str, Any]:
        """Logs what the last stage's steps have logged as the logs of one batch; returns the outputs of the batch."""
        model, trainer = self.model, self.model.module.trainer
        message: Any = None
        further: dict[str, Any] = {}
        if model.is_last:
            samples = [leading_size(part) or 1 for part in batch.parts]
            sizes = batch.weights if callable(self.loss_reduction) else [float(size) for size in samples]
            logged = combined(batch.records, sizes, batch.losses, batch.weights)
            loss = combined_loss(batch.losses, batch.weights)
            message = logged, loss, trainer.should_stop, batch.has_new_term, self.runner.uses_layers
            further = tree_map_only(Tensor, Tensor.detach, gathered(batch.outputs, samples, model.device))
        received, further = self.outputs.from_last(message, further, "on_train_batch_end")
        logged, loss, stops, batch.has_new_term, uses_layers = received
        if not (uses_layers or (model.is_last and len(self.runner.stages) == 1)):
            # Stages before the last one have got zeros for parameters on which no loss depends, and one device has no
            # gradient: an optimizer with momentum or weight decay would change them.
            for parameter in batch.without_gradient:
                if parameter.grad is not None and not parameter.grad.any():
                    parameter.grad = None
        trainer.should_stop = trainer.should_stop or stops  # a step may ask for the end of training
        with nullcontext() if batch.counts else uncounted_logs(model.module):  # not those of a batch that is repeated
            self.logs.replay(logged, "training_step")
        return {"loss": loss, **further}

    def _reduce_gradients(self) -> None:
        """Averages gradients of unshared parameters first: later stages do so while earlier ones still run backward."""
        ownership = self.model.ownership
        common = ownership.common()
        shared = {id(holding.tensor) for holding in common}
        if self.data_axis is not None:
            self.data_axis.average_gradients([p for p in ownership.held() if id(p) not in shared])
        self.clipping.sums.sum_gradients(common)
        if self.data_axis is not None:
            self.data_axis.average_gradients([p for p in ownership.held() if id(p) in shared])

    # Evaluation

    def evaluate(self, hook: str, *args: Any, **kwargs: Any) -> Any:
        """Runs ``validation_step``, ``test_step`` or ``predict_step`` on a whole batch.

        Returns:
            The output of the step: on every stage for ``predict_step`` and if a hook reads it, else on the last stage;
            None elsewhere.
        """
        self._preparation.prepare_evaluation(hook, *args, **kwargs)
        is_last = self.model.is_last
        self._num_evaluated += 1
        seed = (self.seed, 1, self.model.module.trainer.global_step, self._num_evaluated)
        with self.outputs.noting(), self.logs.recording(pass_on=is_last) as records:
            output = self.runner.evaluate(lambda: self.call(hook, *args, **kwargs), seed)
        batch_end = None if hook == "predict_step" else f"on_{hook.removesuffix('_step')}_batch_end"
        replayed, output = self.outputs.from_last(records, output, batch_end)
        if not is_last:
            self.logs.replay(replayed, hook)
        self.model.group.finish()
        return output

    # The end of the run

    def make_whole(self) -> None:
        """Gives the ranks the whole module, with ``gather_at_end``, at the end of a run without failures."""
        if self.tensor_axis is not None:
            self.tensor_axis.make_whole()
        if self.options.gather_at_end:
            self.model.make_whole(is_first=self.strategy.data_parallel_rank == 0)
        else:
            self.model.leave_in_parts()

    # Reports

    def stage_record(self) -> StageRecord:
        """The newest steps of this rank's stages."""
        strategy = self.strategy
        return StageRecord(
            # Reports show the ranks with the same part of every layer as one pipeline.
            pipeline=strategy.data_parallel_rank * strategy.tensor_parallel_size + strategy.tensor_parallel_rank,
            position=self.model.ownership.position,
            num_ranks=self.model.group.num_ranks,
            stages_per_rank=self.options.num_stages_of_rank,
            schedule=self.options.schedule,
            steps=self.recorder.steps(),
        )


@dataclass
class TrainingBatch:
    """A batch of ``training_step`` in micro-batches, and the results of their passes.

    Attributes:
        whole: the batch, the same on every stage, with its samples along dimension 0.
        others: further arguments of ``training_step``.
        parts: the micro-batches.
        weights: of the micro-batches' losses, in the loss of the batch.
        multiplier: the factor of the loss before its backward; 0 for a batch that does not count (``counts``).
        scales: the factor of each micro-batch's loss before its backward.
        trainable: whether each parameter of the module is trained now, the same on all stages.
        without_gradient: parameters of this rank that had no gradient before.
        records, outputs: for each micro-batch, what its step has logged, and returned beside the loss.
        losses: the losses of the micro-batches, on the last stage.
        has_new_term: the first loss has a term that earlier batches had not.
    """

    whole: Any
    others: list[Any]
    parts: list[Any]
    weights: list[float]
    multiplier: float
    trainable: tuple[bool, ...]
    without_gradient: list[Parameter] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    has_new_term: bool = False

    def __post_init__(self) -> None:
        self.records: list[list[Record]] = [[] for _ in self.parts]
        self.outputs: list[dict[str, Any]] = [{} for _ in self.parts]
        self.counts = self.multiplier != 0
        self.scales = [weight * self.multiplier for weight in self.weights]


def _of_micro_batches(loss_reduction: LossReduction, batch_dim: int) -> LossReduction:
    """The loss reduction; a function gets micro-batches as the user's batches are, with their own batch dimension."""
    if not callable(loss_reduction):
        return loss_reduction
    return wraps(loss_reduction)(lambda part: loss_reduction(moved(part, 0, batch_dim)))
