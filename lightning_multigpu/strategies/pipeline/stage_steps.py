"""The user's steps on one stage: training in micro-batches, evaluation of whole batches, and what they log."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.plugins import Precision
from torch import Tensor
from torch.nn import Parameter
from torchmetrics import Metric

from lightning_multigpu.engine.batch_size import leading_size
from lightning_multigpu.engine.data_parallel.agreement import LossReduction
from lightning_multigpu.engine.pipeline.stages.micro_batches import (
    combined_loss,
    first_part,
    num_micro_batches_of,
    signature_of,
    split_batch,
    weights_of,
)
from lightning_multigpu.engine.pipeline.stages.runner import PipelineRunner
from lightning_multigpu.strategies.hook_detection import has_hook
from lightning_multigpu.strategies.pipeline.dry_run import unlogged_loss, without_trace
from lightning_multigpu.strategies.pipeline.loss_probe import LossProbe
from lightning_multigpu.strategies.pipeline.stage_logs import StageLogs, combined
from lightning_multigpu.strategies.pipeline.stage_storage import StageStorage, packed, unpacked

if TYPE_CHECKING:
    import lightning.pytorch as pl


class StageSteps:
    """Runs this stage's part of the module's steps; every stage of the pipeline has to do so at the same time.

    Args:
        module: the user's module.
        runner: runs it through the pipeline.
        plugin: the Trainer's precision plugin.
        seed: of the run; the same on all stages, different for every pipeline.
        parameters: gives all of the module, which it may find faster than the module does.

    Attributes:
        running: the user's step is being run, so that only the stages up to this one are at this place.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        runner: PipelineRunner,
        plugin: Precision,
        seed: int,
        parameters: Callable[[], Sequence[Parameter]],
    ) -> None:
        self.runner = runner
        self._parameters = parameters
        self.running = False
        self._module = module
        self._plugin = plugin
        self._logs = StageLogs(module)
        self._storage = StageStorage(module)
        self._seed = seed
        self._evaluated = 0
        self._probe: LossProbe | None = LossProbe(module, seed)
        self._metrics = [part for part in module.modules() if isinstance(part, Metric)]

    def train(
        self,
        batch: Any,
        others: Sequence[Any],
        *,
        multiplier: float,
        num_micro_batches: int,
        loss_reduction: LossReduction,
    ) -> dict[str, Any]:
        """Forward and backward of a batch; what the step logs is logged once, on every stage.

        Args:
            batch: the same on every stage.
            others: further arguments of ``training_step``.
            multiplier: of the loss, before its backward.
            num_micro_batches: as many, if the batch has that many samples.
            loss_reduction: what the losses of the micro-batches count for.

        Returns:
            What the step would have returned for the whole batch: on the last stage, and where a hook looks at it, the
            loss and all further outputs, elsewhere the loss.

        Raises:
            ValueError: the losses of the first batch's micro-batches do not add up to its own.
        """
        parts = split_batch(batch, num_micro_batches_of(batch, num_micro_batches))
        weights = weights_of(parts, loss_reduction)
        if self._probe is not None and len(parts) > 1:
            probe, self._probe = self._probe, None
            loss_of = functools.partial(self._loss_forward_only, others)
            probe.check(self.runner, batch, loss_of, weights, loss_reduction=loss_reduction)
        records: list[Any] = [[] for _ in parts]
        outputs: list[dict[str, Any]] = [{} for _ in parts]

        def step(micro_batch: int) -> Any:
            with self._plugin.train_step_context(), self._logs.recording(pass_on=False) as records[micro_batch]:
                output = self._called("training_step", parts[micro_batch], *others)
            if not isinstance(output, Mapping):
                return output
            outputs[micro_batch] = {key: value for key, value in output.items() if key != "loss"}
            return output.get("loss")

        # Parameters that are frozen or not decide whether what travels has a gradient.
        trainable = sum(parameter.requires_grad for parameter in self._parameters())
        kinds = [(signature_of(part), trainable) for part in parts]
        trainer = self._module.trainer
        seed = (self._seed, 0, trainer.current_epoch, trainer.fit_loop.batch_idx)
        losses = self.runner.train(step, kinds, [weight * multiplier for weight in weights], seed)
        message: Any = None
        further: dict[str, Any] = {}
        if self.runner.is_last:
            samples = [float(leading_size(part) or 1) for part in parts]
            means = weights if callable(loss_reduction) else samples
            further = _merged(outputs)
            loss = combined_loss(losses, weights)
            message = (
                combined(records, means, losses, weights),
                loss,
                trainer.should_stop,
                self._packed(further or None, "on_train_batch_end"),
            )
        replayed, loss, stops, package = self.runner.line.from_last(message)
        trainer.should_stop = trainer.should_stop or stops  # a step may ask for the end of training
        self._logs.replay(replayed, "training_step")
        return {"loss": loss, **self._unpacked(package, further)}

    @contextmanager
    def dry_run(self, batch: Any, others: Sequence[Any], num_micro_batches: int) -> Iterator[Callable[[], Any]]:
        """Gives the user's step on the batch's first micro-batch, for measurements; it returns the loss.

        At the end of the block random states, the module's buffers and attributes, and what the step has asked of the
        Trainer are what they were. Nothing is logged.
        """
        part = first_part(batch, num_micro_batches)

        def step() -> Any:
            return unlogged_loss(self._plugin, self._logs, lambda: self._called("training_step", part, *others))

        with without_trace(self._module):
            yield step

    @contextmanager
    def evaluation_dry_run(self, hook: str, *args: Any, **kwargs: Any) -> Iterator[Callable[[], Any]]:
        """The same for a step that :meth:`evaluate` runs, on the whole batch; it returns what the step returns."""

        def step() -> Any:
            with self._logs.recording(pass_on=False):
                return self._called(hook, *args, **kwargs)

        with without_trace(self._module):
            yield step

    def evaluate(self, hook: str, *args: Any, **kwargs: Any) -> Any:
        """Runs ``validation_step``, ``test_step`` or ``predict_step`` on a whole batch.

        Returns:
            What the step returned, on the last stage and, but for ``predict_step``, where a hook looks at it; None
            elsewhere.
        """
        self._evaluated += 1
        seed = (self._seed, 1, self._module.trainer.global_step, self._evaluated)
        with self._logs.recording(pass_on=self.runner.is_last) as records:
            _, output = self.runner.evaluate(lambda: self._called(hook, *args, **kwargs), seed)
        if hook != "predict_step":
            batch_end = f"on_{hook.removesuffix('_step')}_batch_end"
            message = (records, self._packed(output, batch_end)) if self.runner.is_last else None
            replayed, package = self.runner.line.from_last(message)
            if not self.runner.is_last:
                self._logs.replay(replayed, hook)
            output = self._unpacked(package, output)
        self.runner.line.finish()
        return output

    def share_storage(self) -> None:
        """Gives all stages what steps have kept in the module on the last one; a collective of the pipeline."""
        self._storage.share(self.runner.line, is_last=self.runner.is_last)

    def _packed(self, output: Any, hook: str) -> bytes | None:
        """The output of a step for the other stages; None where no ``hook`` of theirs looks at it."""
        looked_at = output is not None and has_hook(hook, self._module)
        return packed(output, f"what {hook} is given") if looked_at else None

    def _unpacked(self, package: bytes | None, own: Any) -> Any:
        return own if package is None or self.runner.is_last else unpacked(package, self._module.device)

    def _loss_forward_only(self, others: Sequence[Any], batch: Any, seed: tuple[int, ...]) -> Any:
        """The loss of a batch or what was raised behind the layers, on the last stage; nothing is logged."""

        def step() -> Any:
            try:
                return self._called("training_step", batch, *others)
            except Exception as error:
                if not self.runner.is_behind_chain:
                    raise
                return error

        with self._plugin.train_step_context(), self._logs.recording(pass_on=False):
            _, output = self.runner.evaluate(step, seed)
        return output.get("loss") if isinstance(output, Mapping) else output

    def _called(self, hook: str, *args: Any, **kwargs: Any) -> Any:
        self.running = True
        try:
            with self._storage.noting():
                return getattr(self._module, hook)(*args, **kwargs)
        finally:
            self.running = False
            # What a metric computed within the step, it computed on this stage alone: it must do so again with all.
            for metric in self._metrics:
                metric._computed = None


def _merged(outputs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The further outputs of the micro-batches as those of one batch: tensors along their samples, else lists."""
    merged: dict[str, Any] = {}
    for key in outputs[0]:
        values = [output[key] for output in outputs]
        tensors = all(isinstance(value, Tensor) and value.ndim > 0 for value in values)
        merged[key] = torch.cat(values).detach() if tensors else values
    return merged
