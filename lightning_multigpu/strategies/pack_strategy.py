"""The base of every strategy of the pack, also of the one that starts no ranks: what callbacks and checkpoints ask."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_multigpu._lightning_internals import plain_optimizer
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.engine.data_parallel.trained_parameters import check_belong, check_owned
from lightning_multigpu.engine.placeholder import Placeholder
from lightning_multigpu.engine.training_memory import measured_bytes
from lightning_multigpu.job.checkpoint_files.whole_checkpoint_io import whole_io
from lightning_multigpu.planning.pipelines.timeline import HeldBytes
from lightning_multigpu.strategies.checkpoints import RunCheckpoints
from lightning_multigpu.strategies.run_view import RunView

if TYPE_CHECKING:
    import lightning.pytorch as pl


class PackStrategy(Strategy):
    """What all strategies of the pack have beside Lightning's own interface."""

    meter: Meter
    saves: RunCheckpoints
    _owned: Collection[Optimizer] = ()
    """The optimizers whose states were dealt out to ranks or servers when this fit started; empty if none were."""
    _spare_bytes = 0
    """Bytes of buffers in which gradients travel."""

    @property
    def options(self) -> dict[str, Any]:
        """The options that this strategy runs with, for reports."""
        raise NotImplementedError

    @property
    def devices_per_rank(self) -> int:
        """The number of devices that one rank drives."""
        return 1

    @property
    def _module(self) -> pl.LightningModule:
        """The user's module; the Trainer sets it before it calls any hook."""
        assert self.lightning_module is not None
        return self.lightning_module

    def check_before_launch(self, trainer: pl.Trainer) -> None:
        """Calls this method of the callbacks that have it, before any process is started."""
        for callback in trainer.callbacks:  # type: ignore[attr-defined]
            if (check := getattr(callback, "check_before_launch", None)) is not None:
                check(trainer)

    def holds(self, parameter: Tensor) -> bool:
        """True if this rank has the values of a parameter of the module, and of its gradient."""
        return not isinstance(parameter, Placeholder)

    def held_bytes(self) -> HeldBytes:
        """See :attr:`.RunView.held_bytes`."""
        held = measured_bytes(self._module.parameters(), self.optimizers)
        return replace(held, gradients_bytes=held.gradients_bytes + self._spare_bytes)

    def run_view(self) -> RunView:
        """What this strategy tells callbacks, beside Lightning's own interface."""
        return RunView(
            meter=self.meter,
            options=self.options,
            devices_per_rank=self.devices_per_rank,
            held_bytes=self.held_bytes,
        )

    def _showing_parts(self) -> AbstractContextManager[None]:
        """Within the block the module's parameters are this rank's parts, as the ranks average and compare them."""
        return nullcontext()

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        """The user's plugin, or one that leaves no half-written files."""
        self._checkpoint_io = whole_io(self._checkpoint_io)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    def _own_weights(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """What this rank loads of ``module.state_dict()`` of one device."""
        return state

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self.saves.load_weights(checkpoint, strict)

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
        check_owned(plain, self._owned)
        known = {id(optimizer) for optimizer in self._optimizers}
        if new := [optimizer for optimizer in plain if id(optimizer) not in known]:
            self._check_new(new)
        Strategy.optimizers.fset(self, optimizers)  # type: ignore[attr-defined]

    def _check_new(self, optimizers: Sequence[Optimizer]) -> None:
        """Raises ValueError for optimizers, of a new fit or put in place during one, that the strategy cannot step."""
        check_belong(self._module, optimizers)

    @override
    def on_validation_end(self) -> None:
        self.meter.discard()
