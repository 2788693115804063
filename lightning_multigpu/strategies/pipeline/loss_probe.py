"""Before a first batch is trained on in micro-batches: do their losses add up to the loss of the batch?"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor

from lightning_multigpu.engine.batch_size import leading_size
from lightning_multigpu.engine.data_parallel.agreement import LossReduction
from lightning_multigpu.engine.pipeline.stages.micro_batches import disagreement, relative_tolerance, split_batch
from lightning_multigpu.engine.pipeline.stages.runner import PipelineRunner
from lightning_multigpu.strategies.pipeline.dry_run import without_trace

if TYPE_CHECKING:
    import lightning.pytorch as pl

LossOf = Callable[[Any, tuple[int, ...]], Any]


class LossProbe:
    """Compares the loss of a batch as a whole with that of its micro-batches, both forward only through the pipeline.

    All modules are in evaluation mode meanwhile: dropout draws other numbers for a whole batch than for its parts, and
    BatchNorm's statistics of a part are not those of the whole, which is known and documented. What is left of the
    random numbers (noise that a step draws by itself) is found by running both again from another seed: where that
    changes a loss, nothing can be said, and training goes on.

    The probe leaves no trace in the module, in random states, in what is logged and in the batch; what the step does
    to other objects stays done.

    Args:
        module: the user's module.
        seed: of the run.
    """

    def __init__(self, module: pl.LightningModule, seed: int) -> None:
        self._module = module
        self._seed = seed

    def check(
        self,
        runner: PipelineRunner,
        batch: Any,
        loss_of: LossOf,
        weights: Sequence[float],
        *,
        loss_reduction: LossReduction,
    ) -> None:
        """A collective of the pipeline.

        Args:
            runner: of the pipeline.
            batch: the same on every stage.
            loss_of: the loss that the training step returns for a (micro-)batch and a seed, on the last stage; an
                exception that it raised behind the layers.
            weights: of the losses of the micro-batches that the batch is cut into.
            loss_reduction: where the weights come from, for the message.

        Raises:
            ValueError: on every stage, if the losses do not add up to the loss of the whole batch.
        """
        with without_trace(self._module), torch.no_grad():
            self._module.eval()
            losses = self._losses(runner, batch, loss_of, len(weights), attempt=0)
            found = None
            if runner.is_last:
                samples = [leading_size(part) or 1 for part in split_batch(batch, len(weights))]
                found = self._found(losses, weights, samples, loss_reduction)
            found = runner.line.from_last(found)
            if found is None:
                return
            again = self._losses(runner, batch, loss_of, len(weights), attempt=1)
            fatal = runner.line.from_last(runner.is_last and _all_equal(losses, again))
            runner.line.finish()  # what follows may be the end
        if fatal:
            raise ValueError(found)
        rank_zero_info(
            "Whether the losses of micro-batches add up to the loss of their batch cannot be told: the step draws "
            "random numbers in evaluation mode too, or does not return a loss there."
        )

    def _losses(
        self, runner: PipelineRunner, batch: Any, loss_of: LossOf, num_parts: int, *, attempt: int
    ) -> list[Any]:
        """The loss of the batch and those of its parts, all computed from copies: a step may change its batch."""
        batches = [copy.deepcopy(batch), *split_batch(copy.deepcopy(batch), num_parts)]
        losses = [loss_of(part, (self._seed, 2, attempt, number)) for number, part in enumerate(batches)]
        runner.line.finish()
        return losses

    def _found(
        self, losses: list[Any], weights: Sequence[float], samples: Sequence[int], loss_reduction: LossReduction
    ) -> str | None:
        """What is wrong, on the last stage; None if nothing is."""
        if not all(map(_is_loss, losses)):
            return "no loss"
        whole, *rest = (float(loss) for loss in losses)
        if not torch.isfinite(losses[0]).all():
            return None
        dtypes = {loss.dtype for loss in losses} | {p.dtype for p in self._module.parameters() if p.is_floating_point()}
        if "16" in self._module.trainer.precision or "transformer" in self._module.trainer.precision:
            dtypes.add(torch.bfloat16)
        rtol = relative_tolerance(sorted(dtypes, key=str), losses[0].device.type)
        given = repr(loss_reduction)
        if callable(loss_reduction):
            given = getattr(loss_reduction, "__name__", "a function")
        return disagreement(whole, rest, weights, samples, given=given, rtol=rtol)


def _is_loss(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()


def _all_equal(losses: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two runs gave the same losses, to the bit."""
    return all(
        _is_loss(a) and _is_loss(b) and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
        for a, b in zip(losses, others, strict=True)
    )
