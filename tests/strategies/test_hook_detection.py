"""Hooks of the user's code are detected, and those of libraries are not."""

from __future__ import annotations

from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar

from lightning_multigpu.callbacks import ThroughputMonitor
from lightning_multigpu.strategies.steps.hook_detection import has_hook


class Looking(L.Callback):
    def on_validation_batch_end(self, *args: Any) -> None:
        """Looks at outputs."""


class Hooked(L.LightningModule):
    def on_validation_batch_end(self, *args: Any) -> None:
        """Looks at outputs."""


def attached(module: L.LightningModule, *callbacks: L.Callback) -> L.LightningModule:
    trainer = L.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, barebones=True)
    trainer.callbacks = list(callbacks)  # type: ignore[attr-defined]
    module.trainer = trainer
    return module


def test_hooks_of_the_user_count_and_those_of_libraries_do_not() -> None:
    theirs = [TQDMProgressBar(), ModelCheckpoint(), ThroughputMonitor()]
    hook = "on_validation_batch_end"
    assert not has_hook(hook, attached(L.LightningModule(), *theirs))
    assert has_hook(hook, attached(L.LightningModule(), *theirs, Looking()))
    assert not has_hook("on_test_batch_end", attached(L.LightningModule(), *theirs, Looking()))
    assert has_hook(hook, attached(Hooked()))
