"""The base of every strategy of the pack, also of the one that starts no ranks: what callbacks and checkpoints ask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import wraps
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from lightning.fabric.plugins import CheckpointIO
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_multigpu._lightning_internals import plain_optimizer
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.engine.data_parallel.outer_optimizer import OUTER_OPTIMIZER, OuterOptimizer
from lightning_multigpu.engine.data_parallel.trained_parameters import check_belong, check_owned
from lightning_multigpu.engine.optimizer_state import plain_state
from lightning_multigpu.engine.placeholder import Placeholder
from lightning_multigpu.engine.remote_values import RemoteValues
from lightning_multigpu.engine.replaced_attributes import replaced
from lightning_multigpu.engine.tensor_split.parts import whole_values
from lightning_multigpu.engine.training_memory import measured_bytes
from lightning_multigpu.job.checkpoint_files.whole_checkpoint_io import WholeCheckpointIO, map_files, whole_io
from lightning_multigpu.placement.owned_step import OwnedStep, groups_alone
from lightning_multigpu.planning.pipelines.timeline import HeldBytes
from lightning_multigpu.strategies.run_view import RunView
from lightning_multigpu.strategies.steps.hook_detection import has_hook

if TYPE_CHECKING:
    import lightning.pytorch as pl


class PackStrategy(Strategy):
    """What all strategies of the pack have beside Lightning's own interface."""

    meter: Meter
    _options: dict[str, Any]
    _owned: Mapping[Optimizer, OwnedStep[Any]] = MappingProxyType({})
    """The optimizers whose states were dealt out to ranks or servers when this fit started, and their steps."""
    remote: RemoteValues | None = None
    """The values that ranks offer rank 0, which fetches them one tensor at a time; None if they offer none."""
    streams = False
    """Whether the save under way fetches them while the file is written."""
    _maps_checkpoints = False
    """Whether a rank keeps a part of a checkpoint only, and so reads no more of the file."""
    _spare_bytes = 0
    """Bytes of buffers in which gradients travel."""
    _outer: OuterOptimizer | None = None
    """Steps with the average change of the weights of ranks that step alone; None if they do not."""

    @property
    def options(self) -> dict[str, Any]:
        """The options that this strategy runs with, for reports."""
        return self._options

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
        outer_bytes = 0 if self._outer is None else self._outer.held_bytes
        return HeldBytes(
            held.parameters_bytes, held.gradients_bytes + self._spare_bytes, held.optimizer_bytes + outer_bytes
        )

    def run_view(self) -> RunView:
        """What this strategy tells callbacks, beside Lightning's own interface."""
        return RunView(
            meter=self.meter,
            options=self.options,
            devices_per_rank=self.devices_per_rank,
            held_bytes=self.held_bytes,
        )

    def _loss_scaler_scale(self) -> float:
        """The factor of losses and gradients under 16-mixed, else 1."""
        scaler = getattr(self.precision_plugin, "scaler", None)
        return 1.0 if scaler is None else float(scaler.get_scale())

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

    # Checkpoints: what the ranks of a family hold decides these functions; Lightning's hooks follow.

    def _settle_values(self) -> None:
        """Checks that all ranks can save now."""

    def _whole_weights(self, state: dict[str, Any]) -> dict[str, Any]:
        """``module.state_dict()`` of one device on rank 0, from this rank's; a collective of those that gather."""
        return state

    def _whole_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state of one device on rank 0; a collective of those that gather."""
        step = self._owned.get(optimizer)
        return self._held_state(optimizer) if step is None else step.state_dict()

    def _own_weights(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """What this rank loads of ``module.state_dict()`` of one device."""
        return state

    def _own_state(self, optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any] | None:
        """What the optimizer of this rank loads of its state of one device; None if something else has loaded it."""
        if optimizer not in self._owned:
            return state
        self._owned[optimizer].load_state_dict(state)
        return None

    def _further_state(self) -> dict[str, Any]:
        """Further entries of a checkpoint that is being written."""
        if self._outer is None:
            return {}
        return {OUTER_OPTIMIZER: self._outer.state(dict(self._module.named_parameters()))}

    def _load_further_state(self, checkpoint: Mapping[str, Any]) -> None:
        """Takes those of a checkpoint that a fit resumes from, which may be another strategy's."""
        if self._outer is not None and OUTER_OPTIMIZER in checkpoint:
            self._outer.load(dict(self._module.named_parameters()), checkpoint[OUTER_OPTIMIZER])

    def _watch_states(self) -> None:
        """Where ranks have parts of the optimizers' states: has user code read whole values or none."""

    # Saving

    @property
    def _are_lost(self) -> bool:
        """True if state that a checkpoint needs is lost; callbacks that save at exceptions do not know."""
        return False

    @property
    def _gathers(self) -> bool:
        """Whether this rank takes part in gathering a checkpoint: the first copy of a model that is split does."""
        return True

    def stream_saves(self, trainer: pl.Trainer, undo: ExitStack) -> None:
        """Streams ``trainer.save_checkpoint`` until the end of ``undo``.

        Files that are not local, and hooks that read a checkpoint, get whole values.
        """
        save = trainer.save_checkpoint

        @wraps(save)
        def streamed(filepath: Any, weights_only: bool | None = None, storage_options: Any | None = None) -> None:
            is_file = storage_options is None and "://" not in str(filepath)
            hooked = has_hook("on_save_checkpoint", trainer.lightning_module, of_lightning=True)
            streams = is_file and not hooked and type(trainer.strategy.checkpoint_io) is WholeCheckpointIO
            with replaced(self, streams=streams):
                save(filepath, weights_only, storage_options)

        trainer.save_checkpoint = streamed  # type: ignore[method-assign]
        undo.callback(delattr, trainer, "save_checkpoint")

    @override
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._settle_values()
        state = super().lightning_module_state_dict()
        return self._whole_weights(state) if self._gathers else state

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state of one device, on rank 0; elsewhere this rank's part. A collective."""
        optimizer = plain_optimizer(optimizer)
        if self._are_lost:
            return groups_alone(optimizer)
        return self._whole_state(optimizer) if self._gathers else self._held_state(optimizer)

    def _held_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """This rank's part of the optimizer's state, as Lightning takes it."""
        with plain_state(optimizer):
            return Strategy.optimizer_state(self, optimizer)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Writes the file, on rank 0; the other ranks send what rank 0 fetches."""
        if self._are_lost:
            rank_zero_warn(f"{filepath} is not written: ranks have ended, and their state is lost")
            return
        if "optimizer_states" in checkpoint:  # else weights alone are saved
            checkpoint = {**checkpoint, **self._further_state()}
        if self._gathers:
            checkpoint = {key: whole_values(value, "a checkpoint") for key, value in checkpoint.items()}
        remote = self.remote if self.streams and self._gathers else None
        with nullcontext() if remote is None else remote.served():
            super().save_checkpoint(checkpoint, filepath, storage_options)
            while not self._has_saved(checkpoint, filepath):
                super().save_checkpoint(checkpoint, filepath, storage_options)

    def _has_saved(self, checkpoint: dict[str, Any], filepath: Any) -> bool:
        """Whether the file is written; False if another rank has to write it now."""
        return True

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        if not self._are_lost:  # else no newer file was written
            super().remove_checkpoint(filepath)

    # Loading

    @override
    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Loads the file that rank 0 has chosen: each rank might find another one to be the newest. A collective."""
        if self._maps_checkpoints:
            map_files(self.checkpoint_io)
        return super().load_checkpoint(self.broadcast(checkpoint_path), *args, **kwargs)

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Gives the optimizers what this rank holds of their states, and takes further entries."""
        pairs = zip(self.optimizers, checkpoint["optimizer_states"], strict=False)
        states = [own for optimizer, state in pairs if (own := self._own_state(optimizer, state)) is not None]
        super().load_optimizer_state_dict({"optimizer_states": states})
        self._watch_states()
        self._load_further_state(checkpoint)

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        # Lightning restores weights before it converts the module: float64 weights would be rounded to float32.
        if isinstance(self.precision_plugin, DoublePrecision):
            with self._showing_parts():
                self._module.double()
        self._module.load_state_dict(self._own_weights(checkpoint["state_dict"]), strict=strict)
