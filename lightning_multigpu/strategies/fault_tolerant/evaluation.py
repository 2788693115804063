"""Validation and tests that are repeated where a rank is lost in them."""

from __future__ import annotations

import copy
import sys
from typing import Any

import lightning.pytorch as pl
from typing_extensions import override

from lightning_multigpu._lightning_internals import EvaluationLoop
from lightning_multigpu.strategies.fault_tolerant.members import Members, MembersLostError, is_of_gloo


def repeat_after_losses(trainer: pl.Trainer) -> None:
    """Lets the loops of ``trainer`` repeat a validation or a test; a loop of the user's own stays as it is."""
    for loop in (trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop, trainer.test_loop):
        if type(loop) is EvaluationLoop:
            loop.__class__ = _EvaluationLoop


class _EvaluationLoop(EvaluationLoop):
    _generation = 0

    @override
    def run(self) -> Any:
        trainer = self.trainer
        strategy: Any = trainer.strategy
        members: Members = strategy.members
        callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
        strategy._settle_values()
        while True:
            before = [copy.deepcopy(callback.state_dict()) for callback in callbacks]
            if members.generation != self._generation:
                self._combined_loader, self._generation = None, members.generation  # other shares, and their number
            strategy.evaluates = True
            try:
                return super().run()
            except RuntimeError as error:
                if not (members.has_joined and (isinstance(error, MembersLostError) or is_of_gloo(error))):
                    raise
                failure = error
            finally:
                strategy.evaluates = False
            members.split(failure)
            members.meet(shrinks=True)
            sys.stderr.write(f"ft_ddp: rank {members.rank} repeats the {self._stage.value}, whose ranks have changed\n")
            for callback, state in zip(callbacks, before, strict=True):
                if state:
                    callback.load_state_dict(state)
            self._module_mode.restore(trainer.lightning_module)
            self._results.reset()
