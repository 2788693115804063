"""What a strategy answers whose model is spread over the stages of a pipeline: collectives, and checkpoints."""

from __future__ import annotations

from abc import ABC
from collections.abc import Mapping
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.engine.pipeline.errors import PipelineError
from lightning_multigpu.engine.pipeline.splitting.placeholder import Placeholder
from lightning_multigpu.runtime.whole_checkpoint_io import map_files
from lightning_multigpu.strategies.base import MultiGPUStrategy
from lightning_multigpu.strategies.pipeline.running_pipeline import RunningPipeline

T = TypeVar("T")


class StagedStrategy(MultiGPUStrategy, ABC):
    """One rank's view of a model that no rank has as a whole.

    Args:
        options: those of :class:`~lightning_multigpu.strategies.base.MultiGPUStrategy`.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self._running: RunningPipeline | None = None

    @property
    def _pipeline(self) -> RunningPipeline:
        assert self._running is not None
        return self._running

    @override
    def holds(self, parameter: Tensor) -> bool:
        """Whether the parameter belongs to this rank's stages, or to what all stages hold."""
        return not isinstance(parameter, Placeholder)

    # Collectives

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Tensors of every pipeline (or of ``group``), stacked: shape (pipelines, *tensor.shape).

        The world means the data axis too: ``LightningModule.all_gather`` names it where it was given no group.
        """
        return super().all_gather(tensor, None if group is dist.group.WORLD else group, sync_grads)

    @override
    def broadcast(self, obj: T, src: int = 0) -> T:
        """The object of rank ``src``; within a step that of the rank with the same stages in its pipeline."""
        if self._in_step:
            size = self.pipeline_parallel_size
            src = src // size * size + self.global_rank % size
        return super().broadcast(obj, src)

    @override
    def _metered_group(self, group: Any | None) -> MeteredGroup | None:
        """Within a step only the ranks with the same stages are at the same place: there nobody waits for others."""
        if group is dist.group.WORLD and self._in_step:
            group = None
        return super()._metered_group(group)

    @property
    def _in_step(self) -> bool:
        return self._running is not None and self._running.steps.running

    # Checkpoints

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Maps the file, of which a stage then reads what it holds."""
        map_files(self.checkpoint_io)
        return super().load_checkpoint(checkpoint_path, weights_only)

    @property
    @override
    def state_is_lost(self) -> bool:
        return super().state_is_lost or (self._running is not None and self.failure_watch.failed)

    @property
    def _gathers(self) -> bool:
        """Whether what a checkpoint needs is brought together from the stages, which takes all of them."""
        return self._running is not None and self.data_parallel_rank == 0 and not self.state_is_lost

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._in_step:
            raise PipelineError(
                "a checkpoint is saved within a step, where the last stage alone is; save it in on_train_batch_end, or "
                "by ModelCheckpoint(every_n_train_steps=...)"
            )
        state = super().lightning_module_state_dict()
        return self._pipeline.model.whole_state_dict(state) if self._gathers else state

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        plain = getattr(optimizer, "_optimizer", optimizer)
        return self._pipeline.model.whole_optimizer_state(plain) if self._gathers else super().optimizer_state(plain)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = [
            self._pipeline.model.own_optimizer_state(state, optimizer)
            for state, optimizer in zip(checkpoint["optimizer_states"], self.optimizers, strict=False)
        ]
        super().load_optimizer_state_dict({**checkpoint, "optimizer_states": states})
