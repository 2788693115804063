"""A run on one device that ends at its first training batch, to look at what is there at that moment."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from typing_extensions import override

from lightning_multigpu._lightning_internals import EndOfRun

if TYPE_CHECKING:
    import lightning.pytorch as pl

Visit = Callable[["FirstBatchStrategy", Any, Sequence[Any]], None]
"""Called with the strategy, the batch on its device, and the further arguments of ``training_step``."""

_SETTINGS: dict[str, Any] = {
    "devices": 1,
    "num_nodes": 1,
    "logger": False,
    "callbacks": [],
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 0,
    "fast_dev_run": False,
    "barebones": False,
    "profiler": None,
}


class FirstBatchStrategy(SingleDeviceStrategy):
    """One device, on which module, optimizers and precision are set up as for training, and nothing is trained.

    Args:
        device: that one.
        visit: called in place of the first ``training_step``.
    """

    def __init__(self, device: torch.device, visit: Visit) -> None:
        super().__init__(device=device)
        self._visit = visit

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        batch, *others = (*args, *kwargs.values())
        self._visit(self, batch, others)
        raise EndOfRun


def visit_first_batch(
    module: pl.LightningModule,
    datamodule: pl.LightningDataModule | None,
    settings: Mapping[str, Any],
    device: torch.device,
    visit: Visit,
) -> None:
    """Runs ``Trainer.fit`` in this process as far as the first training batch.

    Hooks of module and data run as in any fit up to there, and their ``teardown``. There are no callbacks, loggers and
    checkpoints.

    Args:
        module, datamodule: what to fit.
        settings: the Trainer's arguments; those about devices, and about what is written and shown, are replaced.
        device: to compute on.
        visit: called once, or not at all if there is no batch; what it raises ends the run.
    """
    settings = {**settings, **_SETTINGS, "strategy": FirstBatchStrategy(device, visit)}
    with _warnings_only():
        Trainer(**settings).fit(module, datamodule=datamodule)


@contextmanager
def _warnings_only() -> Iterator[None]:
    """Within the block Lightning does not tell what it does, which is another run than the user's."""
    log = logging.getLogger("lightning.pytorch")
    before = log.level
    log.setLevel(logging.WARNING)
    try:
        yield
    finally:
        log.setLevel(before)
