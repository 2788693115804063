"""The strategy of hybrid parallel training: pipelines side by side, with the layers of each stage split over ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_multigpu.communication.compression import Compressor
from lightning_multigpu.communication.hierarchy import HierarchicalAllReduce
from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.engine.data_parallel.gradient_transport import GradientTransport, compressor_of
from lightning_multigpu.engine.data_parallel.reducer import GradientReducer
from lightning_multigpu.engine.tensor_split.optimizer_states import own_state
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup
from lightning_multigpu.planning.pipelines.timeline import StageRecord
from lightning_multigpu.planning.split_plan import SplitPlan
from lightning_multigpu.strategies import option_checks
from lightning_multigpu.strategies.pipeline.pipeline_options import PipelineOptions
from lightning_multigpu.strategies.pipeline.split_model import SplitModel
from lightning_multigpu.strategies.pipeline.strategy import PipelineStrategy, StagedStrategy
from lightning_multigpu.strategies.pipeline.tensor_axis import TensorAxis
from lightning_multigpu.strategies.steps.same_batches import builds_layers_later, same_batch
from lightning_multigpu.strategies.tensor_parallel.split_layers import (
    Plan,
    SequenceSplit,
    check_patterns,
    check_plan,
    check_sequence_split,
    check_uncompiled,
    plan_text,
)

if TYPE_CHECKING:
    import lightning.pytorch as pl

_SIZES = ("data_parallel_size", "pipeline_parallel_size", "tensor_parallel_size")


class HybridStrategy(StagedStrategy):
    """Hybrid parallel training: pipelines side by side, with the layers of each stage split over a tensor group.

    Neighbouring ranks are a tensor group, which splits layers as ``tensor_split`` does. Consecutive tensor groups are
    the stages of a pipeline. Pipelines share each global batch and average their gradients::

        rank                    0  1  2  3  4  5  6  7      data x pipeline x tensor = 2 x 2 x 2
        data_parallel_rank      0  0  0  0  1  1  1  1      which part of the global batch
        stage                   1  1  0  0  1  1  0  0      rank 0 has the last stage
        tensor_parallel_rank    0  1  0  1  0  1  0  1      which part of each split layer

    Any size may be 1. With ``pipeline_parallel_size=1`` each rank runs the whole module, which then need not be a
    chain of layers. Layers are split on the first training batch, for which each rank has the whole module; see
    :class:`.Trials`.

    Args:
        data_parallel_size: number of pipelines. The product of the three sizes is the number of ranks. By default a
            tensor group has 2 ranks, then a pipeline has 2, each if the remaining ranks allow it, and the data axis has
            the rest.
        pipeline_parallel_size: ranks of a pipeline that have different layers.
        tensor_parallel_size: ranks that split the same layers; they have to be on one host.
        pipeline: options of :class:`PipelineStrategy`, such as ``{"schedule": "interleaved", "balance": "time"}``.
        tensor: options of :class:`TensorSplitStrategy` about the split: ``{"plan": ..., "sequence_split": ...}``.
        compression: compress the gradients that pipelines on different hosts exchange, as for :class:`RingDDPStrategy`.
            A checkpoint does not contain the errors of error feedback.
        compress_inside_hosts: also compress between ranks of one host.
        shared_memory: let ranks of one host reduce gradients, and the sums within split layers, through shared memory.
        options: options of :class:`~lightning_multigpu.strategies.base.MultiGPUStrategy`.

    Raises:
        ValueError: an option is out of its range; the sizes do not make the ranks; a tensor group would span
            several hosts; before the first step, no layer can be split, or an optimizer needs whole tensors.
    """

    def __init__(
        self,
        *,
        data_parallel_size: int | None = None,
        pipeline_parallel_size: int | None = None,
        tensor_parallel_size: int | None = None,
        pipeline: Mapping[str, Any] | None = None,
        tensor: Mapping[str, Any] | None = None,
        compression: str | Mapping[str, Any] | Compressor | None = None,
        compress_inside_hosts: bool = False,
        shared_memory: bool = True,
        **options: Any,
    ) -> None:
        if choice := options.pop("activation_checkpointing", False):  # False is what the command line passes
            raise ValueError(
                f"activation_checkpointing={choice!r}: it is an option of the pipeline; pass "
                "pipeline={'activation_checkpointing': ...}"
            )
        option_checks.check_options(type(self).__name__, options, type(self).option_names())
        option_checks.check_bools(compress_inside_hosts=compress_inside_hosts, shared_memory=shared_memory)
        self._asked = (data_parallel_size, pipeline_parallel_size, tensor_parallel_size)
        for name, size in zip(_SIZES, self._asked, strict=True):
            if size is not None:
                option_checks.check_positive(name, size, whole=True)
        for name, given in (("pipeline", pipeline), ("tensor", tensor)):
            if not isinstance(given, Mapping | None):
                raise ValueError(f"{name}={given!r} is no mapping; pass options by their names: {name}={{...}}")
        pipeline, tensor = dict(pipeline or {}), dict(tensor or {})
        of_pipeline = option_checks.own_options(PipelineStrategy, {})
        option_checks.check_options("pipeline=", pipeline, of_pipeline.keys() - set(_SIZES))
        option_checks.check_options("tensor=", tensor, ["plan", "sequence_split"])
        super().__init__(PipelineOptions(**{**of_pipeline, **pipeline}), **options)
        self._pipeline_given, self._tensor_given = pipeline, tensor
        self._plan: Plan = tensor.get("plan", "auto")
        self._sequence_split: SequenceSplit = tensor.get("sequence_split", False)
        check_plan(self._plan)
        check_sequence_split(self._sequence_split)
        self._transport = GradientTransport(
            compressor=compressor_of(compression),
            compress_inside_hosts=compress_inside_hosts,
            shared_memory=shared_memory,
        )
        self.on_split: Callable[[SplitPlan], None] | None = None
        # During a run:
        self._axis: TensorAxis | None = None
        self._compressed: HierarchicalAllReduce | None = None

    @classmethod
    @override
    def option_names(cls) -> list[str]:
        return [name for name in super().option_names() if name != "activation_checkpointing"]

    @property
    @override
    def options(self) -> dict[str, Any]:
        of_pipeline = vars(self.pipeline_options)
        of_tensor = {n: plan_text(value) if n == "plan" else value for n, value in self._tensor_given.items()}
        return {
            **{name: value for name, value in super().options.items() if name not in of_pipeline},
            **dict(zip(_SIZES, self._asked, strict=True)),
            "pipeline": self._pipeline_given or None,
            "tensor": of_tensor or None,
            **self._transport.options,
        }

    @property
    def tensor_options(self) -> dict[str, Any]:
        """The options of :class:`TensorSplitStrategy` for the split."""
        return {
            "plan": self._plan,
            "sequence_split": self._sequence_split,
            "shared_memory": self._transport.shared_memory,
        }

    # The mesh

    @property
    def _sizes(self) -> tuple[int, int]:
        """The sizes of the pipeline and the tensor axes."""
        data, pipeline, tensor = self._asked
        left = max(1, self.num_nodes * self.num_processes // math.prod(size or 1 for size in self._asked))
        if tensor is None:
            tensor = left if data and pipeline else 2 - left % 2
            left //= tensor
        if pipeline is None:
            pipeline = left if data else 2 - left % 2
        return pipeline, tensor

    @property
    def pipeline_parallel_size(self) -> int:  # type: ignore[override]
        """Ranks of a pipeline, which have different layers."""
        return self._sizes[0]

    @property
    def tensor_parallel_size(self) -> int:  # type: ignore[override]
        """Ranks that split each layer of a stage."""
        return self._sizes[1]

    @override
    def _check_num_ranks(self) -> None:
        world, (pipeline, tensor) = self.num_nodes * self.num_processes, self._sizes
        data = self._asked[0] or max(1, world // (pipeline * tensor))
        if data * pipeline * tensor != world:
            given = " times ".join(f"{n}={s}" for n, s in zip(_SIZES, (data, pipeline, tensor), strict=True))
            raise ValueError(
                f"{given} makes {data * pipeline * tensor} ranks, and there are {world}; change one of them"
            )
        if self.num_processes % tensor:
            raise ValueError(
                f"tensor_parallel_size={tensor}: a host has {self.num_processes} ranks, and every split layer would "
                f"wait for the network between hosts; pass a divisor of {self.num_processes}"
            )
        if tensor == 1 and (self._plan != "auto" or self._sequence_split):
            raise ValueError(
                f"tensor={self.options['tensor']!r} with tensor_parallel_size=1: no layer is split; leave it out, or "
                "pass tensor_parallel_size=2"
            )
        if self._transport.compressor is not None and data == 1:
            raise ValueError(
                f"compression={self.options['compression']} with data_parallel_size=1: no gradients travel between "
                "pipelines; leave it out, or pass data_parallel_size=2"
            )
        points = self.pipeline_options.split_points
        if tensor > 1 and points is not None:
            raise ValueError(
                f"split_points={list(points)!r} with tensor_parallel_size={tensor}: a module that is cut by tracing "
                "holds whole layers; leave split_points out, and name an nn.Sequential or nn.ModuleList by module= if "
                "'auto' does not find it, or pass tensor_parallel_size=1"
            )
        if pipeline == 1 and (self.pipeline_options.num_stages_of_rank > 1 or points is not None):
            option = f"split_points={list(points)!r}" if points else f"schedule={self.pipeline_options.schedule!r}"
            raise ValueError(
                f"{option} with pipeline_parallel_size=1: one rank runs the whole module, and has no stages; leave it "
                "out, or pass pipeline_parallel_size=2"
            )
        option_checks.check_pipeline(
            self.run_context, pipeline, sync_batchnorm=self._layer_sync is not None, fewest_stages=1
        )

    # Setting up

    @override
    def check_before_launch(self, trainer: pl.Trainer) -> None:
        module = trainer.lightning_module
        if self.tensor_parallel_size > 1 and trainer.state.fn == TrainerFn.FITTING:
            check_uncompiled(module)  # a pipeline gives other advice
        super().check_before_launch(trainer)
        if not builds_layers_later(module):
            check_patterns(self._plan, module)

    @override
    def _data_reducer(self) -> GradientReducer:
        assert self.groups is not None
        reducer, _ = self._transport.open(
            self._module,
            self.groups,
            self.meter,
            self.collectives.data,
            ranks_per_host=self.num_processes,
            hook=None,
            info=rank_zero_info,
            warn=rank_zero_warn,
        )
        self._compressed = reducer.all_reduce if reducer.compresses else None
        return reducer

    @override
    def _tensor_axis(self, model: SplitModel) -> TensorAxis | None:
        if self.tensor_parallel_size == 1:
            return None
        assert self.groups is not None
        group = self.new_group("tensor")
        shared_memory, readers = self._transport.shared_memory, self.new_group("tensor", backend="gloo")
        layers = TensorGroup(group, meter=self.meter, shared_memory=shared_memory, readers=readers)
        self.groups.also_cut.append(layers.abort)
        self._axis = TensorAxis(
            model, layers, self.metered(group, "tensor"), self._plan, self._sequence_split, self.on_split
        )
        self._undo.callback(self._axis.close)
        return self._axis

    @override
    def _make_whole(self) -> None:
        if self._axis is not None:
            self._axis.make_whole()
        super()._make_whole()

    @override
    def teardown(self) -> None:
        super().teardown()
        self._axis = self._compressed = None

    # Training

    @override
    def model_to_device(self) -> None:
        super().model_to_device()
        if self._axis is not None:
            self._undo.callback(self._axis.layers.follow_updates(self.precision_plugin, self._watch_states).end)

    @override
    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if self._axis is None else self._axis.layers.stepping():
            return super().optimizer_step(*args, **kwargs)

    @override
    def _check_new(self, optimizers: Sequence[Optimizer]) -> None:
        super()._check_new(optimizers)
        if self._axis is not None and self._axis.is_split:
            self._axis.layers.check_optimizers(optimizers)

    @override
    def _shown_state(self, parameter: Tensor, state: Any) -> Any:
        return state if self._axis is None else self._axis.layers.shown_state(parameter, state)

    @override
    def _taken_state(self, parameter: Tensor, state: Any) -> Any:
        return state if self._axis is None else own_state(parameter, state)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Moves the batch to the device; if it differs in a tensor group, all ranks get the first one's."""
        batch = super().batch_to_device(batch, device, dataloader_idx)
        if self._axis is None or self.failure_watch.failed:
            return batch
        return same_batch(batch, self._axis.peers, device or self.root_device)

    @override
    def on_optimizer_step_end(self) -> None:
        super().on_optimizer_step_end()
        if self._compressed is not None:
            self._compressed.end_step(self._loss_scaler_scale())

    @override
    def on_train_end(self) -> None:
        if self._compressed is not None and self._compressed.compressed is not None:
            rank_zero_info(self._compressed.compressed.summary())
        super().on_train_end()

    @override
    def _showing_parts(self) -> AbstractContextManager[None]:
        return nullcontext() if self._axis is None else self._axis.group.showing(parts=True)

    @override
    def _held_in_common(self) -> list[tuple[MeteredGroup, Iterable[tuple[str, Tensor]]]]:
        groups = super()._held_in_common()
        return groups if self._axis is None else [*groups, (self._axis.peers, self._axis.replicated())]

    @override
    def split_plan(self) -> SplitPlan | None:
        return None if self._axis is None else self._axis.plan

    @override
    def stage_record(self) -> StageRecord | None:
        record = super().stage_record()
        if record is None:  # reports show the ranks with the same part of every layer as one pipeline
            return None
        return replace(record, pipeline=record.pipeline * self.tensor_parallel_size + self.tensor_parallel_rank)

    # Checkpoints

    @property
    def _gathering_axis(self) -> TensorAxis | None:
        """The tensor group that has all stages' parts of a checkpoint and gathers whole values; None on other ranks."""
        is_last = self._running is not None and self._running.model.is_last
        return self._axis if is_last and self._axis is not None and self._axis.is_split else None

    @override
    def _whole_weights(self, state: dict[str, Any]) -> dict[str, Any]:
        state, axis = super()._whole_weights(state), self._gathering_axis
        return state if axis is None else axis.layers.whole_state_dict(state)

    @override
    def _whole_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state, axis = super()._whole_state(optimizer), self._gathering_axis
        return state if axis is None else axis.layers.whole_optimizer_state(optimizer, state)
