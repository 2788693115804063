"""A model split into stages, one a rank, through which micro-batches flow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_multigpu.engine.pipeline.splitting.chain import Chain
from lightning_multigpu.engine.pipeline.stages.gradients import DataAxis
from lightning_multigpu.engine.pipeline.stages.runner import ScheduleName
from lightning_multigpu.planning.timeline import StageRecord
from lightning_multigpu.strategies import option_checks
from lightning_multigpu.strategies.base import MultiGPUStrategy
from lightning_multigpu.strategies.pipeline import pipeline_checks
from lightning_multigpu.strategies.pipeline.last_stage_outputs import LastStageOutputs
from lightning_multigpu.strategies.pipeline.pipeline_options import PipelineOptions
from lightning_multigpu.strategies.pipeline.running_pipeline import RunningPipeline
from lightning_multigpu.strategies.pipeline.split_model import SplitModel
from lightning_multigpu.strategies.pipeline.stage_construction import built_by_stages, share_random_states
from lightning_multigpu.strategies.pipeline.staged import StagedStrategy

if TYPE_CHECKING:
    import lightning.pytorch as pl


class PipelineStrategy(StagedStrategy):
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
            "time" minimises the time of the slowest rank, messages included; "memory" minimises the largest per-rank
            memory: parameters, gradients, optimizer states, and what autograd keeps for as many micro-batches as the
            schedule has in flight. "time" and "memory" measure the layers on the first batch. A list gives the number
            of layers of each stage.
        split_points: names of submodules, "net.decoder" for example, at each of which another stage begins, for modules
            that are no chain of layers. ``module`` is then the module that is cut, "auto" the smallest submodule whose
            forward pass contains all points. ``torch.export`` traces that forward pass on the first batch.
        pipeline_parallel_size: ranks of one pipeline, by default all ranks. With fewer there are several pipelines
            side by side, each with its part of every global batch; each stage averages its gradients with the same
            stage of the other pipelines.
        data_parallel_size: number of pipelines side by side: the same setting the other way round.
        activation_checkpointing: layers that backward computes again instead of keeping their activations: True for
            all layers, or a list of classes, names of classes ("Block") and names of layers ("blocks.3"). Under
            "zero_bubble" this is refused: it would compute a layer again for each group of its parameters.
        options: options of :class:`~lightning_multigpu.strategies.base.MultiGPUStrategy`. Here ``loss_reduction`` also
            says how the losses of the micro-batches add up to the loss of the batch: "mean" weights them by their
            samples, "sum" adds them, and a function that returns the weight w of a batch or a micro-batch gives
            sum(w l) / sum(w). ``uneven_inputs`` has no effect on a single pipeline.

    Raises:
        ValueError: an option is out of its range; ``configure_model`` cannot be run for one stage alone; in training,
            before the first step, the losses of the micro-batches do not add up to the loss of their batch.
    """

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
        **options: Any,
    ) -> None:
        option_checks.check_options(type(self).__name__, options, MultiGPUStrategy.option_names())
        self._options = PipelineOptions(
            module=module,
            schedule=schedule,
            num_micro_batches=num_micro_batches,
            stages_per_rank=stages_per_rank,
            balance=balance,
            split_points=split_points,
            pipeline_parallel_size=pipeline_parallel_size,
            data_parallel_size=data_parallel_size,
            activation_checkpointing=activation_checkpointing,
        )
        super().__init__(**options)
        self._recording = {"steps": False, "activations": False}
        self._built_bounds: list[tuple[int, int]] = []
        self._word = LastStageOutputs(self._share_storage)
        self._step_args: tuple[Any, ...] | None = None
        self._accumulating = False

    @property
    @override
    def options(self) -> dict[str, Any]:
        return {**super().options, **vars(self._options)}

    @property
    def pipeline_parallel_size(self) -> int:  # type: ignore[override]
        """Ranks of a pipeline."""
        return self._options.num_ranks_of_pipeline(self.num_nodes * self.num_processes)

    @property
    def stages_per_rank(self) -> int:
        """Stages that each rank has."""
        return self._options.num_stages_of_rank

    @property
    def num_micro_batches(self) -> int:
        """Parts that a batch is cut into if it has that many samples."""
        return self._options.num_parts(self.pipeline_parallel_size)

    # Setting up

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        option_checks.check_pipeline(
            self.run_context, self.pipeline_parallel_size, sync_batchnorm=self._layer_sync is not None
        )
        self._options.check_num_ranks(self.num_nodes * self.num_processes)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.lightning_module is not None
        if trainer.state.fn == TrainerFn.FITTING:
            pipeline_checks.check_module(self.lightning_module)
            pipeline_checks.check_callbacks(trainer.callbacks)  # type: ignore[attr-defined]
            pipeline_checks.check_loggers(trainer.loggers, self.lightning_module)
        self._word.stand_first(trainer)
        super().setup(trainer)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        pipeline_checks.check_optimizers(self.optimizers)

    @override
    def model_to_device(self) -> None:
        """Splits the module, whose dtype is the final one by now, and moves this stage's part to its device."""
        assert self.lightning_module is not None
        assert self._world is not None
        assert self._data is not None
        module = self.lightning_module
        chain, bounds = self._split(module)
        group = self.new_group("pipeline", descending=True)
        model = SplitModel(module, chain, bounds, group, self.meter, self.root_device)
        model.share(self._world, self._data)
        balance = self._options.measured_balance if module.trainer.state.fn == TrainerFn.FITTING else None
        self._running = RunningPipeline(
            model,
            self._options,
            balance=balance,
            loss_reduction=self.feed.loss_reduction,
            plugin=self.precision_plugin,
            number=self.data_parallel_rank,
            data_axis=self._data_axis(),
            group_of=self._metered_group,
        )
        self._running.record(**self._recording)
        if balance is None and not model.is_untraced:
            rank_zero_info(pipeline_checks.describe_split(chain, bounds, model.line.ranks))

    def _share_storage(self) -> None:
        self._pipeline.steps.share_storage()

    def _data_axis(self) -> DataAxis | None:
        if self.data_parallel_size == 1:
            return None
        bookkeeping = self.metered(self.new_group("data"), "control")
        return DataAxis(self.new_group("data"), bookkeeping, self.meter)

    def _split(self, module: pl.LightningModule) -> tuple[Chain, list[tuple[int, int]]]:
        num_stages = self.pipeline_parallel_size * self.stages_per_rank
        chain = self._options.chain(module, num_stages, self.root_device)
        return chain, self._built_bounds or self._options.bounds(chain, num_stages)

    @override
    @contextmanager
    def model_sharded_context(self) -> Iterator[None]:
        """Within the block ``configure_model`` builds the layers of this rank only, from rank 0's random states."""
        module = self.lightning_module
        with super().model_sharded_context():
            if module is None or not is_overridden("configure_model", module):
                yield
                return
            share_random_states(self.broadcast, self.root_device)
            size = self.pipeline_parallel_size
            position = size - 1 - self.global_rank % size
            precision, device = self.precision_plugin, self.root_device
            with built_by_stages(module, precision, self._split, position, size, device) as bounds:
                yield
            self._built_bounds = bounds

    @override
    def record_stages(self, *, count_activations: bool = True) -> None:
        self._recording = {"steps": True, "activations": count_activations}
        if self._running is not None:
            self._running.record(**self._recording)

    @override
    def stage_record(self) -> StageRecord | None:
        return None if self._running is None else self._running.stage_record(self.optimizers)

    @override
    def teardown(self) -> None:
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        if trainer is not None:
            self._word.leave(trainer)
        if self._running is not None:
            self._running.end()
            if trainer is not None and trainer.state.status == TrainerStatus.RUNNING and not self.failure_watch.failed:
                self._running.model.make_whole(self.optimizers, is_first=self.data_parallel_rank == 0)
        self._running = None
        self._built_bounds = []
        self._step_args = None
        super().teardown()

    # Batches

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Moves the batch to the device; stages that have loaded different ones all get that of the last stage."""
        batch = super().batch_to_device(batch, device, dataloader_idx)
        if self._pipeline.has_same_batch(batch):
            return batch
        # Without the module's hooks, which have seen that batch where it was loaded.
        return move_data_to_device(self._pipeline.batch_of_last(batch), device or self.root_device)

    # Training

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        assert self.lightning_module is not None
        self._word.stand_first(self.lightning_module.trainer)
        super().on_train_batch_start(batch, batch_idx)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Keeps the batch for :meth:`backward`, which Lightning calls when gradients have been set to zero.

        Returns:
            A 1, which Lightning divides by the batches that are accumulated and multiplies by the scale of the
            gradients: what each micro-batch's loss then has to be multiplied by.
        """
        self._step_args = (*args, *kwargs.values())
        return torch.ones((), dtype=torch.float64, device=self.root_device)

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        assert self.lightning_module is not None
        self._word.leave(self.lightning_module.trainer)  # a Tuner expects its own callback to be the first

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._pipeline.share_buffers()

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Within the block gradients are only accumulated."""
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        assert self.lightning_module is not None
        assert self._step_args is not None
        multiplier = closure_loss * self.feed.loss_scale
        self.pre_backward(multiplier)
        multiplier = self.precision_plugin.pre_backward(multiplier, self.lightning_module)
        (batch, *others), self._step_args = self._step_args, None
        outputs = self._pipeline.train(
            batch,
            others,
            multiplier=float(multiplier),
            accumulating=self._accumulating,
            optimizers=self.optimizers,
        )
        self._word.outputs = {**outputs, "loss": outputs["loss"] * float(closure_loss)}
        with self._pipeline.hooks_see_gradients("on_after_backward"):
            multiplier = self.precision_plugin.post_backward(multiplier, self.lightning_module)
        self.post_backward(multiplier)
        return multiplier

    # Evaluation

    def _evaluate(self, hook: str, *args: Any, **kwargs: Any) -> Any:
        return self._pipeline.evaluate(hook, args, kwargs, self.optimizers)

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.val_step_context():
            return self._evaluate("validation_step", *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        with self.precision_plugin.test_step_context():
            return self._evaluate("test_step", *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """What ``predict_step`` returns, on the last stage; an empty list elsewhere."""
        with self.precision_plugin.predict_step_context():
            output = self._evaluate("predict_step", *args, **kwargs)
        return output if self._pipeline.steps.runner.is_last else []
