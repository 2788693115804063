"""Hooks of the user's code are detected, and those of libraries are not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import ModelCheckpoint, TQDMProgressBar

from lightning_multigpu.callbacks import ThroughputMonitor
from lightning_multigpu.strategies.steps.hook_detection import has_hook


class Looking(L.Callback):
    def on_validation_batch_end(self, *args: Any) -> None:
        """Looks at outputs."""


def test_hooks_of_the_user_count_and_those_of_libraries_do_not() -> None:
    module, theirs = L.LightningModule(), [TQDMProgressBar(), ModelCheckpoint(), ThroughputMonitor()]
    for callbacks, hook, expected in (
        (theirs, "on_validation_batch_end", False),
        ([*theirs, Looking()], "on_validation_batch_end", True),
        ([*theirs, Looking()], "on_test_batch_end", False),
    ):
        module._trainer = SimpleNamespace(callbacks=callbacks)  # type: ignore[assignment]
        assert has_hook(hook, module) is expected
