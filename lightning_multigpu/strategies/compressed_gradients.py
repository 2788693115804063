"""What a run has to do for compressed gradients beside moving them: end steps, follow the loss scale, save, report."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import Precision
from torch import Tensor

from lightning_multigpu.communication.compression import Piece
from lightning_multigpu.communication.hierarchy import HierarchicalAllReduce

CHECKPOINT_KEY = "lightning_multigpu"
"""The one key that a checkpoint has beside those of Lightning; stock Lightning leaves it alone."""


def pieces_of(module: LightningModule) -> dict[Tensor, Piece]:
    """By parameter, what a compressor has to know of it."""
    return {parameter: Piece(name, tuple(parameter.shape)) for name, parameter in module.named_parameters()}


class CompressedGradients:
    """The error feedback of an all-reduce that compresses, over the steps of a run and from one run to the next.

    Args:
        all_reduce: compresses.
        precision: may have a loss scaler, in whose unit gradients come.
    """

    def __init__(self, all_reduce: HierarchicalAllReduce, precision: Precision) -> None:
        self._all_reduce = all_reduce
        self._precision = precision
        self._loss_scale: float | None = None

    def end_step(self) -> None:
        """After each optimizer step; errors are kept in the unit of the next step's gradients. A collective."""
        self._all_reduce.end_step()
        scaler = getattr(self._precision, "scaler", None)
        scale = 1.0 if scaler is None else float(scaler.get_scale())
        if self._loss_scale is not None and self._loss_scale != scale:
            self._all_reduce.scale_errors(scale / self._loss_scale)
        self._loss_scale = scale

    def save(self, checkpoint: dict[str, Any], module: LightningModule) -> None:
        """Adds the state to a checkpoint, the same on all ranks. A collective."""
        shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
        state = {**self._all_reduce.state_dict(shapes), "loss_scale": self._loss_scale}
        checkpoint[CHECKPOINT_KEY] = {"compression": state}

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """Goes on from the state of a checkpoint, if it has one."""
        state = checkpoint.get(CHECKPOINT_KEY, {}).get("compression")
        if state is not None:
            self._all_reduce.load_state_dict(state)
            self._loss_scale = state["loss_scale"]

    def summary(self) -> str:
        """What it saved and what it lost, in one line."""
        compressed = self._all_reduce.compressed
        assert compressed is not None
        statistics = compressed.statistics
        return (
            f"{compressed.compressor!r}: {statistics.ratio:.2f} times fewer bytes between hosts, "
            f"relative error of what was sent {statistics.relative_error:.2%}"
        )
