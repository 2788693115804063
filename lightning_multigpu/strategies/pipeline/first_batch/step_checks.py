"""Checks of a pipeline's steps by dry runs: of losses, gradients and kept state."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.nn import Parameter

from lightning_multigpu.engine.batch_size import leading_size
from lightning_multigpu.engine.data_parallel.agreement import LossReduction
from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.gradient_check import GradientCheck, Verdict
from lightning_multigpu.engine.micro_batches import (
    cloned,
    disagreement,
    first_part,
    relative_tolerance,
    signature_of,
    split_batch,
)
from lightning_multigpu.engine.pipeline.stages.runner import PipelineRunner
from lightning_multigpu.engine.step_state import without_differentiation
from lightning_multigpu.strategies.steps.dry_run import gradient_rtol, precision_dtypes, unlogged_loss, without_trace

if TYPE_CHECKING:
    import lightning.pytorch as pl

    from lightning_multigpu.strategies.pipeline.running_pipeline import RunningPipeline


class StepChecks:
    """Checks of a training step before it trains. Every method is a collective of the pipeline.

    A check leaves no trace in the module, in random states, in logs and in the batch; changes that the step makes to
    other objects stay. Its messages have arrived when it ends, since the run may end there.

    Args:
        pipeline: whose steps are checked.
        runner: runs the stages.
    """

    def __init__(self, pipeline: RunningPipeline, runner: PipelineRunner) -> None:
        self._pipeline, self._model, self._runner = pipeline, pipeline.model, runner

    def _loss_of(self, part: Any, others: Sequence[Any], seed: tuple[int, ...], *, scan: bool = False) -> Any:
        """The loss of the step, forward only, on the last stage; or the exception that it raised after the layers."""

        def step() -> Any:
            try:
                with self._pipeline.kept.step(scan=scan):
                    return self._pipeline.call("training_step", part, *others)
            except Exception as error:
                if not self._runner.is_past_chain:
                    raise
                return error

        plugin, module = self._pipeline.strategy.precision_plugin, self._model.module
        return unlogged_loss(plugin, module, lambda: self._runner.evaluate(step, (self._pipeline.seed, 2, *seed))[1])

    def check_losses(self, batch: Any, others: Sequence[Any], weights: Sequence[float]) -> None:
        """Checks that the losses of micro-batches add up to the loss of their batch.

        Both are computed forward only and in evaluation mode: dropout draws other numbers for a whole batch than for
        its parts, and BatchNorm's statistics of a part differ from those of the batch, as documented. A step may draw
        further random numbers itself: if losses that do not add up change with another seed, training goes on.

        Args:
            batch: the same on every stage.
            others: further arguments of ``training_step``.
            weights: the weights of the micro-batches' losses.

        Raises:
            ValueError: on every stage, if the losses do not add up.
        """
        model = self._model

        def losses_of(attempt: int) -> list[Any]:
            # Copies, since a step may change its batch.
            batches = [copy.deepcopy(batch), *split_batch(copy.deepcopy(batch), len(weights))]
            losses = [self._loss_of(part, others, (attempt, number)) for number, part in enumerate(batches)]
            model.group.finish()
            return losses

        with without_trace(model.module), torch.no_grad():
            model.module.eval()
            losses = losses_of(0)
            found = None
            if model.is_last:
                samples = [leading_size(part) or 1 for part in split_batch(batch, len(weights))]
                found = _disagreement(model.module, losses, weights, samples, self._pipeline.loss_reduction)
            found = model.group.from_last(found)
            if found is None:
                return
            again = losses_of(1)
            fatal = model.group.from_last(model.is_last and _all_equal(losses, again))
            model.group.finish()
        if fatal:
            raise ValueError(found)
        rank_zero_info(
            "Whether the losses of micro-batches add up to the loss of their batch cannot be told: the step draws "
            "random numbers in evaluation mode too, or does not return a loss there."
        )

    def check_kept_state(self, batch: Any, others: Sequence[Any], recompute: Collection[int]) -> None:
        """Checks that no step depends on values that an earlier step has kept elsewhere.

        Nothing is to be checked if stages run steps and layers once a batch. Else a step runs twice on the same
        micro-batch with the same random numbers, forward only and in the modules' own modes. The kept state gets the
        places that steps of all ranks change.

        Args:
            batch: the same on every stage.
            others: further arguments of ``training_step``.
            recompute: the layers that run again in backward.

        Raises:
            PipelineError: on every stage, if a stage reads an old value, or if a step that runs several times a batch,
                or a layer that runs again in backward, depends on a value that it has kept.
        """
        model, kept, repeats = self._model, self._pipeline.kept, self._why_steps_repeat()
        if repeats is None and not recompute:
            return
        part = first_part(batch, self._pipeline.num_micro_batches)
        with model.meter.unrecorded():
            with without_trace(model.module), torch.no_grad():
                first = self._loss_of(copy.deepcopy(part), others, (2,), scan=True)
                model.group.finish()
                for places in model.stages.gather_objects(list(kept.changes)):
                    kept.learn(places)
                with kept.watching():
                    second = self._loss_of(copy.deepcopy(part), others, (2,))
                model.group.finish()
            depends = _is_loss(first) and _is_loss(second) and not _same(first, second)
            recomputed = {part for index in recompute for part in model.chain.layers[index].modules()}
            found = model.stages.gather_objects((kept.changes, kept.reads, depends, kept.changes_within(recomputed)))
        all_changes, all_reads, all_depend, all_recompute = zip(*found, strict=True)
        for position, reads in enumerate(all_reads):
            message = kept.old_value(all_changes[-1], reads, model.modules_of(position))
            if message is not None:
                raise PipelineError(message)
        if not any(all_depend):
            return
        if kept.all_are_buffers(all_reads):
            repeats = None  # check_gradients reports it
        if any(all_recompute):
            repeats = "layers under activation_checkpointing run again in backward. Leave out those that keep values"
        if repeats is not None:
            raise PipelineError(
                f"the loss of a step depends on values that the previous step has kept ({kept.suspects(all_reads)}), "
                f"and {repeats}"
            )

    def _why_steps_repeat(self) -> str | None:
        """Why stages run the step several times a batch, and the fix; None if they run it once."""
        count, stages = self._pipeline.num_micro_batches, self._pipeline.options.num_stages_of_rank
        if count > 1:
            return (
                f"with num_micro_batches={count} every stage runs the step as often for a batch. Change it in "
                "on_train_batch_start or on_train_batch_end(outputs, batch, batch_idx), which every stage calls once a "
                "batch, or pass num_micro_batches=1"
            )
        if stages > 1:
            return (
                f"with {stages} stages a rank runs the beginning of the step as often. Change it in "
                "on_train_batch_start, or use schedule='1f1b'"
            )
        return None

    def check_gradients(
        self, batch: Any, others: Sequence[Any], num_parts: int, runner: PipelineRunner, multiplier: float
    ) -> None:
        """Checks that the gradients of two micro-batches add up to those of both together.

        Layers other than dropout and BatchNorm are in training mode.

        Args:
            batch: the same on every stage.
            others: further arguments of ``training_step``.
            num_parts: the micro-batches of the batch.
            runner: runs the stages, and records nothing.
            multiplier: the factor of the loss before its backward.

        Raises:
            ValueError: on every stage, if the gradients do not add up.
        """
        pipeline, model, trainer = self._pipeline, self._model, self._model.module.trainer

        def run(parts: Sequence[Any], weights: Sequence[float], seed: int) -> None:
            def step(number: int) -> Any:
                with without_differentiation():
                    return pipeline.loss_of(cloned(parts[number]), others)

            seeds = (pipeline.seed, 3, seed, trainer.current_epoch, trainer.fit_loop.batch_idx)
            runner.train(step, [signature_of(part) for part in parts], [w * multiplier for w in weights], seeds)
            model.group.finish()

        check = GradientCheck(
            model.module,
            {
                held.name: held.tensor
                for held in model.ownership.holdings
                if isinstance(held.tensor, Parameter) and model.ownership.position in held.holders
            },
            run,
            traceless=lambda: without_trace(model.module),
            gather=model.stages.gather_objects if pipeline.tensor_axis is None else pipeline.tensor_axis.gather,
            loss_reduction=pipeline.loss_reduction,
            rtol=gradient_rtol(model.module, model.device),
        )
        finding = check.find(batch, num_parts)
        model.group.finish()
        if finding is None or finding.verdict == Verdict.UNCLEAR:
            rank_zero_info(
                "Whether the gradients of micro-batches add up to those of their batch cannot be told: "
                + ("its micro-batches do not count." if finding is None else "some of them are not finite.")
            )
        elif finding.verdict == Verdict.STATEFUL:
            rank_zero_info(
                "The module keeps values that each micro-batch changes and the next one trains with (as spectral norm, "
                "codebooks and queues do). One device changes them once a batch, and trains a little differently."
            )
        elif finding.verdict == Verdict.COUPLED:
            raise ValueError(
                f"training_step couples the samples of a batch: {finding.describe()}. Training in micro-batches would "
                "follow other gradients than one device's, as with the balancing loss of a mixture of experts, a "
                "contrastive loss, or mixup within the step. Pass num_micro_batches=1; mix samples in "
                "on_after_batch_transfer, which gets whole batches; or accept the difference by check_loss=False"
            )


def _same(loss: Tensor, other: Tensor) -> bool:
    """Whether two losses may come from the same computation on one device."""
    eps = torch.finfo(loss.dtype).eps
    rtol = 8 * eps if loss.device.type == "cpu" else relative_tolerance([loss.dtype], loss.device.type)
    return torch.allclose(loss, other, rtol=rtol, atol=0.0, equal_nan=True)


def _disagreement(
    module: pl.LightningModule,
    losses: list[Any],
    weights: Sequence[float],
    samples: Sequence[int],
    loss_reduction: LossReduction,
) -> str | None:
    """The message about losses that do not add up; None if they do."""
    if not all(map(_is_loss, losses)):
        return "no loss"
    whole, *rest = (float(loss) for loss in losses)
    if not torch.isfinite(losses[0]).all():
        return None
    dtypes = {loss.dtype for loss in losses} | {p.dtype for p in module.parameters() if p.is_floating_point()}
    dtypes |= precision_dtypes(module)
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
