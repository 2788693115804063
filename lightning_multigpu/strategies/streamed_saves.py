"""Checkpoints that fetch values of other ranks only while the file is written."""

from __future__ import annotations

from contextlib import ExitStack
from functools import wraps
from typing import TYPE_CHECKING, Any

from typing_extensions import override

from lightning_multigpu.runtime.checkpoint_files.whole_checkpoint_io import WholeCheckpointIO, map_files
from lightning_multigpu.strategies.base import MultiGPUStrategy
from lightning_multigpu.strategies.steps.hook_detection import has_hook

if TYPE_CHECKING:
    import lightning.pytorch as pl


class StreamedSaves(MultiGPUStrategy):
    """Base class of strategies whose checkpoints contain values of several ranks."""

    _streams = False
    """Whether a save is under way that fetches values only while the file is written."""

    def _stream_saves(self, trainer: pl.Trainer, undo: ExitStack) -> None:
        """Lets ``trainer.save_checkpoint`` fetch values of other ranks only while the file is written.

        For other files than local ones, and for hooks that read a checkpoint, values are gathered in rank 0's memory.
        """
        save = trainer.save_checkpoint

        @wraps(save)
        def streamed(filepath: Any, weights_only: bool | None = None, storage_options: Any | None = None) -> None:
            is_file = storage_options is None and "://" not in str(filepath)
            hooked = has_hook("on_save_checkpoint", trainer.lightning_module, of_lightning=True)
            are_whole = self.tensor_parallel_size == 1  # else all ranks of a tensor group gather
            self._streams = are_whole and is_file and not hooked and type(self.checkpoint_io) is WholeCheckpointIO
            try:
                save(filepath, weights_only, storage_options)
            finally:
                self._streams = False

        trainer.save_checkpoint = streamed  # type: ignore[method-assign]
        undo.callback(delattr, trainer, "save_checkpoint")

    @override
    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Maps the file into memory, so that a rank reads only the values that it keeps."""
        map_files(self.checkpoint_io)
        return super().load_checkpoint(checkpoint_path, *args, **kwargs)
