"""Checkpoint files of a strategy: a file is written whole or not at all, and read without a loss of precision."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.fabric.plugins import CheckpointIO, TorchCheckpointIO
from lightning.pytorch.plugins import DoublePrecision
from lightning.pytorch.strategies import Strategy
from typing_extensions import override

from lightning_multigpu.runtime.whole_checkpoint_io import WholeCheckpointIO

CHECKPOINT_KEY = "lightning_multigpu"
"""The only key of a checkpoint besides Lightning's; stock Lightning ignores it."""


class WholeCheckpoints(Strategy):
    """The part of a strategy that writes and reads checkpoint files."""

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
            assert self.lightning_module is not None
            self.lightning_module.double()
        super().load_model_state_dict(checkpoint, strict=strict)
