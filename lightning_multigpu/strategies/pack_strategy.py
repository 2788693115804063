"""The base of every strategy of the pack, also of the one that starts no ranks: what callbacks and checkpoints ask."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
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
from lightning_multigpu.planning.pipelines.timeline import HeldBytes, StageRecord
from lightning_multigpu.planning.split_plan import SplitPlan
from lightning_multigpu.strategies.checkpoints import RunCheckpoints

if TYPE_CHECKING:
    import lightning.pytorch as pl


class PackStrategy(Strategy):
    """Beside Lightning's own interface, what callbacks ask. The answers fit strategies whose ranks all do the same."""

    meter: Meter
    saves: RunCheckpoints
    _owned: Collection[Optimizer] = ()
    """The optimizers whose states were dealt out to ranks or servers when this fit started; empty if none were."""
    _spare_bytes = 0
    """Bytes of buffers in which gradients travel."""

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
        """Bytes of the parameters, gradients and optimizer states that this rank holds at present, as measured.

        Buffers in which gradients travel count as gradients. Optimizer states in the host's memory, or on servers, do
        not count. Of several devices that one rank drives only the first holds bytes between two steps.
        """
        held = measured_bytes(self._module.parameters(), self.optimizers)
        return replace(held, gradients_bytes=held.gradients_bytes + self._spare_bytes)

    def newest_of_ranks(self, name: str, value: Any) -> list[Any] | None:
        """The values of ranks that train without collectives, each at its own pace; None if there are collectives.

        Rank 0 gets the newest value of each rank that has passed one, in the order of ranks; another rank gets its own
        alone.

        Args:
            name: the same for all values that belong together.
            value: of types that JSON has.
        """
        return None

    def gather_at_end(self, value: Callable[[], Any]) -> list[Any] | None:
        """A list that gets the values of all ranks when training ends; None if collectives still work then.

        Rank 0 gets the values of all ranks, in their order; another rank only its own. All ranks make the same calls.

        Args:
            value: returns this rank's value, of types that JSON has; called after all callbacks' ``on_train_end``.
        """
        return None

    def server_statistics(self) -> Any:
        """The counts of the parameter servers on rank 0, which asks the servers; None elsewhere and without servers.

        They are :class:`~lightning_multigpu.engine.parameter_server.server_statistics.ServerStatistics`.
        """
        return None

    def split_plan(self) -> SplitPlan | None:
        """The blocks of layers that are split over ranks, and what each sends; None without a tensor split."""
        return None

    def record_stages(self) -> None:
        """Records the passes of this rank's stages of a pipeline in every following fit."""

    def stage_record(self) -> StageRecord | None:
        """The newest steps and the memory of this rank's stages of a pipeline; None without a pipeline.

        The record belongs to the running fit: callbacks can read it up to their ``on_train_end``.
        """
        return None

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
