"""Dry runs of the user's steps: runs that measure or check something and leave no trace."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_multigpu.engine.pipeline.stages.step_state import preserved_state
from lightning_multigpu.strategies.pipeline.stage_logs import StageLogs

if TYPE_CHECKING:
    import lightning.pytorch as pl


@contextmanager
def without_trace(module: pl.LightningModule) -> Iterator[None]:
    """Restores at the end of the block random states, the module's buffers and attributes, and ``should_stop``.

    Within the block the Trainer's loggers do nothing, and warnings are silenced: the step that is trained on repeats
    them. Changes of other objects stay.
    """
    trainer = module.trainer
    stops, loggers = trainer.should_stop, trainer.loggers
    on_gpu = module.device.type == "cuda"
    with isolate_rng(include_cuda=on_gpu), preserved_state(module), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.loggers = [DummyLogger() for _ in loggers]
        try:
            yield
        finally:
            trainer.should_stop, trainer.loggers = stops, loggers


def unlogged_loss(plugin: Precision, logs: StageLogs, call: Callable[[], Any]) -> Any:
    """The loss that ``call``, which runs a training step, returns; the precision is the Trainer's, logs are dropped."""
    with plugin.train_step_context(), logs.recording(pass_on=False):
        output = call()
    return output.get("loss") if isinstance(output, Mapping) else output
