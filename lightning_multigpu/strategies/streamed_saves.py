"""Saves of checkpoints for which rank 0 fetches values of other ranks only while it writes the file."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any

from lightning_multigpu.engine.remote_values import RemoteValues
from lightning_multigpu.runtime.checkpoint_files.whole_checkpoint_io import WholeCheckpointIO
from lightning_multigpu.strategies.steps.hook_detection import has_hook

if TYPE_CHECKING:
    import lightning.pytorch as pl


class StreamedSaves:
    """Streams ``trainer.save_checkpoint``, but for files that are not local and for hooks that read a checkpoint.

    Attributes:
        remote: the values that ranks offer rank 0; None if they offer none.
        stream: whether the save under way fetches them while the file is written.
    """

    def __init__(self) -> None:
        self.remote: RemoteValues | None = None
        self.stream = False

    def begin(self, trainer: pl.Trainer, undo: ExitStack) -> None:
        """Streams saves until the end of ``undo``."""
        save = trainer.save_checkpoint

        @wraps(save)
        def streamed(filepath: Any, weights_only: bool | None = None, storage_options: Any | None = None) -> None:
            is_file = storage_options is None and "://" not in str(filepath)
            hooked = has_hook("on_save_checkpoint", trainer.lightning_module, of_lightning=True)
            self.stream = is_file and not hooked and type(trainer.strategy.checkpoint_io) is WholeCheckpointIO
            try:
                save(filepath, weights_only, storage_options)
            finally:
                self.stream = False

        trainer.save_checkpoint = streamed  # type: ignore[method-assign]
        undo.callback(delattr, trainer, "save_checkpoint")

    def writing(self) -> AbstractContextManager[None]:
        """Within the block rank 0 writes the file, and the other ranks send what it fetches."""
        return self.remote.served() if self.stream and self.remote is not None else nullcontext()
