"""Pipeline strategy: a model split into stages, one or several a rank, through which micro-batches flow."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partialmethod
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_multigpu._lightning_internals import plain_optimizer
from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.engine.data_parallel.gradient_transport import GradientTransport
from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.optimizer_state import release, watch
from lightning_multigpu.engine.pipeline.splitting.chain import Chain
from lightning_multigpu.engine.placeholder import Placeholder, first_placeholder
from lightning_multigpu.engine.tensor_split.parts import own_state
from lightning_multigpu.planning.pipelines.balance import Bounds
from lightning_multigpu.planning.pipelines.schedule_order import ScheduleName
from lightning_multigpu.planning.pipelines.timeline import StageRecord
from lightning_multigpu.strategies import option_checks
from lightning_multigpu.strategies.base import MultiGPUStrategy
from lightning_multigpu.strategies.pipeline import pipeline_checks
from lightning_multigpu.strategies.pipeline.pipeline_options import PipelineOptions
from lightning_multigpu.strategies.pipeline.running_pipeline import RunningPipeline
from lightning_multigpu.strategies.pipeline.split_model import built_by_stages
from lightning_multigpu.strategies.pipeline.tensor_axis import TensorAxis
from lightning_multigpu.strategies.run_view import RunView
from lightning_multigpu.strategies.steps.same_batches import (
    builds_layers_later,
    checksum_before_transfer,
    gather_metrics_by,
    share_random_states,
    write_no_predictions,
)
from lightning_multigpu.strategies.steps.step_logs import uncounted_metrics
from lightning_multigpu.strategies.tensor_parallel.split_layers import Plan, check_patterns, check_uncompiled

if TYPE_CHECKING:
    import lightning.pytorch as pl


class PipelineStrategy(MultiGPUStrategy):
    """Pipeline training: each rank holds some consecutive layers, the stages, and micro-batches flow through them.

    The layers are those of an ``nn.Sequential``, or of an ``nn.ModuleList`` that ``forward`` iterates over. Modules
    before and after the layers (embeddings, a head, the loss) stay in your unmodified ``training_step``, which runs
    once for each micro-batch. Rank 0 has the last stage: it logs, predicts and monitors.

    Args:
        module: name of the container whose layers are split, "model.layers" for example. "auto" takes the container
            with the most parameters, and of a Hugging Face model its list of blocks.
        schedule: order of the passes. "gpipe" runs all micro-batches forward, then all backward; "1f1b" runs backward
            as soon as possible, so that at most P micro-batches are in memory on P ranks; "interleaved" does so with
            several stages a rank, which shortens idle time; "zero_bubble" also computes the gradients of the weights
            later, where a rank would be idle.
        num_micro_batches: number of parts that a batch is cut into; "auto" makes four a rank. A batch with fewer
            samples makes fewer.
        stages_per_rank: stages of each rank under "interleaved" and "zero_bubble", by default 2.
        balance: distribution of the layers over the stages. "parameters" evens out the bytes of the parameters;
            "time" minimises the time of the slowest stage; "memory" minimises the largest memory of a
            stage: parameters, gradients, optimizer states, and the activations of as many micro-batches as the
            schedule has in memory. "time" and "memory" measure the layers on the first batch. A list gives the number
            of layers of each stage. Modules before the layers count for the first stage, modules after them for the
            last stage.
        split_points: names of submodules, "net.decoder" for example, at which further stages begin, for modules that
            are no chain of layers. ``module`` is then the module that is cut, "auto" the smallest submodule whose
            forward pass contains all points. ``torch.export`` traces that forward pass on the first batch.
        pipeline_parallel_size: ranks of one pipeline, by default all ranks. With fewer there are several pipelines
            side by side, each with its part of every global batch; each stage averages its gradients with the same
            stage of the other pipelines.
        data_parallel_size: number of pipelines side by side, instead of ``pipeline_parallel_size``.
        activation_checkpointing: layers that backward computes again instead of keeping their activations: True for
            all layers, or a list of classes, names of classes ("Block") and names of layers ("blocks.3"). Under
            "zero_bubble" this is refused: it would compute a layer again for each group of its parameters.
        replicated: modules and parameters outside of the layers, by name ("embedding"), that every rank holds; True for
            all. By default the ranks whose stages use a parameter hold it. Name the parameters with which hooks
            outside of steps compute on every rank.
        verify_steps: so many steps are computed on the first batch, before it trains, by the pipeline and by one
            process that has the whole model; the run ends if their gradients differ, or if losses and gradients of
            micro-batches do not add up to those of the batch. Repeated in the second epoch, and when the loss has a new
            term, or other parameters or optimizers train. 0 compares nothing, and accepts a loss that couples samples.
        batch_dim: the dimension of a training batch's tensors that counts samples; tensors are cut into micro-batches
            along it. It is 1 for time-first batches (time, samples, features). Tensors with fewer dimensions, such as
            one label a sample, are cut along their first. Samplers and ``loss_reduction`` get uncut batches.
        gather_at_end: after the run, rank 0 has the whole model and the optimizers' states in host memory (every rank
            has the model, if ``configure_model`` has not built it). False leaves each rank its part, for models that
            do not fit into that memory: a later run with the same module continues from the parts; to use the module
            elsewhere, load a checkpoint that was saved during the run.
        options: options of :class:`~lightning_multigpu.strategies.base.MultiGPUStrategy`. Here ``loss_reduction`` also
            combines the losses of the micro-batches to the loss of the batch: "mean" weights them by their
            samples, "sum" adds them, and a function that returns the weight w of a batch or a micro-batch gives
            sum(w l) / sum(w). ``uneven_inputs`` has no effect on a single pipeline.

    Raises:
        ValueError: an option is out of its range; ``configure_model`` cannot be run for one stage alone; in training,
            before the first step, the losses or gradients of the micro-batches do not add up to those of their batch.
    """

    _maps_checkpoints = True
    plan: Plan = "auto"
    """The layers of stages to split over tensor ranks, as for :class:`TensorSplitStrategy`."""
    _transport = GradientTransport(shared_memory=False)
    """How gradients travel between pipelines."""
    _records_stages = False
    _built_bounds: Bounds | None = None
    _running: RunningPipeline | None = None
    _axis: TensorAxis | None = None
    """The ranks that split the layers of this rank's stages; None without a tensor split, and outside of a run."""

    def __init__(
        self,
        *,
        module: str = "auto",
        schedule: ScheduleName = "1f1b",
        num_micro_batches: int | Literal["auto"] = "auto",
        stages_per_rank: int | None = None,
        balance: Literal["parameters", "time", "memory"] | Sequence[int] = "parameters",
        split_points: Sequence[str] | None = None,
        pipeline_parallel_size: int | None = None,
        data_parallel_size: int | None = None,
        activation_checkpointing: bool | Sequence[str | type] = False,
        replicated: bool | Sequence[str] = False,
        verify_steps: int = 2,
        batch_dim: int = 0,
        gather_at_end: bool = True,
        **options: Any,
    ) -> None:
        self.pipeline_options = PipelineOptions(**option_checks.own_options(PipelineStrategy, locals()))
        super().__init__(**options)
        self._options |= vars(self.pipeline_options)

    @property
    def pipeline_parallel_size(self) -> int:  # type: ignore[override]
        """Ranks of a pipeline, which have different layers."""
        return self.pipeline_options.num_ranks_of_pipeline(self.num_nodes * self.num_processes)

    @property
    def _pipeline(self) -> RunningPipeline:
        assert self._running is not None
        return self._running

    # Setting up

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        self._check_sizes()
        if not self.pipeline_options.gather_at_end and self._start_method != "popen":
            raise ValueError(
                f"gather_at_end=False with start_method={self._start_method!r}: the parts of the model would be lost "
                "with the processes that hold them; use start_method='popen'"
            )

    def _check_sizes(self) -> None:
        self._check_pipeline()
        self.pipeline_options.check_num_ranks(self.num_nodes * self.num_processes)

    def _check_pipeline(self, fewest_stages: int = 2) -> None:
        option_checks.check_pipeline(
            self.run_context,
            self.pipeline_parallel_size,
            sync_batchnorm=self._layer_sync is not None,
            fewest_stages=fewest_stages,
        )

    @override
    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Within the block ``configure_model`` builds only the layers of this rank, from rank 0's random states."""
        module = self.lightning_module
        with super().model_sharded_context():
            if module is None or not is_overridden("configure_model", module):
                yield
                return
            share_random_states(self.root_device, self.broadcast)
            size = self.pipeline_parallel_size
            position = size - 1 - self.global_rank // self.tensor_parallel_size % size
            precision, device = self.precision_plugin, self.root_device
            with built_by_stages(module, precision, self._split, position, size, device) as bounds:
                yield
            self._built_bounds = bounds

    @override
    def check_before_launch(self, trainer: pl.Trainer) -> None:
        module = trainer.lightning_module
        if self.tensor_parallel_size > 1 and trainer.state.fn == TrainerFn.FITTING:
            check_uncompiled(module)  # a pipeline gives other advice
        super().check_before_launch(trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            pipeline_checks.check_module(module)
            pipeline_checks.check_callbacks(trainer.callbacks)  # type: ignore[attr-defined]
        if not builds_layers_later(module):
            self._split(module)
            check_patterns(self.plan, module)

    def _split(self, module: pl.LightningModule) -> tuple[Chain, Bounds]:
        size = self.pipeline_parallel_size
        chain = self.pipeline_options.chain(module, size, self.root_device)
        return chain, self._built_bounds or self.pipeline_options.bounds(chain, size)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            pipeline_checks.check_callbacks(trainer.callbacks)  # type: ignore[attr-defined]  # and the module's own
            pipeline_checks.check_loggers(trainer.loggers, self._module)
        super().setup(trainer)

    @override
    def _check_new(self, optimizers: Sequence[Optimizer]) -> None:
        super()._check_new(optimizers)
        pipeline_checks.check_optimizers(optimizers)
        if self._axis is not None and self._axis.is_split:
            self._axis.layers.check_optimizers(optimizers)

    @override
    def _watch_states(self) -> None:
        of_parts = () if self._axis is None else (self._axis.layers.shown_state, own_state)
        for optimizer in map(plain_optimizer, self.optimizers):
            watch(optimizer, lambda each: None if isinstance(each, Placeholder) else each, *of_parts)

    @override
    def model_to_device(self) -> None:
        """Splits the module, whose dtype is final now, and moves this rank's stages to its device."""
        self._running = RunningPipeline(self, *self._split(self._module))
        self._axis = self._running.tensor_axis
        self._running.recorder.notes_steps = self._records_stages
        self.collectives.in_step = lambda: self._in_step
        gather_metrics_by(self._gather_metric, self._module, self._undo)

    @override
    def teardown(self) -> None:
        if self._running is not None:
            self._running.clipping.hide_gradients()
        release(map(plain_optimizer, self.optimizers))
        try:
            gathers = self._running is not None and not self.failure_watch.failed
            if gathers and self._module.trainer.state.status == TrainerStatus.RUNNING:
                self._pipeline.make_whole()
        finally:
            self._undo.close()
        self._running = self._axis = None
        self._built_bounds = None
        super().teardown()

    # What callbacks ask

    @override
    def run_view(self) -> RunView:
        return replace(
            super().run_view(),
            split_plan=lambda: None if self._axis is None else self._axis.plan,
            record_stages=self.record_stages,
            stage_record=self.stage_record,
        )

    def record_stages(self) -> None:
        """See :attr:`.RunView.record_stages`."""
        self._records_stages = True
        if self._running is not None:
            self._running.recorder.notes_steps = True

    def stage_record(self) -> StageRecord | None:
        """See :attr:`.RunView.stage_record`."""
        return None if self._running is None else self._running.stage_record()

    # Training

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Moves the batch to the device; if ranks that train on it have loaded others, all get the last stage's."""
        checksum = checksum_before_transfer(batch, self._module)
        batch = super().batch_to_device(batch, device, dataloader_idx)
        return self._pipeline.same_batch(batch, device or self.root_device, checksum)

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        module, ownership = self._module, self._pipeline.model.ownership
        self._pipeline.outputs.add_first()
        ownership.check_places()
        pipeline_checks.check_changes(module, self.optimizers, ownership.parameters())
        if batch_idx < 2:  # hooks before or after the first batch may have copied weights
            callbacks = module.trainer.callbacks  # type: ignore[attr-defined]
            pipeline_checks.check_copies(module, callbacks, [holding.tensor for holding in ownership.holdings])
        super().on_train_batch_start(batch, batch_idx)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Keeps the batch for :meth:`backward`, which Lightning calls after it has set gradients to zero.

        Returns:
            The number 1. Lightning divides it by the number of accumulated batches and multiplies it by the scale of
            the gradients; the result is the factor of each micro-batch's loss. It is on the host, which need not wait
            for the device to read it, unless a gradient scaler on the device multiplies it.
        """
        self._pipeline.step_args = (*args, *kwargs.values())
        has_scaler = getattr(self.precision_plugin, "scaler", None) is not None
        return torch.ones((), dtype=torch.float64, device=self.root_device if has_scaler else "cpu")

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        pipeline, accumulating = self._pipeline, self._accumulates
        pipeline.clipping.hide_gradients()
        multiplier = closure_loss * self.feed.loss_scale
        self.pre_backward(multiplier)
        multiplier = self.precision_plugin.pre_backward(multiplier, self._module)
        counting = nullcontext() if self.feed.counts else uncounted_metrics(self._module)
        with self.steps.weighing(), self._showing_parts(), counting:
            outputs = pipeline.train(multiplier=float(multiplier), accumulating=accumulating)
        pipeline.outputs.of_batch = {**outputs, "loss": outputs["loss"] * float(closure_loss)}
        with pipeline.clipping.gradients_for("on_after_backward"):
            multiplier = self.precision_plugin.post_backward(multiplier, self._module)
        self.post_backward(multiplier)
        if not accumulating:
            pipeline.clipping.show_gradients_until_step()
        return multiplier

    @override
    @contextmanager
    def _updating(self) -> Iterator[None]:
        with self._pipeline.clipping.stepping(), nullcontext() if self._axis is None else self._axis.layers.stepping():
            yield

    @override
    def _showing_parts(self) -> AbstractContextManager[None]:
        return nullcontext() if self._axis is None else self._axis.group.showing(parts=True)

    @override
    def _held_in_common(self) -> list[tuple[MeteredGroup, Iterable[tuple[str, Tensor]]]]:
        model, axis = self._pipeline.model, self._axis
        shared = [h for h in model.ownership.common() if model.ownership.position in h.holders]
        of_tensor_group = [] if axis is None else [(axis.peers, axis.replicated())]
        return [
            *super()._held_in_common(),
            (model.stages, [(h.name, h.tensor) for h in shared]),
            *of_tensor_group,
        ]

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._pipeline.outputs.add_first(leaves=True)  # a Tuner expects its own callback to be the first

    # Evaluation

    def _evaluated(self, hook: str, context: str, *args: Any, **kwargs: Any) -> Any:
        with getattr(self.precision_plugin, context)(), self._showing_parts():
            return self._pipeline.evaluate(hook, *args, **kwargs)

    validation_step = partialmethod(_evaluated, "validation_step", "val_step_context")
    test_step = partialmethod(_evaluated, "test_step", "test_step_context")
    predict_step = partialmethod(_evaluated, "predict_step", "predict_step_context")

    @override
    def on_predict_start(self) -> None:
        super().on_predict_start()
        if not self._pipeline.model.is_last or self.tensor_parallel_rank > 0:  # each prediction is written once
            write_no_predictions(self._module.trainer, self._undo)

    # Collectives

    @property
    def _in_step(self) -> bool:
        return self._running is not None and self._running.in_step

    def _gather_metric(self, tensor: Tensor, group: Any) -> list[Tensor]:
        """The states of a metric on the last stages, which have its samples; within a step only these call it."""
        # Ranks of a tensor group have the same samples; within a step all callers have one tensor rank.
        counts = self._pipeline.model.is_last and (self._in_step or self.tensor_parallel_rank == 0)
        states = self.gather_objects((counts, tensor.cpu()))
        return [state.to(tensor.device) for counts, state in states if counts] or [tensor]

    # Checkpoints

    @property
    @override
    def _needs_others(self) -> bool:
        return self._running is not None

    @override
    def _settle_values(self) -> None:
        if self._in_step:
            raise PipelineError(
                "a checkpoint is saved within a step, in code that only the last stage reaches; save it in "
                "on_train_batch_end, or by ModelCheckpoint(every_n_train_steps=...)"
            )

    @override
    def _whole_weights(self, state: dict[str, Any]) -> dict[str, Any]:
        if self._running is not None:
            return self._running.model.whole_state_dict(state, streams=self.streams)
        if not self.pipeline_options.gather_at_end and first_placeholder(state) is not None:
            raise PipelineError(
                "a checkpoint is saved after the run, and gather_at_end=False has left each rank its part of the "
                "model; save it during the run, by ModelCheckpoint or in on_train_end, or leave gather_at_end=False out"
            )
        return state

    @override
    def _whole_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._running is None:
            return super()._whole_state(optimizer)
        return self._running.model.whole_optimizer_state(optimizer, streams=self.streams)

    @override
    def _own_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        return self._pipeline.model.own_optimizer_state(state, optimizer)
