"""Proof that ranks may share a batch: no sample of it takes part in the gradients of another one."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning.pytorch.utilities import rank_zero_info, rank_zero_warn

from lightning_multigpu.engine.micro_batches import cloned
from lightning_multigpu.engine.parity import SumCheck
from lightning_multigpu.engine.step_state import seed_of, set_random_state
from lightning_multigpu.strategies.steps.dry_run import rounding, unlogged_loss, without_trace

if TYPE_CHECKING:
    from lightning_multigpu.strategies.base import MultiGPUStrategy


class ShareProof:
    """Compares the gradients of two halves of each rank's batch with those of the batch; see :class:`.SumCheck`.

    ``num_steps`` batches of a fit are compared, each before it trains.
    """

    def __init__(self, strategy: MultiGPUStrategy, num_steps: int) -> None:
        self._strategy, self.num_steps = strategy, num_steps
        self._left = 0

    def begin_fit(self) -> None:
        """Compares the next batches again."""
        self._left = self.num_steps

    def begin_step(self, batch: Any, *others: Any) -> None:
        """Called with the arguments of ``training_step`` before it; while batches are compared, a collective.

        Raises:
            ValueError: on all ranks, the gradients do not add up.
        """
        if not self._left:
            return
        self._left -= 1
        option = f"verify_steps={self.num_steps}"
        if not self._strategy._module.automatic_optimization:
            self._left = 0
            rank_zero_warn(f"{option} has no effect in manual optimization, where only the step knows its losses")
            return
        coupling, line = self._find(batch, *others)
        if coupling:
            raise ValueError(
                f"training_step couples the samples of a batch: {coupling}. Each rank has a share of the global batch, "
                "so that training follows other gradients than one device's. A contrastive loss over all ranks gathers "
                "their embeddings with self.all_gather(embeddings, sync_grads=True); mix samples in the loader's "
                "collate_fn. verify_steps=0 accepts the difference, and is needed after all_gather too"
            )
        if line:
            rank_zero_info(f"{option}: {line}.")

    def _find(self, batch: Any, *others: Any) -> tuple[str, str]:
        strategy = self._strategy
        module, plugin, scale = strategy._module, strategy.precision_plugin, strategy._loss_scaler_scale()

        def run(parts: Sequence[Any], weights: Sequence[float], seed: int) -> None:
            for number, part in enumerate(map(cloned, parts)):
                set_random_state(seed_of(seed, number, strategy.global_rank), strategy.root_device)
                loss = unlogged_loss(plugin, module, partial(module.training_step, part, *others))
                if loss is not None:
                    (loss * (weights[number] * scale)).backward()

        traceless, reduction = partial(without_trace, module), strategy.feed.loss_reduction
        rtol = rounding(module, strategy.root_device).gradients
        check = SumCheck(module, run, traceless, reduction, rtol, strategy.gather_objects)
        with strategy.block_backward_sync(), strategy.meter.unrecorded(), strategy.steps.recomputing():
            return check.find(batch, 2)
