"""A pipeline during a run: training of micro-batches and evaluation of whole batches on the stages of one rank."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from lightning.pytorch.plugins import Precision
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import tree_map_only
from torchmetrics import Metric

from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.engine.activation_checkpointing import layers_of
from lightning_multigpu.engine.batch_size import leading_size
from lightning_multigpu.engine.data_parallel.agreement import LossReduction
from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.micro_batches import (
    checksum_of,
    cloned,
    combined_loss,
    first_part,
    moved,
    num_micro_batches_of,
    signature_of,
    split_batch,
    weights_of,
)
from lightning_multigpu.engine.one_process.gathering import gathered
from lightning_multigpu.engine.pipeline.measuring.cost_probe import CostProbe, slowest_link
from lightning_multigpu.engine.pipeline.measuring.recorder import Recorder
from lightning_multigpu.engine.pipeline.measuring.stage_bytes import end_bytes, layer_bytes
from lightning_multigpu.engine.pipeline.stages.gradients import DataAxis, StageSums
from lightning_multigpu.engine.pipeline.stages.loss_forms import LossForms
from lightning_multigpu.engine.pipeline.stages.runner import PipelineRunner
from lightning_multigpu.engine.step_state import seed_of, without_differentiation
from lightning_multigpu.engine.training_memory import held_bytes
from lightning_multigpu.planning.numbers import ms, size
from lightning_multigpu.planning.pipelines.stage_costs import LinkCost, MeasuredBalance, PartCost, StageCosts
from lightning_multigpu.planning.pipelines.timeline import StageRecord
from lightning_multigpu.strategies.pipeline.kept_state import KeptState
from lightning_multigpu.strategies.pipeline.last_stage_outputs import LastStageOutputs
from lightning_multigpu.strategies.pipeline.pipeline_options import PipelineOptions
from lightning_multigpu.strategies.pipeline.split_model import SplitModel
from lightning_multigpu.strategies.pipeline.stage_agreement import StageAgreement
from lightning_multigpu.strategies.pipeline.step_checks import check_gradients, check_kept_state, check_losses
from lightning_multigpu.strategies.pipeline.tensor_axis import TensorAxis
from lightning_multigpu.strategies.steps.dry_run import unlogged_loss, without_trace
from lightning_multigpu.strategies.steps.step_logs import Record, StepLogs, combined, uncounted_logs

_SEED_BITS = 2**62 - 1


def _on_parts(method: Callable[..., Any]) -> Callable[..., Any]:
    """Within the method, but for the user's steps, parameters of split layers read as this rank's part."""

    @wraps(method)
    def on_parts(self: RunningPipeline, *args: Any, **kwargs: Any) -> Any:
        with self._showing(parts=True):
            return method(self, *args, **kwargs)

    return on_parts


class RunningPipeline:
    """One rank's part of a pipeline during a run. Methods are collectives of the pipeline unless they say otherwise.

    Args:
        model: the split model, with its values on this rank's device.
        options: the options of the pipeline.
        outputs: copies values of the last stage to all stages.
        loss_reduction: combines the losses of micro-batches to the loss of their batch.
        plugin: the Trainer's precision plugin.
        number: the index of this pipeline among all pipelines.
        data_axis: communication with the ranks that hold the same stages in other pipelines; None for one pipeline.
        tensor_axis: the ranks that split the layers of this rank's stages; None without a tensor split.
        world: all ranks of all pipelines.

    Attributes:
        model, outputs: as given.
        agreement: has all stages clip by one norm, and agree on overflow.
        in_step: the user's step is running, so other stages are elsewhere in the program.

    Raises:
        ValueError: no layer has a name or class that is listed in ``activation_checkpointing``.
    """

    def __init__(
        self,
        model: SplitModel,
        options: PipelineOptions,
        outputs: LastStageOutputs,
        *,
        loss_reduction: LossReduction,
        plugin: Precision,
        number: int,
        data_axis: DataAxis | None,
        tensor_axis: TensorAxis | None,
        world: MeteredGroup,
    ) -> None:
        self.in_step = False
        self.model = model
        self._options = options
        self.outputs = outputs
        self._loss_reduction = loss_reduction
        if callable(loss_reduction):
            self._loss_reduction = wraps(loss_reduction)(lambda part: loss_reduction(moved(part, 0, options.batch_dim)))
        self._plugin = plugin
        self._number = number
        self._data_axis = data_axis
        self._tensor_axis = tensor_axis
        self._world = world
        self._num_micro_batches = options.num_parts(model.group.num_ranks)
        self._recompute = layers_of(model.chain.name, model.chain.named_layers(), options.activation_checkpointing)
        self._recorder = Recorder(model.meter, model.device, model.ownership.parameters, model.ownership.buffers)
        self._kept = KeptState(model.module, model.chain)
        self._runner = self._new_runner()
        seed = world.broadcast_object(torch.initial_seed() & _SEED_BITS, 0)
        self._seed = seed_of(seed, number)
        self._sums = StageSums(model.group)
        self._logs = StepLogs(model.module)
        self._metrics = [part for part in model.module.modules() if isinstance(part, Metric)]
        self._num_evaluated = 0
        self._will_train = model.module.trainer.state.fn == TrainerFn.FITTING
        # The work that the first batch still has to do.
        self._balance_due = options.measured_balance if self._will_train and model.group.num_ranks > 1 else None
        self._is_checked = False
        self._is_new_form = False
        self._loss_forms = LossForms()
        self._is_first = True
        self._buffers_due = True
        self._watched: set[Any] = set()
        self.agreement = StageAgreement(plugin, model, None if tensor_axis is None else tensor_axis.group)

    def _new_runner(self, recorder: Recorder | None = None) -> PipelineRunner:
        model = self.model
        return PipelineRunner(
            model.chain,
            model.bounds,
            model.group,
            model.device,
            schedule=self._options.schedule,
            parameters=model.ownership.held,
            recompute=self._recompute,
            recorder=recorder or self._recorder,
            enter=self._kept.enter,
        )

    # Training

    def same_batch(self, batch: Any) -> tuple[bool, Any]:
        """Whether all stages have loaded the same batch, and the batch for all stages: else the last stage's."""
        model = self.model
        if model.group.same_everywhere(checksum_of(batch)):
            return True, batch
        return False, model.stages.broadcast_object(batch, model.group.ranks[-1])

    @_on_parts
    def train(self, batch: Any, others: Sequence[Any], *, multiplier: float, accumulating: bool) -> dict[str, Any]:
        """Forward and backward of a batch; a collective of the world. The step's logs are logged once, on every stage.

        Args:
            batch: the same on every stage.
            others: further arguments of ``training_step``.
            multiplier: the factor of the loss before its backward.
            accumulating: more batches follow before the optimizer's step, so gradients stay on their ranks.

        Returns:
            The loss of the whole batch, and the step's further outputs on the last stage, or on all if a hook reads
            them.

        Raises:
            ValueError: the losses or the gradients of the micro-batches do not add up to those of the batch; checked
                for the first batch, and for the first batch whose loss has another form.
            PipelineError: a stage reads an old value, which another stage has changed in an earlier step.
        """
        batch = moved(batch, self._options.batch_dim, 0)
        if self._buffers_due:
            self.share_buffers()
        self._buffers_due = not accumulating
        self._decide_split(batch, others)
        parts = split_batch(batch, num_micro_batches_of(batch, self._num_micro_batches))
        weights = weights_of(parts, self._loss_reduction)
        is_first, self._is_first = self._is_first, False
        if is_first:
            self._check_kept_state(batch, others)
        may_check = self._options.check_loss and len(parts) > 1 and multiplier != 0
        if may_check and not self._is_checked:
            self._check(batch, others, weights, multiplier)
        outputs, is_new = self._train_parts(parts, weights, others, multiplier, scan=is_first)
        if may_check and is_new and self._is_checked:
            self._check(batch, others, weights, multiplier)
        self._is_checked = self._is_checked or may_check
        if is_first:
            for places in self.model.stages.gather_objects(list(self._kept.changes)):
                self._kept.learn(places)
        if not accumulating:
            self._reduce_gradients()
        return outputs

    def _train_parts(
        self, parts: Sequence[Any], weights: Sequence[float], others: Sequence[Any], multiplier: float, *, scan: bool
    ) -> tuple[dict[str, Any], bool]:
        """Runs the micro-batches through the schedule, and logs their outputs as those of one batch.

        Returns:
            These outputs, and whether the loss has a new form.
        """
        records: list[list[Record]] = [[] for _ in parts]
        outputs: list[dict[str, Any]] = [{} for _ in parts]
        # A step may change its batch in place, and each stage of this rank runs it.
        own = cloned if self._options.num_stages_of_rank > 1 else lambda part: part

        def step(micro_batch: int) -> Any:
            with (
                self._plugin.train_step_context(),
                self._logs.recording(pass_on=False) as records[micro_batch],
                self._kept.step(scan=scan),
                without_differentiation(),
            ):
                output = self._call("training_step", own(parts[micro_batch]), *others)
            loss = output
            if isinstance(output, Mapping):
                outputs[micro_batch] = {key: value for key, value in output.items() if key != "loss"}
                loss = output.get("loss")
            if micro_batch == 0 and self._options.check_loss and isinstance(loss, Tensor):
                self._is_new_form = self._loss_forms.is_new(loss)
            return loss

        # Whether sent tensors have a gradient depends on which parameters are frozen.
        trainable = tuple(parameter.requires_grad for parameter in self.model.ownership.parameters())
        kinds = [(signature_of(part), trainable) for part in parts]
        trainer = self.model.module.trainer
        seed = (self._seed, 0, trainer.current_epoch, trainer.fit_loop.batch_idx)
        without_gradient = [parameter for parameter in self.model.ownership.held() if parameter.grad is None]
        with self._kept.batch(), self._kept.watching():
            losses = self._runner.train(step, kinds, [weight * multiplier for weight in weights], seed)
        message: Any = None
        further: dict[str, Any] = {}
        if self.model.is_last:
            samples = [leading_size(part) or 1 for part in parts]
            sizes = weights if callable(self._loss_reduction) else [float(size) for size in samples]
            logged, loss = combined(records, sizes, losses, weights), combined_loss(losses, weights)
            last = self.model.group.num_ranks - 1
            old_value = self._kept.old_value(self._kept.changes, self._kept.reads, self.model.modules_of(last))
            message = logged, loss, trainer.should_stop, self._is_new_form, old_value, self._runner.uses_layers
            further = tree_map_only(Tensor, Tensor.detach, gathered(outputs, samples, self.model.device))
        received, further = self.outputs.from_last(message, further, "on_train_batch_end")
        replayed, loss, stops, is_new, old_value, uses_layers = received
        if old_value is not None:
            raise PipelineError(old_value)
        if not uses_layers:
            self._drop_zeros(without_gradient)
        trainer.should_stop = trainer.should_stop or stops  # a step may ask for the end of training
        with nullcontext() if multiplier else uncounted_logs(self.model.module):  # 0 for a batch that is repeated
            self._logs.replay(replayed, "training_step")
        return {"loss": loss, **further}, is_new

    def _drop_zeros(self, parameters: Sequence[Parameter]) -> None:
        """Takes the gradients off parameters on which no loss depends: stages before the last one have got zeros.

        An optimizer with momentum or weight decay would change such parameters, and on one device it does not.
        """
        if self.model.is_last and self._options.num_stages_of_rank == 1:
            return
        for parameter in parameters:
            if parameter.grad is not None and not parameter.grad.any():
                parameter.grad = None

    def _reduce_gradients(self) -> None:
        """Averages gradients of unshared parameters first: later stages do so while earlier ones still run backward."""
        ownership = self.model.ownership
        common = ownership.common()
        shared = {id(holding.tensor) for holding in common}
        if self._data_axis is not None:
            self._data_axis.average_gradients([p for p in ownership.held() if id(p) not in shared])
        self._sums.sum_gradients(common)
        if self._data_axis is not None:
            self._data_axis.average_gradients([p for p in ownership.held() if id(p) in shared])

    def share_buffers(self) -> None:
        """Gives all pipelines the buffers of the first pipeline; a collective of the data axis."""
        if self._data_axis is not None:
            self._data_axis.share_buffers(self.model.ownership.buffers())

    def _showing(self, *, parts: bool) -> AbstractContextManager[None]:
        return nullcontext() if self._tensor_axis is None else self._tensor_axis.group.showing(parts=parts)

    def _call(self, hook: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a step of the module."""
        self.in_step = True
        try:
            if hook == "training_step":  # its part was cut along dimension 0
                args = (moved(args[0], 0, self._options.batch_dim), *args[1:])
            with self.outputs.noting(), self._showing(parts=False):
                output = getattr(self.model.module, hook)(*args, **kwargs)
                return output if self._tensor_axis is None else self._tensor_axis.whole_outputs(output)
        finally:
            self.in_step = False
            # A metric that this stage computed alone within the step has to be computed by all stages.
            for metric in self._metrics:
                metric._computed = None

    # The first batch

    def _decide_split(self, batch: Any, others: Sequence[Any]) -> None:
        """Splits the model by its first batch: traces or measures it, if necessary, and watches a step."""
        if "training_step" in self._watched:
            return
        part = first_part(batch, self._num_micro_batches)
        if self._tensor_axis is not None:
            self._tensor_axis.split(
                lambda: unlogged_loss(
                    self._plugin, self.model.module, lambda: self._call("training_step", cloned(part), *others)
                ),
                self._world,
            )
        with self._plugin.train_step_context():
            if self.model.is_untraced:
                self._trace("training_step", part, *others, will_train=True)
            with without_differentiation():
                self._find_uses("training_step", "training_step", part, *others)
        if self._balance_due is not None:
            balance, self._balance_due = self._balance_due, None
            self._split_by_costs(balance, batch, others)

    def _trace(self, hook: str, *args: Any, will_train: bool, **kwargs: Any) -> None:
        """Traces a step of the module, and gives each rank the parameters that its stages use."""

        def step() -> Any:
            with self._logs.recording(pass_on=False):
                return self._call(hook, *args, **kwargs)

        with without_trace(self.model.module):
            self.model.arrange(step, will_train=will_train)
        self.model.split_again(self.model.bounds)

    def _find_uses(self, key: Any, hook: str, batch: Any, *args: Any, **kwargs: Any) -> None:
        """Watches the first step of the module with this ``key``, and prints the split if it changes."""
        is_first = not self._watched
        self._watched.add(key)
        records: list[Record] = []

        def step() -> Any:
            with self._logs.recording(pass_on=False) as found:
                output = self._call(hook, cloned(batch), *args, **kwargs)
            records[:] = found
            return output

        def left() -> Any:
            return [record.value for record in records], [vars(part) for part in self.model.module.modules()]

        everyone = self._world if self._will_train else self.model.stages
        with nullcontext() if self._tensor_axis is None else self._tensor_axis.group.alone():
            has_moved = self.model.find_uses(step, left, seed_of(self._seed, 4), everyone)
        if has_moved and hook == "training_step":  # the old split counted moved parameters elsewhere
            bounds = self._options.bounds(self.model.chain, self.model.group.num_ranks)
            if self._options.measured_balance is None and bounds != self.model.bounds:
                self.model.split_again(bounds)
                self._runner = self._new_runner()
        if (is_first or has_moved) and self._balance_due is None and self.model.group.num_ranks > 1:
            rank_zero_info(self.model.describe())

    def _split_by_costs(self, balance: MeasuredBalance, batch: Any, others: Sequence[Any]) -> None:
        """Measures the layers, splits them to minimise the largest cost of a rank, and prints the prediction."""
        model, before = self.model, self.model.bounds
        costs = self._measured_costs(batch, others)
        model.split_again(self._world.broadcast_object(costs.bounds(balance), 0))
        self._runner = self._new_runner()
        model.meter.discard()

        def predicted(bounds: list[tuple[int, int]]) -> str:
            most = size(costs.largest_bytes(bounds))
            return f"{ms(costs.step_s(bounds))}, at most {most} for the stages of a rank"

        rank_zero_info(
            f"Pipeline over {model.chain.name!r}, {costs.num_layers} layers in {len(model.bounds)} stages by "
            f"balance={balance!r}; per micro-batch, as measured on the first batch:\n"
            f"{costs.describe(model.bounds, model.group.ranks)}\n"
            f"  predicted for a batch of {costs.num_micro_batches} micro-batches, without the optimizer: "
            f"{predicted(model.bounds)}\n  by balance='parameters' it would be: {predicted(before)}\n"
            f"{model.describe_ranks()}"
        )

    def _measured_costs(self, batch: Any, others: Sequence[Any]) -> StageCosts:
        """The costs of the layers, the same on all stages."""
        model, part = self.model, first_part(batch, self._num_micro_batches)

        def step() -> Any:
            return unlogged_loss(self._plugin, self.model.module, lambda: self._call("training_step", part, *others))

        probe = CostProbe(
            model.chain,
            model.bounds,
            model.ownership,
            model.group,
            model.device,
            self._seed,
            self._recompute,
            agreed=bool if self._tensor_axis is None else partial(self._tensor_axis.group.any, device=model.device),
        )
        with without_trace(model.module):
            found = probe.measure(step), slowest_link(model.group), probe.elsewhere_s
            measured = model.stages.gather_objects(found)
        parts: dict[int, PartCost] = {}
        links: list[LinkCost] = []
        for costs, link, _ in measured:
            parts.update(costs)
            links.append(link)
        elsewhere_s = [seconds for *_, seconds in measured if seconds is not None]
        return StageCosts(
            [parts.get(part, PartCost()) for part in range(len(model.chain) + 2)],
            layer_bytes(model.chain, model.module.trainer.optimizers),
            max(links, key=lambda link: link.seconds(1 << 20)),
            schedule=self._options.schedule,
            num_ranks=model.group.num_ranks,
            stages_per_rank=self._options.num_stages_of_rank,
            num_micro_batches=num_micro_batches_of(batch, self._num_micro_batches),
            end_bytes=end_bytes(model.ownership, model.module.trainer.optimizers),
            elsewhere_s=max(elsewhere_s, default=None),
        )

    def _check(self, batch: Any, others: Sequence[Any], weights: Sequence[float], multiplier: float) -> None:
        """Checks losses, and then gradients, of a batch's micro-batches; see :mod:`.step_checks`."""

        def loss_of(part: Any, seed: tuple[int, ...]) -> Any:
            return self._loss_of(part, others, seed)

        runner = self._new_runner(Recorder(self.model.meter, self.model.device, self.model.ownership.held))
        trainer = self.model.module.trainer

        def run(parts: Sequence[Any], of_parts: Sequence[float], seed: int) -> None:
            def step(number: int) -> Any:
                with without_differentiation():
                    return unlogged_loss(
                        self._plugin,
                        self.model.module,
                        lambda: self._call("training_step", cloned(parts[number]), *others),
                    )

            kinds = [signature_of(part) for part in parts]
            scales = [weight * multiplier for weight in of_parts]
            runner.train(step, kinds, scales, (self._seed, 3, seed, trainer.current_epoch, trainer.fit_loop.batch_idx))
            self.model.group.finish()

        with self.model.meter.unrecorded():
            check_losses(self.model, batch, loss_of, weights, loss_reduction=self._loss_reduction, seed=self._seed)
            gather = self.model.stages.gather_objects if self._tensor_axis is None else self._tensor_axis.gather
            check_gradients(self.model, batch, run, len(weights), loss_reduction=self._loss_reduction, gather=gather)

    def _check_kept_state(self, batch: Any, others: Sequence[Any]) -> None:
        """Checks kept state before the first step, if stages run steps or layers several times a batch."""
        part, seed = first_part(batch, self._num_micro_batches), (self._seed, 2, 2)

        def loss_of_step(scan: bool) -> Any:
            return self._loss_of(copy.deepcopy(part), others, seed, scan=scan)

        repeats = None
        if self._num_micro_batches > 1:
            repeats = (
                f"with num_micro_batches={self._num_micro_batches} every stage runs the step as often for a batch. "
                "Change it in on_train_batch_start or on_train_batch_end(outputs, batch, batch_idx), which every stage "
                "calls once a batch, or pass num_micro_batches=1"
            )
        elif self._options.num_stages_of_rank > 1:
            repeats = (
                f"with {self._options.num_stages_of_rank} stages a rank runs the beginning of the step as often. "
                "Change it in on_train_batch_start, or use schedule='1f1b'"
            )
        layers = [self.model.chain.layers[index] for index in self._recompute]
        if repeats is None and not layers:
            return
        recomputed = {part for layer in layers for part in layer.modules()}
        with self.model.meter.unrecorded():
            check_kept_state(self.model, self._kept, loss_of_step, repeats=repeats, recomputed=recomputed)

    def _loss_of(self, part: Any, others: Sequence[Any], seed: tuple[int, ...], *, scan: bool = False) -> Any:
        """The loss of the step, forward only, on the last stage; or the exception that it raised after the layers."""

        def step() -> Any:
            try:
                with self._kept.step(scan=scan):
                    return self._call("training_step", part, *others)
            except Exception as error:
                if not self._runner.is_past_chain:
                    raise
                return error

        return unlogged_loss(self._plugin, self.model.module, lambda: self._runner.evaluate(step, seed)[1])

    # Evaluation

    @_on_parts
    def evaluate(self, hook: str, *args: Any, **kwargs: Any) -> Any:
        """Runs ``validation_step``, ``test_step`` or ``predict_step`` on a whole batch.

        Returns:
            The output of the step: on every stage for ``predict_step`` and if a hook reads it, else on the last stage;
            None elsewhere.
        """
        if self.model.is_untraced:
            self._trace(hook, *args, will_train=self._will_train, **kwargs)
        key = (hook, *args[2:])  # of each loader
        if key not in self._watched:
            self._find_uses(key, hook, *args, **kwargs)
        is_last = self.model.is_last
        self._num_evaluated += 1
        seed = (self._seed, 1, self.model.module.trainer.global_step, self._num_evaluated)
        with self._logs.recording(pass_on=is_last) as records:
            _, output = self._runner.evaluate(lambda: self._call(hook, *args, **kwargs), seed)
        if hook != "predict_step":
            batch_end = f"on_{hook.removesuffix('_step')}_batch_end"
            replayed, output = self.outputs.from_last(records, output, batch_end)
            if not is_last:
                self._logs.replay(replayed, hook)
        else:
            output = self.outputs.prediction(output)
        self.model.group.finish()
        return output

    # Reports

    def record(self, *, steps: bool, activations: bool) -> None:
        """Sets whether steps are recorded from now on and, in one step, the tensors that autograd keeps."""
        self._recorder.notes_steps, self._recorder.counts_activations = steps, activations

    def stage_record(self) -> StageRecord:
        """The newest steps of this rank's stages, and their memory, with the optimizers' states."""
        optimizers = self.model.module.trainer.optimizers
        return StageRecord(
            pipeline=self._number,
            position=self.model.ownership.position,
            num_ranks=self.model.group.num_ranks,
            stages_per_rank=self._options.num_stages_of_rank,
            schedule=self._options.schedule,
            steps=self._recorder.steps(),
            memory=self._recorder.memory(optimizers),
            predicted=held_bytes(self.model.ownership.held(), optimizers),
        )
