"""A model split into stages, one a rank, through which micro-batches flow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_info
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_multigpu.communication.collectives import MeteredGroup
from lightning_multigpu.engine.pipeline.balance import balanced_cuts, cuts_of_counts, stage_bounds
from lightning_multigpu.engine.pipeline.chain import Chain, find_chain
from lightning_multigpu.engine.pipeline.data_axis import DataAxis
from lightning_multigpu.engine.pipeline.gradients import StageSums
from lightning_multigpu.engine.pipeline.hugging_face import ModelsInStages
from lightning_multigpu.engine.pipeline.micro_batches import checksum_of, num_micro_batches_of
from lightning_multigpu.engine.pipeline.ownership import Ownership
from lightning_multigpu.engine.pipeline.probe import ChainProbe
from lightning_multigpu.engine.pipeline.random_state import seed_of
from lightning_multigpu.engine.pipeline.recompute import layers_of
from lightning_multigpu.engine.pipeline.recorder import Recorder
from lightning_multigpu.engine.pipeline.runner import LOOPED_SCHEDULES, SCHEDULES, PipelineRunner, ScheduleName
from lightning_multigpu.engine.pipeline.timeline import StageRecord
from lightning_multigpu.engine.pipeline.transfer import Line
from lightning_multigpu.strategies import validation
from lightning_multigpu.strategies.base import MultiGPUStrategy
from lightning_multigpu.strategies.pipeline_checks import (
    check_activation_checkpointing,
    check_callbacks,
    check_module,
    check_optimizers,
    check_stages_per_rank,
    describe_split,
)
from lightning_multigpu.strategies.stage_agreement import RealOutputs, StageAgreement, gather_metrics_by
from lightning_multigpu.strategies.stage_balance import announce, measured_costs, move_layers
from lightning_multigpu.strategies.stage_construction import built_by_stages, share_random_states, share_values
from lightning_multigpu.strategies.stage_state import own_optimizer_state, whole_optimizer_state, whole_state_dict
from lightning_multigpu.strategies.stage_steps import StageSteps
from lightning_multigpu.strategies.whole_checkpoint_io import map_files

if TYPE_CHECKING:
    import lightning.pytorch as pl


class PipelineStrategy(MultiGPUStrategy):
    """Every rank holds some consecutive layers; activations flow forward and their gradients back.

    The layers are those of an ``nn.Sequential``, or of an ``nn.ModuleList`` that ``forward`` walks through. What comes
    before and behind them (embeddings, a head, the loss) stays where it is, in an unmodified ``training_step``, which
    runs once for each micro-batch. Rank 0 has the last stage: what it logs, predicts and monitors is there.

    Args:
        module: the name of the container whose layers are split, "model.layers" for example; "auto" takes the one
            with the most parameters, and the blocks of a Hugging Face model.
        schedule: "gpipe" runs all forward passes first; "1f1b" alternates as soon as it can, so that fewer
            micro-batches are in memory at a time; "interleaved" does so with several stages a rank, which are idle for
            less; "zero_bubble" also computes the gradients of the weights later, where a rank would be idle.
        num_micro_batches: into how many parts a batch is cut; "auto" makes it four a rank. A batch with fewer samples
            makes fewer.
        pipeline_parallel_size: ranks of a pipeline; by default all. With fewer there are several pipelines side
            by side, each with batches of its own, whose gradients are averaged.
        stages_per_rank: how many stages each rank has, under "interleaved" and "zero_bubble"; by default 2 there.
        balance: how the layers are dealt out: "parameters" evens out the bytes of the parameters; a list gives each
            stage's number of layers. "time" makes the slowest rank as fast as it can be, with what it sends; "memory"
            does so for the memory of the rank that needs most: parameters, gradients, optimizer states, and what is
            kept for backward of as many micro-batches as the schedule has in flight.
        activation_checkpointing: layers whose intermediate results are computed again in backward instead of kept: True
            for all, or a list of classes, names of classes ("Block") and names of layers ("blocks.3").
        options: those of :class:`~lightning_multigpu.strategies.base.MultiGPUStrategy`. ``loss_reduction`` also says
            how the losses of micro-batches add up to a batch's: "mean": by their samples; "sum": they are added; a
            function of a batch or a micro-batch that returns its weight w (its targets that are not ignored, for
            example): sum(w l) / sum(w). The first batch is computed whole and in micro-batches, in evaluation mode,
            to see that both have the same loss.

    "time" and "memory" measure the layers, and training begins with the split of "parameters" until then. On the
    first batch that is trained on, when the optimizers are there and before any gradient is, each rank runs
    ``training_step`` on the first micro-batch 4 to 11 times as far as its own layers go, and times them; all ranks
    take rank 0's conclusion, and the layers that have to move, move. The batch is then trained on as if nothing had
    been: neither loader nor sampler is touched, and random states, gradients, buffers, metrics and the module's
    attributes are put back, logs and loggers left out. What a step does elsewhere, such as printing, it does more
    often. Layers of ``activation_checkpointing`` are measured as they are trained: their backward computes them again,
    and what they keep is their input, besides once what the largest of them keeps while its own backward runs. In
    validation, test and prediction without training the split is that of "parameters".

    What ``configure_model`` makes is made on each rank for its own stages only, with the values that one device would
    give it; for that it is called twice.

    Raises:
        ValueError: an option is out of its range; ``configure_model`` cannot be run for one stage alone; in training,
            before the first step, if the losses of micro-batches do not add up to the loss of their batch.
    """

    def __init__(
        self,
        *,
        module: str = "auto",
        schedule: ScheduleName = "1f1b",
        num_micro_batches: int | Literal["auto"] = "auto",
        stages_per_rank: int | None = None,
        balance: Literal["parameters", "time", "memory"] | Sequence[int] = "parameters",
        pipeline_parallel_size: int | None = None,
        activation_checkpointing: bool | Sequence[str | type] = False,
        **options: Any,
    ) -> None:
        validation.check_options(type(self).__name__, options, MultiGPUStrategy.option_names())
        validation.check_choice("schedule", schedule, SCHEDULES)
        if num_micro_batches != "auto":
            validation.check_positive("num_micro_batches", num_micro_batches, whole=True)
        if stages_per_rank is not None:
            validation.check_positive("stages_per_rank", stages_per_rank, whole=True)
        check_stages_per_rank(schedule, stages_per_rank)
        if isinstance(balance, str):
            validation.check_choice("balance", balance, ("parameters", "time", "memory"))
        if pipeline_parallel_size is not None:
            validation.check_positive("pipeline_parallel_size", pipeline_parallel_size, whole=True)
        check_activation_checkpointing(activation_checkpointing, schedule)
        super().__init__(**options)
        self._pipeline_parallel_size = pipeline_parallel_size
        self._module_name = module
        self._schedule: ScheduleName = schedule
        self._num_micro_batches = num_micro_batches
        self._stages_per_rank = stages_per_rank
        self._balance = balance
        self._balance_due = False
        self._recording = False, False
        self._chain: Chain | None = None
        self._bounds: list[tuple[int, int]] = []
        self._built_bounds: list[tuple[int, int]] = []
        self._was_whole = True
        self._activation_checkpointing = activation_checkpointing
        self._ownership: Ownership | None = None
        self._steps: StageSteps | None = None
        self._sums: StageSums | None = None
        self._stages: MeteredGroup | None = None
        self._data_axis: DataAxis | None = None
        self._agreement: StageAgreement | None = None
        self._outputs = RealOutputs()
        self._metrics: list[Any] = []
        self._models: ModelsInStages | None = None
        self._step_args: tuple[Any, ...] | None = None
        self._accumulating = False
        self._buffers_due = True

    @property
    @override
    def options(self) -> dict[str, Any]:
        return {
            **super().options,
            "module": self._module_name,
            "schedule": self._schedule,
            "num_micro_batches": self._num_micro_batches,
            "stages_per_rank": self._stages_per_rank,
            "balance": self._balance,
            "pipeline_parallel_size": self._pipeline_parallel_size,
            "activation_checkpointing": self._activation_checkpointing,
        }

    @property
    def pipeline_parallel_size(self) -> int:  # type: ignore[override]
        """Ranks of a pipeline."""
        return self._pipeline_parallel_size or max(1, self.num_nodes * self.num_processes)

    @property
    def stages_per_rank(self) -> int:
        """Stages that each rank has."""
        return self._stages_per_rank or (2 if self._schedule in LOOPED_SCHEDULES else 1)

    @property
    def num_micro_batches(self) -> int:
        """Parts that a batch is cut into if it has that many samples."""
        if self._num_micro_batches == "auto":
            return 4 * self.pipeline_parallel_size
        return self._num_micro_batches

    # Setting up

    @override
    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        validation.check_pipeline(self)

    @override
    def setup(self, trainer: pl.Trainer) -> None:
        assert self.lightning_module is not None
        if trainer.state.fn == TrainerFn.FITTING:
            check_module(self.lightning_module)
            check_callbacks(trainer.callbacks)  # type: ignore[attr-defined]
            trainer.callbacks.insert(0, self._outputs)  # type: ignore[attr-defined]
        super().setup(trainer)
        assert self._ownership is not None
        assert self._sums is not None
        self._agreement = StageAgreement(self.precision_plugin, self._ownership, self._sums)

    @override
    def setup_optimizers(self, trainer: pl.Trainer) -> None:
        super().setup_optimizers(trainer)
        check_optimizers(self.optimizers)

    @override
    def model_to_device(self) -> None:
        """Splits the module, whose dtype is the final one by now, and moves this stage's part to its device."""
        assert self.lightning_module is not None
        module = self.lightning_module
        chain, bounds = self._split(module)
        self._chain, self._bounds = chain, bounds
        group = self.new_group("pipeline", descending=True)
        self._stages = self.metered(group, "pipeline")
        assert self._world is not None
        line = Line(group, self.meter, self.root_device if dist.get_backend(group) == "nccl" else torch.device("cpu"))
        self._ownership = Ownership(module, chain, bounds, self._stages.rank, line.num_ranks)
        assert self._data is not None
        self._was_whole = share_values(self._ownership, self._world, self._data)
        self._ownership.drop()
        self._ownership.move(self.root_device)
        self._sums = StageSums(line, self.meter)
        runner = self._runner(line)
        if self.data_parallel_size > 1:
            bookkeeping = self.metered(self.new_group("data"), "control")
            self._data_axis = DataAxis(self.new_group("data"), bookkeeping, self.meter)
        self._metrics = gather_metrics_by(module, self._gather_metric)
        self._models = ModelsInStages(module)
        seed = self._stages.broadcast_object(torch.initial_seed() & (2**62 - 1), line.ranks[0])
        self._steps = StageSteps(module, runner, self.precision_plugin, seed_of(seed, self.data_parallel_rank))
        self._balance_due = self._balance in ("time", "memory") and module.trainer.state.fn == TrainerFn.FITTING
        if not self._balance_due:
            rank_zero_info(describe_split(chain, bounds, line.ranks))

    def _split(self, module: pl.LightningModule) -> tuple[Chain, list[tuple[int, int]]]:
        num_stages = self.pipeline_parallel_size * self.stages_per_rank
        chain = find_chain(module, self._module_name, num_stages)
        return chain, self._built_bounds or stage_bounds(self._cuts(chain, num_stages), len(chain))

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

    def _runner(self, line: Line) -> PipelineRunner:
        assert self._chain is not None
        assert self._ownership is not None
        recorder = Recorder(self.meter, self.root_device, self._ownership.held, self._ownership.buffers)
        recorder.notes_steps, recorder.counts_activations = self._recording
        return PipelineRunner(
            self._chain,
            self._bounds,
            line,
            self.root_device,
            self.meter,
            schedule=self._schedule,
            parameters=self._ownership.held,
            recompute=layers_of(self._chain, self._activation_checkpointing),
            recorder=recorder,
        )

    @override
    def record_stages(self, *, count_activations: bool = True) -> None:
        self._recording = True, count_activations
        if self._steps is not None:
            recorder = self._steps.runner.recorder
            recorder.notes_steps, recorder.counts_activations = self._recording

    @override
    def stage_record(self) -> StageRecord | None:
        if self._steps is None:
            return None
        runner = self._steps.runner
        return StageRecord(
            pipeline=self.data_parallel_rank,
            position=runner.position,
            num_ranks=runner.line.num_ranks,
            stages_per_rank=self.stages_per_rank,
            schedule=self._schedule,
            steps=runner.recorder.steps(),
            memory=runner.recorder.memory(self.optimizers),
        )

    def _cuts(self, chain: Chain, num_stages: int) -> tuple[int, ...]:
        if isinstance(self._balance, str):
            return balanced_cuts(chain.parameter_bytes(), num_stages)  # of "time" and "memory", until it is measured
        return cuts_of_counts(self._balance, len(chain), num_stages)

    @override
    def teardown(self) -> None:
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        if self._agreement is not None:
            self._agreement.end()
        for metric in self._metrics:
            metric.dist_sync_fn = None
        if self._models is not None:
            self._models.end()
        if trainer is not None and self._outputs in trainer.callbacks:  # type: ignore[attr-defined]
            trainer.callbacks.remove(self._outputs)  # type: ignore[attr-defined]
        regular = (
            trainer is not None and trainer.state.status == TrainerStatus.RUNNING and not self.failure_watch.failed
        )
        if regular and self._steps is not None:
            self._make_whole()
        if self._data_axis is not None:
            self._data_axis.close()
        self._data_axis = None
        self._ownership = self._steps = self._sums = self._stages = self._agreement = self._chain = None
        self._metrics = []
        self._models = None
        self._built_bounds = []
        self._step_args = None
        super().teardown()

    def _make_whole(self) -> None:
        """Gives every rank all values, or rank 0 alone if no other had them; and rank 0 the optimizers' states."""
        assert self._ownership is not None
        assert self._steps is not None
        assert self._stages is not None
        states = [self.optimizer_state(optimizer) for optimizer in self.optimizers]
        line = self._steps.runner.line
        if self._was_whole:
            self._ownership.restore(self._stages, line.ranks)
        elif self.data_parallel_rank == 0:
            self._ownership.gather(line)
        if self.is_global_zero:
            for optimizer, state in zip(self.optimizers, states, strict=True):
                optimizer.load_state_dict(state)

    # Batches

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Moves the batch to the device; stages that have loaded different ones all get that of the last stage."""
        batch = super().batch_to_device(batch, device, dataloader_idx)
        assert self._steps is not None
        assert self._stages is not None
        line = self._steps.runner.line
        if line.same_everywhere(checksum_of(batch)):
            return batch
        shared = self._stages.broadcast_object(batch, line.ranks[-1])
        return super().batch_to_device(shared, device, dataloader_idx)

    # Training

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Keeps the batch for :meth:`backward`, which Lightning calls when gradients have been set to zero.

        Returns:
            A 1, which Lightning divides by the batches that are accumulated and multiplies by the scale of the
            gradients: what each micro-batch's loss then has to be multiplied by.
        """
        self._step_args = (*args, *kwargs.values())
        return torch.ones((), dtype=torch.float64, device=self.root_device)

    def _share_buffers(self) -> None:
        """Gives all pipelines the buffers of the first: before each step that follows an update, and validation."""
        if self._data_axis is not None and self._ownership is not None:
            self._data_axis.share_buffers(self._ownership.buffers())

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._share_buffers()

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
        assert self._ownership is not None
        assert self._sums is not None
        multiplier = closure_loss * self.feed.loss_scale
        self.pre_backward(multiplier)
        multiplier = self.precision_plugin.pre_backward(multiplier, self.lightning_module)
        assert self._steps is not None
        assert self._step_args is not None
        if self._buffers_due:
            self._share_buffers()
        self._buffers_due = not self._accumulating
        (batch, *others), self._step_args = self._step_args, None
        if self._balance_due:
            self._split_by_measure(batch, others)
        outputs = self._steps.train(
            batch,
            others,
            multiplier=float(multiplier),
            num_micro_batches=self.num_micro_batches,
            loss_reduction=self.feed.loss_reduction,
        )
        self._outputs.outputs = {**outputs, "loss": outputs["loss"] * float(closure_loss)}
        if not self._accumulating:
            self._sums.sum_gradients(self._ownership.common())
            if self._data_axis is not None:
                self._data_axis.average_gradients(self._ownership.held())
        multiplier = self.precision_plugin.post_backward(multiplier, self.lightning_module)
        self.post_backward(multiplier)
        return multiplier

    def _split_by_measure(self, batch: Any, others: Sequence[Any]) -> None:
        """Measures the layers on the first batch, which is trained on afterwards, and splits them accordingly."""
        assert self._chain is not None
        assert self._ownership is not None
        assert self._stages is not None
        assert self._steps is not None
        assert self._balance in ("time", "memory")
        self._balance_due = False
        line = self._steps.runner.line
        seed = self.broadcast(torch.initial_seed() & (2**62 - 1))
        again = layers_of(self._chain, self._activation_checkpointing)
        probe = ChainProbe(self._chain, self._bounds, self._ownership, line, self.root_device, seed, again)
        with self._steps.rehearsing(batch, others, self.num_micro_batches) as step:
            costs = measured_costs(
                probe,
                step,
                self._stages,
                line,
                self._chain,
                self.optimizers,
                schedule=self._schedule,
                num_ranks=line.num_ranks,
                stages_per_rank=self.stages_per_rank,
                num_micro_batches=num_micro_batches_of(batch, self.num_micro_batches),
            )
        before, self._bounds = self._bounds, self.broadcast(costs.bounds(self._balance))
        move_layers(self._bounds, self._ownership, self.optimizers, self._stages, line, self.root_device)
        self._steps.runner = self._runner(line)
        self.meter.discard()
        announce(self._balance, costs, self._bounds, before, self._chain.name, line)

    # Evaluation

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._steps is not None
        with self.precision_plugin.val_step_context():
            return self._steps.evaluate("validation_step", *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self._steps is not None
        with self.precision_plugin.test_step_context():
            return self._steps.evaluate("test_step", *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        """What ``predict_step`` returns, on the last stage; an empty list elsewhere."""
        assert self._steps is not None
        with self.precision_plugin.predict_step_context():
            output = self._steps.evaluate("predict_step", *args, **kwargs)
        return output if self._steps.runner.is_last else []

    def _gather_metric(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        """The states of a metric on the last stages, where its samples are.

        Within a step only those ask; outside, all ranks do.
        """
        assert self._steps is not None
        group = self._metered_group(None if self._steps.running else dist.group.WORLD)
        if group is None:
            return [tensor]
        states = group.gather_objects((self._steps.runner.is_last, tensor.cpu()))
        return [state.to(tensor.device) for counts, state in states if counts]

    # Checkpoints

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Maps the file, of which a stage then reads what it holds."""
        map_files(self.checkpoint_io)
        return super().load_checkpoint(checkpoint_path, weights_only)

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        state = super().lightning_module_state_dict()
        if self._ownership is None or self._steps is None or self.data_parallel_rank > 0:
            return state
        return whole_state_dict(state, self._ownership, self._steps.runner.line)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        plain = getattr(optimizer, "_optimizer", optimizer)
        if self._ownership is None or self._steps is None or self.data_parallel_rank > 0:
            return super().optimizer_state(plain)
        return whole_optimizer_state(plain, self._ownership, self._steps.runner.line)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        assert self._ownership is not None
        states = [
            own_optimizer_state(state, optimizer, self._ownership)
            for state, optimizer in zip(checkpoint["optimizer_states"], self.optimizers, strict=False)
        ]
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})
