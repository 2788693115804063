"""The base class of all strategies of this pack: of those that start ranks, and of dp with its single process."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.optim import Optimizer
from typing_extensions import override

from lightning_multigpu._lightning_internals import plain_optimizer
from lightning_multigpu.engine.data_parallel.trained_parameters import check_belong
from lightning_multigpu.engine.training_memory import measured_bytes
from lightning_multigpu.planning.pipelines.timeline import HeldBytes
from lightning_multigpu.runtime.checkpoint_files.last_checkpoint import last_checkpoint_of
from lightning_multigpu.runtime.checkpoint_files.whole_checkpoint_io import WholeCheckpointIO
from lightning_multigpu.runtime.failure_watch import has_trained
from lightning_multigpu.runtime.uncaught_errors import resume_advice
from lightning_multigpu.strategies.observed import ObservedStrategy

if TYPE_CHECKING:
    import lightning.pytorch as pl

CHECKPOINT_KEY = "lightning_multigpu"
"""The only key of a checkpoint besides Lightning's; stock Lightning ignores it."""


class PackStrategy(ObservedStrategy, Strategy):
    """Base class of all strategies of this pack: checkpoint files, checks of optimizers, and measures for callbacks.

    A checkpoint file is written whole or not at all, and read without a loss of precision.
    """

    @property
    def _module(self) -> pl.LightningModule:
        """The user's module; the Trainer sets it before it calls any hook."""
        assert self.lightning_module is not None
        return self.lightning_module

    @override
    def held_bytes(self) -> HeldBytes | None:
        return measured_bytes(self._module.parameters(), self.optimizers)

    @property
    def _owned(self) -> Collection[Optimizer]:
        """The optimizers whose states were dealt out to ranks or servers when this fit started; empty if none were."""
        return ()

    @property
    @override
    def optimizers(self) -> list[Optimizer]:
        """The optimizers of this fit.

        Raises:
            ValueError: on assignment, if another optimizer comes in mid-fit and states have owners.
        """
        return self._optimizers

    @optimizers.setter
    def optimizers(self, optimizers: list[Optimizer]) -> None:
        plain = [*map(plain_optimizer, optimizers)]
        for number, optimizer in enumerate(plain):
            if self._owned and optimizer not in self._owned:
                raise ValueError(
                    f"optimizer {number} ({type(optimizer).__name__}) was put in place during a fit, and the strategy "
                    "deals out the states of optimizers when a fit starts: change its param_groups, or "
                    "start another fit with it, or use strategy='ring_ddp'"
                )
        known = {id(optimizer) for optimizer in self._optimizers}
        if new := [optimizer for optimizer in plain if id(optimizer) not in known]:
            self._check_new(new)
        Strategy.optimizers.fset(self, optimizers)  # type: ignore[attr-defined]

    def _check_new(self, optimizers: Sequence[Optimizer]) -> None:
        """Raises ValueError for optimizers, of a new fit or put in place during one, that the strategy cannot step."""
        check_belong(self._module, optimizers)

    @override
    def on_exception(self, exception: BaseException) -> None:
        """Prints how to resume, after the callbacks have saved: a signal has ended the run."""
        super().on_exception(exception)
        trainer = None if self.lightning_module is None else self.lightning_module._trainer
        if isinstance(exception, KeyboardInterrupt | SIGTERMException) and has_trained(trainer):
            advice = resume_advice(last_checkpoint_of(trainer))
            if advice and self.is_global_zero:
                sys.stderr.write(f"{advice}\n")

    @override
    def on_validation_end(self) -> None:
        super().on_validation_end()
        self.meter.discard()

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        """The user's plugin, or one that leaves no half-written files."""
        if self._checkpoint_io is None:
            self._checkpoint_io = WholeCheckpointIO()
        if type(getattr(self._checkpoint_io, "checkpoint_io", self)) in (TorchCheckpointIO, type(None)):
            self._checkpoint_io.checkpoint_io = WholeCheckpointIO()  # type: ignore[attr-defined]  # it wraps another
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        # Lightning restores weights before it converts the module: float64 weights would be rounded to float32.
        if isinstance(self.precision_plugin, DoublePrecision):
            self._module.double()
        super().load_model_state_dict(checkpoint, strict=strict)
