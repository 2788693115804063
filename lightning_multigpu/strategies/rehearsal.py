"""Steps of the user's that are run to find something out, and that nobody is to notice."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.utilities.seed import isolate_rng

from lightning_multigpu.engine.pipeline.kept_state import kept_state

if TYPE_CHECKING:
    import lightning.pytorch as pl


@contextmanager
def without_trace(module: pl.LightningModule) -> Iterator[None]:
    """Puts back at the end of the block what steps change: random states, the module's buffers and attributes, and what
    they have asked of the Trainer.

    Loggers of the Trainer do nothing meanwhile, and nothing is warned of: a step that is trained on warns by itself.
    What steps do to other objects stays.
    """
    trainer = module.trainer
    stops, loggers = trainer.should_stop, trainer.loggers
    on_gpu = module.device.type == "cuda"
    with isolate_rng(include_cuda=on_gpu), kept_state(module), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.loggers = [DummyLogger() for _ in loggers]
        try:
            yield
        finally:
            trainer.should_stop, trainer.loggers = stops, loggers
