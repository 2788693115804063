"""The surroundings of the module's training steps on a rank: random numbers, layers that run again, and what counts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

import torch
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed import ReduceOp

from lightning_multigpu._lightning_internals import is_compiled
from lightning_multigpu.engine.activation_checkpointing import Choice, check_choice, recomputing, selected_layers
from lightning_multigpu.engine.data_parallel.agreement import LossReduction
from lightning_multigpu.engine.replaced_attributes import replaced
from lightning_multigpu.engine.step_state import OwnDraws
from lightning_multigpu.strategies.steps.step_logs import uncounted_logs, uncounted_metrics

if TYPE_CHECKING:
    import lightning.pytorch as pl


_SEED = "PL_GLOBAL_SEED"  # which seed_everything sets


class _Feed(Protocol):
    loss_reduction: LossReduction

    @property
    def counts(self) -> bool: ...


class UserSteps:
    """The surroundings of the module's ``training_step`` on this rank, whose batches ``feed`` gives.

    Attributes:
        recomputed: the strategy's ``activation_checkpointing``.
        weighs: whether means over the ranks are weighted as losses are: those of logged values of a step.

    Raises:
        ValueError: ``recomputed`` is no choice of layers.
    """

    def __init__(self, feed: _Feed, recomputed: Choice) -> None:
        check_choice(recomputed)
        self._feed, self.recomputed = feed, recomputed
        self._recomputing: Callable[[], AbstractContextManager[None]] = nullcontext
        self._draws = OwnDraws()
        self.weighs = False

    def choose_layers(self, trainer: pl.Trainer) -> None:
        """Finds the layers of the module that backward computes again.

        Raises:
            ValueError: there is no such layer, or the module is compiled as a whole.
        """
        self._recomputing = nullcontext
        if self.recomputed and trainer.state.fn == TrainerFn.FITTING:
            module = trainer.lightning_module
            if is_compiled(module):
                raise ValueError(
                    f"{type(module).__name__} is compiled as a whole, and activation_checkpointing runs layers by "
                    "themselves: compile each layer with layer.compile(), or leave one of the two out"
                )
            self._recomputing = partial(recomputing, selected_layers(module, self.recomputed), module)

    def recomputing(self) -> AbstractContextManager[None]:
        """Within the block backward computes the layers under ``activation_checkpointing`` again."""
        return self._recomputing()

    @contextmanager
    def running(self, module: pl.LightningModule, device: torch.device, data_rank: int | None) -> Iterator[None]:
        """The block in which the module's ``training_step`` runs on this rank's whole batch.

        ``data_rank`` is None where ranks train on the same batch, and draw the same random numbers.
        """
        # After seed_everything all ranks draw the same, so that a layer that a draw leaves out is left out on all of
        # them, as on one device. Samplers draw outside of the block, since ranks need the same order.
        draws = nullcontext() if not data_rank or _SEED in os.environ else self._draws.drawn(device, data_rank)
        with self.recomputing(), self.weighing(), self._uncounted(module), draws:
            yield

    def weighing(self) -> AbstractContextManager[None]:
        """Within the block :attr:`weighs` is true, unless losses are sums."""
        return replaced(self, weighs=self._feed.loss_reduction != "sum")

    def weighted(self, value: Any, reduce_op: Any, group: Any, weight: float) -> Any:
        """A value that the ranks of the data axis are about to reduce; for a mean, times the weight of this batch."""
        is_mean = self.weighs and group is None and reduce_op in ("mean", "avg", ReduceOp.AVG)
        is_weighed = is_mean and isinstance(value, Tensor) and value.is_floating_point()
        return value * weight if is_weighed else value

    @contextmanager
    def _uncounted(self, module: pl.LightningModule) -> Iterator[None]:
        """Within the block logs and metrics do not count if the present batch is a repeated one."""
        if self._feed.counts:
            yield
            return
        with uncounted_metrics(module), uncounted_logs(module):
            yield
