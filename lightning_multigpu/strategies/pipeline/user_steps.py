"""The user's steps as a stage of a pipeline runs them: to train, to evaluate, and in dry runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl
from lightning.pytorch.plugins import Precision
from torchmetrics import Metric

from lightning_multigpu.engine.micro_batches import moved
from lightning_multigpu.strategies.pipeline.last_stage_outputs import LastStageOutputs
from lightning_multigpu.strategies.pipeline.tensor_axis import TensorAxis
from lightning_multigpu.strategies.steps.dry_run import unlogged_loss
from lightning_multigpu.strategies.steps.step_logs import StepLogs


class UserSteps:
    """Calls the steps of a module. Parameters of split layers read as whole tensors within a step.

    Args:
        module: the user's module.
        plugin: the Trainer's precision plugin.
        outputs: notes which attributes of the module steps change.
        batch_dim: the dimension of a training batch that counts samples; micro-batches come with it as the first one.
        tensor_axis: the ranks that split the layers of this rank's stages; None without a tensor split.

    Attributes:
        plugin: as given.
        logs: records what steps log.
        are_running: a step is running, so other stages are elsewhere in the program.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        plugin: Precision,
        outputs: LastStageOutputs,
        batch_dim: int,
        tensor_axis: TensorAxis | None,
    ) -> None:
        self.plugin = plugin
        self.logs = StepLogs(module)
        self.are_running = False
        self._module = module
        self._outputs = outputs
        self._batch_dim = batch_dim
        self._tensor_axis = tensor_axis
        self._metrics = [part for part in module.modules() if isinstance(part, Metric)]

    def call(self, hook: str, *args: Any, **kwargs: Any) -> Any:
        """The output of a step, by its name; a ``training_step`` gets a micro-batch."""
        self.are_running = True
        try:
            if hook == "training_step":  # its part was cut along dimension 0
                args = (moved(args[0], 0, self._batch_dim), *args[1:])
            with self._outputs.noting(), self._showing_whole():
                output = getattr(self._module, hook)(*args, **kwargs)
                return output if self._tensor_axis is None else self._tensor_axis.whole_outputs(output)
        finally:
            self.are_running = False
            # A metric that this stage computed alone within the step has to be computed by all stages.
            for metric in self._metrics:
                metric._computed = None

    def loss(self, micro_batch: Any, others: Sequence[Any]) -> Any:
        """The loss of a dry run of ``training_step``, whose logs are dropped."""
        return unlogged_loss(self.plugin, self._module, lambda: self.call("training_step", micro_batch, *others))

    def _showing_whole(self) -> AbstractContextManager[None]:
        return nullcontext() if self._tensor_axis is None else self._tensor_axis.group.showing(parts=False)
