"""Random states, batches, predictions and metrics of ranks that train on the same batch, as in a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from lightning.fabric.utilities import move_data_to_device
from lightning.pytorch.callbacks import BasePredictionWriter
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torchmetrics import Metric

from lightning_multigpu.communication.metered_group import MeteredGroup
from lightning_multigpu.engine.micro_batches import checksum_of
from lightning_multigpu.engine.step_state import random_states, restore_random_states

if TYPE_CHECKING:
    import lightning.pytorch as pl


def builds_layers_later(module: pl.LightningModule) -> bool:
    """Whether the module may build layers after the launch, so that they cannot be checked before it."""
    return is_overridden("configure_model", module) or is_overridden("setup", module)


def checksum_before_transfer(batch: Any, module: pl.LightningModule) -> int | None:
    """The checksum of a batch in the host's memory, which need not wait for a device.

    None if the module or its datamodule has code around the transfer of batches to the device, which may change them.
    """
    owners = [each for each in (module, getattr(module.trainer, "datamodule", None)) if each is not None]
    hooks = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
    has_hooks = any(is_overridden(hook, owner) for owner in owners for hook in hooks)
    return None if has_hooks else checksum_of(batch)


def share_random_states(device: torch.device, broadcast: Callable[[Any], Any]) -> None:
    """Gives every rank one rank's random states: torch's, Python's, NumPy's, and its GPU's.

    ``broadcast`` returns that rank's object on every rank; a collective.
    """
    restore_random_states(broadcast(random_states(device)), device)


def are_equal(checksum: int, peers: MeteredGroup) -> bool:
    """Whether all ranks have the same checksum; a collective."""
    return len(set(peers.gather_tensor(torch.tensor([checksum])).flatten().tolist())) == 1


def same_batch(batch: Any, peers: MeteredGroup, device: torch.device, checksum: int | None = None) -> Any:
    """The batch on the device; the first rank's if ranks have loaded different batches. A collective."""
    if are_equal(checksum_of(batch) if checksum is None else checksum, peers):
        return batch
    batch = peers.broadcast_object(batch, peers.first_rank)
    return move_data_to_device(batch, device)  # without the module's hooks, which have seen the other batch


def write_no_predictions(trainer: pl.Trainer, undo: ExitStack) -> None:
    """Keeps prediction writers of this rank from writing what another rank of its group writes, until ``undo``."""
    for writer in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(writer, BasePredictionWriter):
            for method in ("write_on_batch_end", "write_on_epoch_end"):
                setattr(writer, method, lambda *args: None)
                undo.callback(delattr, writer, method)


def gather_metrics_by(
    gather: Callable[[Tensor, Any], list[Tensor]], module: pl.LightningModule, undo: ExitStack
) -> None:
    """Makes metrics of the module gather their states by ``gather``, which gets a state and a group, until ``undo``."""
    for metric in module.modules():
        if isinstance(metric, Metric) and metric.dist_sync_fn is None:
            metric.dist_sync_fn = gather
            undo.callback(setattr, metric, "dist_sync_fn", None)
