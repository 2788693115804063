"""Checkpoints of a run: rank 0 saves those of one device, and each rank loads what it holds of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any

from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.trainer.states import TrainerFn, TrainerStatus
from lightning.pytorch.utilities import rank_zero_warn
from torch.optim import Optimizer

from lightning_multigpu._lightning_internals import plain_optimizer
from lightning_multigpu.engine.optimizer_state import plain_state
from lightning_multigpu.engine.remote_values import RemoteValues
from lightning_multigpu.engine.replaced_attributes import replaced
from lightning_multigpu.engine.tensor_split.parts import whole_values
from lightning_multigpu.job.checkpoint_files.whole_checkpoint_io import WholeCheckpointIO, map_files
from lightning_multigpu.placement.owned_step import groups_alone
from lightning_multigpu.strategies.steps.hook_detection import has_hook

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_multigpu.strategies.base import MultiGPUStrategy


class RunCheckpoints:
    """Saves and loads the checkpoints of a strategy, whose family says what its ranks hold.

    The family's functions are ``_whole_weights`` and ``_whole_state`` for a save, ``_own_weights`` and ``_own_state``
    for a load, and those beside them. Rank 0 can fetch values of other ranks, one tensor at a time, while it writes.

    Attributes:
        remote: the values that ranks offer rank 0; None if they offer none.
        stream: whether the save under way fetches them while the file is written.
    """

    def __init__(self, strategy: MultiGPUStrategy) -> None:
        self._strategy = strategy
        self.remote: RemoteValues | None = None
        self.stream = False

    @property
    def are_lost(self) -> bool:
        """True if state that a checkpoint needs is lost; callbacks that save at exceptions do not know."""
        watch = self._strategy.failure_watch
        return watch.ranks_have_ended or (watch.failed and self._strategy._needs_others)

    @property
    def gathers(self) -> bool:
        """Whether this rank takes part in gathering a checkpoint: the first copy of a model that is split does."""
        strategy = self._strategy
        return not self.are_lost and (strategy._model_parallel_size == 1 or strategy.data_parallel_rank == 0)

    # Saving

    def begin(self, trainer: pl.Trainer, undo: ExitStack) -> None:
        """Streams ``trainer.save_checkpoint`` until the end of ``undo``.

        Files that are not local, and hooks that read a checkpoint, get whole values.
        """
        save = trainer.save_checkpoint

        @wraps(save)
        def streamed(filepath: Any, weights_only: bool | None = None, storage_options: Any | None = None) -> None:
            is_file = storage_options is None and "://" not in str(filepath)
            hooked = has_hook("on_save_checkpoint", trainer.lightning_module, of_lightning=True)
            streams = is_file and not hooked and type(trainer.strategy.checkpoint_io) is WholeCheckpointIO
            with replaced(self, stream=streams):
                save(filepath, weights_only, storage_options)

        trainer.save_checkpoint = streamed  # type: ignore[method-assign]
        undo.callback(delattr, trainer, "save_checkpoint")

    def whole_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state of one device, on rank 0; elsewhere this rank's part. A collective."""
        optimizer = plain_optimizer(optimizer)
        if self.are_lost:
            return groups_alone(optimizer)
        return self._strategy._whole_state(optimizer) if self.gathers else self.held_state(optimizer)

    def held_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """This rank's part of the optimizer's state, as Lightning takes it."""
        with plain_state(optimizer):
            return Strategy.optimizer_state(self._strategy, optimizer)

    def save(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
        """Writes the file, on rank 0; the other ranks send what rank 0 fetches."""
        strategy, remote = self._strategy, self.remote if self.stream and self.gathers else None
        if self.are_lost:
            rank_zero_warn(f"{filepath} is not written: ranks have ended, and their state is lost")
            return
        checkpoint = {**checkpoint, **strategy._further_state()}
        if self.gathers:
            checkpoint = {key: whole_values(value, "a checkpoint") for key, value in checkpoint.items()}
        with nullcontext() if remote is None else remote.served():
            Strategy.save_checkpoint(strategy, checkpoint, filepath, storage_options)

    @contextmanager
    def keeping_states(self, optimizers: Collection[Optimizer]) -> Iterator[bool]:
        """Keeps whole states of the optimizers on rank 0 over a teardown within the block, if the fit has ended well.

        A checkpoint may be saved after the fit. Yields whether any states are kept.
        """
        strategy, module = self._strategy, self._strategy.lightning_module
        trainer = None if module is None else module._trainer
        state = None if trainer is None or strategy.failure_watch.failed else trainer.state
        ends_well = state is not None and (state.fn, state.status) == (TrainerFn.FITTING, TrainerStatus.RUNNING)
        states = [(optimizer, self.whole_state(optimizer)) for optimizer in optimizers if ends_well]
        yield bool(states)
        for optimizer, whole in states if strategy.is_global_zero else ():
            optimizer.load_state_dict(whole)

    # Loading

    def agree_on(self, path: Any) -> Any:
        """The file that rank 0 has chosen: each rank might find another file to be the newest. A collective."""
        if self._strategy._maps_checkpoints:
            map_files(self._strategy.checkpoint_io)
        return self._strategy.broadcast(path)

    def load_weights(self, checkpoint: Mapping[str, Any], strict: bool) -> None:
        """Gives the module what this rank holds of the weights."""
        strategy, module = self._strategy, self._strategy._module
        # Lightning restores weights before it converts the module: float64 weights would be rounded to float32.
        if isinstance(strategy.precision_plugin, DoublePrecision):
            with strategy._showing_parts():
                module.double()
        module.load_state_dict(strategy._own_weights(checkpoint["state_dict"]), strict=strict)

    def load_states(self, checkpoint: Mapping[str, Any], load: Callable[[Mapping[str, Any]], None]) -> None:
        """Gives the optimizers what this rank holds of their states, by Lightning's ``load``, and further entries."""
        strategy = self._strategy
        pairs = zip(strategy.optimizers, checkpoint["optimizer_states"], strict=False)
        states = [own for optimizer, state in pairs if (own := strategy._own_state(optimizer, state)) is not None]
        load({"optimizer_states": states})
        strategy._watch_states()
        strategy._load_further_state(checkpoint)
