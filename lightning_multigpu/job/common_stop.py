"""A stop of one rank stops all: Lightning's loops read ``trainer.should_stop`` on each rank by itself.

The ranks agree after each batch, after each validation in an epoch, and after each epoch, so that all stop at the
place where one has asked for it. The agreement after a batch takes the place of Lightning's broadcast of SIGTERM at
each batch: :class:`~lightning_multigpu.job.run_signals.RunSignals` brings signals to all ranks.
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lightning_multigpu._lightning_internals import FitLoop, TrainingEpochLoop


def share_stops(trainer: pl.Trainer) -> None:
    """Lets the ranks of ``trainer`` agree on ``should_stop``; a loop of the user's own stays as it is."""
    loop = trainer.fit_loop
    if type(loop.epoch_loop) is TrainingEpochLoop:
        loop.epoch_loop.__class__ = _EpochLoop
    if type(loop) is FitLoop:
        loop.__class__ = _FitLoop


def _agree(trainer: pl.Trainer) -> None:
    trainer.should_stop = trainer.strategy.reduce_boolean_decision(trainer.should_stop, all=False)


class _EpochLoop(TrainingEpochLoop):
    _validates = False

    @override
    def on_advance_end(self, data_fetcher: Any) -> None:
        strategy: Any = self.trainer.strategy
        self.trainer.should_stop = strategy.agree_after_batch(self.trainer.should_stop)
        super().on_advance_end(data_fetcher)
        if self._validates:
            _agree(self.trainer)

    @override
    def _should_check_val_fx(self, data_fetcher: Any) -> bool:
        self._validates = super()._should_check_val_fx(data_fetcher)
        return self._validates

    @override
    def _broadcast_sigterm_tensor(self) -> None:
        if self.trainer.received_sigterm:  # on all ranks, which have acted on it together
            super()._broadcast_sigterm_tensor()


class _FitLoop(FitLoop):
    @override
    def on_advance_end(self) -> None:
        super().on_advance_end()
        _agree(self.trainer)
