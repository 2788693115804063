"""Proof that a pipeline's first steps equal those of one device, and the causes where they do not.

Before the first step, two steps on the first batch run twice: on the last stage's rank, which has the whole module
meanwhile, and on the stages. Their gradients must be equal. The second step shows what a step keeps for the next one.
Where a batch is cut into micro-batches, two of these must give what both together give (:class:`.PartsCheck`), and the
losses of all of them must add up to that of the batch.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_multigpu._lightning_internals import attributes_of_lightning
from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.micro_batches import cloned, disagreement, signature_of, split_batch
from lightning_multigpu.engine.parity import (
    Gradients,
    PartsCheck,
    are_finite,
    difference,
    lack_of_memory,
    moved_weights,
    take_gradients,
    without_gradients,
)
from lightning_multigpu.engine.pipeline.measuring.recorder import Recorder
from lightning_multigpu.engine.pipeline.stages.layer_interception import LayerInterception
from lightning_multigpu.engine.placeholder import Placeholder
from lightning_multigpu.engine.step_state import (
    is_users,
    preserved_state,
    preserved_values,
    seed_of,
    set_random_state,
    without_differentiation,
)
from lightning_multigpu.strategies.pipeline.last_stage_outputs import mark
from lightning_multigpu.strategies.steps.dry_run import rounding, without_trace

if TYPE_CHECKING:
    from lightning_multigpu.engine.pipeline.stages.runner import PipelineRunner
    from lightning_multigpu.strategies.pipeline.running_pipeline import RunningPipeline, TrainingBatch

_NOT_PROVED = "Whether the first steps equal those of one device is not proved"
_ONCE_A_BATCH = (
    "change it in on_train_batch_start or on_train_batch_end(outputs, batch, batch_idx), which every stage calls once "
    "a batch, with the loss of the whole batch"
)
_CAUSES = {
    "stages": "The step changes {kept}, which other stages do not get, or only as it was. Let a layer return a value "
    "with its output, and the later layers pass it on, as in x, own = layer(x, own); a value that only one layer uses "
    f"can stay in it; {_ONCE_A_BATCH}",
    "looped": "The step changes {kept} for the next one, and with {stages} stages a rank runs the beginning of a step "
    f"as often: {_ONCE_A_BATCH}; or use schedule='1f1b'",
    "again": "The step or a layer changes {kept}, and layers under activation_checkpointing run again in backward, "
    f"after the change: leave out those that keep values, or {_ONCE_A_BATCH}",
    "coupled": "training_step couples the samples of a batch: {found}. Training in micro-batches would follow other "
    "gradients than one device's, as with the balancing loss of a mixture of experts, a contrastive loss, or mixup "
    "within the step. Pass num_micro_batches=1; mix samples in on_after_batch_transfer, which gets whole batches; or "
    "accept the difference by verify_steps=0",
    "kept": "the step changes {kept} by itself, and with num_micro_batches={parts} a micro-batch does so, which finds "
    "what another one has left, where one device takes the whole batch: hidden states, a layer that sets itself up "
    "from its first batch (ActNorm, scales of a quantised layer), an average of weights. Pass num_micro_batches=1; set "
    f"the layer up before the fit, by a forward pass of the whole first batch; or {_ONCE_A_BATCH}",
}
_RANDOM_LOSSES = (
    "Whether the losses of micro-batches add up to the loss of their batch cannot be told: the step draws random "
    "numbers in evaluation mode too, or does not return a loss there"
)
_NOT_FINITE = "gradients of the first batch are not finite"
_DEPTH = 8  # of operations from the loss, in its form
_MOST_NODES = 2000


class Proof:
    """Compares steps of a pipeline on a batch with those of one device; its methods are collectives of the pipeline.

    A proof leaves no trace in the module, in random states, in logs and in the batch; changes that the step makes to
    objects of libraries stay. Its messages have arrived when a method ends, since the run may end there.

    Attributes:
        line: for the user, about what cannot be told; empty if there is nothing.
    """

    def __init__(self, pipeline: RunningPipeline, batch: TrainingBatch) -> None:
        self._pipeline, self._model, self._batch = pipeline, pipeline.model, batch
        self._module, self.line = self._model.module, ""
        self._parts = split_batch(batch.whole, len(batch.parts))  # again: a step may change lists in its micro-batch
        self._kinds = [signature_of(part) for part in self._parts]
        self._rtol = rounding(self._module, self._model.device).gradients
        self._sizes: dict[str, float] = {}
        self._expected: list[Gradients] = []
        self._kept = ""
        self._seed: tuple[int, ...] = ()
        self._layers = LayerInterception(
            self._model.chain,
            lambda part: set_random_state(seed_of(*self._seed, part), self._model.device),
        )

    # On one device

    def compute(self) -> None:
        """Computes the steps on the last stage's rank, which has the whole module meanwhile.

        Raises:
            ValueError: micro-batches do not add up to their batch, or one depends on what another one has kept.
        """
        model, error = self._model, ""
        what, total = "the whole model with its gradients", sum(each.tensor.nbytes for each in model.ownership.holdings)
        is_gpu = model.device.type == "cuda"
        with without_trace(self._module), model.meter.unrecorded():
            lack = lack_of_memory(what, 2 * total, model.device) if is_gpu else ""
            # Gradients of both ways, and values to restore; and here the two of the device.
            lack = lack or lack_of_memory(what, (4 if is_gpu else 6) * total, torch.device("cpu"))
            obstacle = model.group.from_last(lack)
            if not obstacle:
                with model.ownership.whole_at_last():
                    if model.is_last:
                        try:
                            obstacle = self._compute_steps()
                            error = "" if obstacle else self._check_parts()
                        except Exception as problem:  # whatever the user's code raises: the stages will run it, too
                            obstacle = f"the whole module does not run ({type(problem).__name__}: {problem})"
                    told = model.group.from_last((error, obstacle, self.line, self._sizes))
                    error, obstacle, self.line, self._sizes = told
            model.group.finish()
        if error:
            raise ValueError(error)
        if obstacle:
            self.line = f"{_NOT_PROVED}: {obstacle}"

    def _compute_steps(self) -> str:
        """Computes the gradients of the steps; returns why they cannot be compared."""
        module, parameters = self._module, dict(self._module.named_parameters())
        # What the steps leave must not hide from the next checks how a layer is set up by its first batch.
        moved = moved_weights(parameters, sizes=self._sizes)
        with preserved_state(module), moved, without_gradients(parameters.values()):
            if self._pipeline.tensor_axis is not None:
                with preserved_state(module):
                    draws = difference(self._step(0), self._step(-1), self._rtol)
                if draws:
                    return "the step draws random numbers, of which ranks with parts of a layer draw their own"
            before = self._marks()
            self._expected = [self._step(number) for number in range(self._pipeline.options.verify_steps)]
            changed = [name for name, found in self._marks().items() if name not in before or before[name] != found]
        self._kept = ", ".join(changed) or "a value in an object that is no module, such as a generator"
        return "" if are_finite(*self._expected) else _NOT_FINITE

    def _step(self, number: int) -> Gradients:
        """The gradients of a step on the whole module, with the random numbers of the stages."""
        parts: Any = range(len(self._parts))
        if number == 0:  # the stages run the first micro-batch of each shape before all others
            parts = sorted(parts, key=lambda part: self._kinds.index(self._kinds[part]) != part)
        for part in parts:
            self._run(self._parts[part], (*self._seed_of(number), part), self._batch.scales[part])
        return take_gradients(self._module)

    def _seed_of(self, step: int) -> tuple[int, ...]:
        trainer = self._module.trainer
        return (self._pipeline.seed, 3, step, trainer.current_epoch, trainer.fit_loop.batch_idx)

    def _run(self, part: Any, seed: tuple[int, ...], scale: float = 0.0) -> Any:
        """The loss of a part; with a ``scale``, the factor of the loss, it adds to the gradients."""
        self._seed = seed
        step = partial(self._pipeline.loss_of, cloned(part), self._batch.others)
        with self._layers.installed():
            loss = self._layers.run((0, len(self._model.chain)), step, None)[1]
        if scale and isinstance(loss, Tensor):
            (loss * scale).backward()  # type: ignore[no-untyped-call]
        return loss.detach() if isinstance(loss, Tensor) else loss

    def _check_parts(self) -> str:
        """How micro-batches do not give what the batch gives."""
        pipeline, batch, module = self._pipeline, self._batch, self._module
        if len(self._parts) == 1:
            return ""

        def run(part: Any, weight: float, seed: int) -> Any:
            return self._run(part, (pipeline.seed, 5, seed), weight * batch.multiplier)

        traceless = partial(preserved_state, module)
        check = PartsCheck(module, run, traceless, pipeline.loss_reduction, self._rtol, in_turn=True)
        cause, found = check.find(batch.whole, len(self._parts))
        error = "" if cause == "kept" else self._check_losses()
        if cause in _CAUSES and not error:
            return _CAUSES[cause].format(found=found, kept=found or self._kept, parts=pipeline.num_micro_batches)
        self.line = self.line or found
        return error

    def _check_losses(self) -> str:
        """How the losses of all micro-batches do not add up; notes where random numbers leave it open.

        They are computed forward only and in evaluation mode: dropout draws other numbers for a whole batch than for
        its parts, and BatchNorm's statistics of a part differ from those of the batch, as documented.
        """

        def losses_of(attempt: int) -> list[float]:
            found = []
            for number, part in enumerate((self._batch.whole, *self._parts)):
                with preserved_state(self._module), torch.no_grad():
                    self._module.eval()
                    found.append(self._run(part, (self._pipeline.seed, 2, attempt, number)))
            dtypes.update(loss.dtype for loss in found)
            return [float(loss) for loss in found]

        dtypes: set[torch.dtype] = set()
        try:
            with preserved_values(self._module.parameters()):
                losses = losses_of(0)
                rtol = rounding(self._module, self._model.device, *dtypes).losses
                error = disagreement(losses, self._parts, self._batch.weights, self._pipeline.loss_reduction, rtol)
                if error is None or not math.isfinite(losses[0]):
                    return ""
                if repr(losses) == repr(losses_of(1)):  # to the bit, NaN too
                    return error
        except Exception:  # whatever the user's code raises: a step may work in training mode only
            pass
        self.line = _RANDOM_LOSSES
        return ""

    def _marks(self) -> dict[str, Any]:
        """What shows changes of attributes and tensors, except in the modules of torch and in metrics."""
        marks = {}
        for name, part in self._module.named_modules():
            if isinstance(part, Metric) or type(part).__module__.startswith("torch."):
                continue
            for key, value in {**vars(part), **part._buffers, **part._parameters}.items():
                if key not in attributes_of_lightning() and key != "forward":
                    inside = vars(value) if is_users(value) else value
                    marks[".".join(filter(None, ("self", name, key)))] = mark(inside)
        return marks

    # On the stages

    def compare(self) -> None:
        """Runs the steps on the stages, and compares their gradients with those that :meth:`compute` has computed.

        Raises:
            PipelineError: on all stages, they differ.
        """
        if self.line.startswith(_NOT_PROVED):
            return
        model, axis, error = self._model, self._pipeline.tensor_axis, ""
        stages = self._pipeline.options.num_stages_of_rank
        held = {n: p for n, p in self._module.named_parameters() if not isinstance(p, Placeholder)}
        runner = self._pipeline.new_runner(Recorder(model.meter, model.device))
        moved = moved_weights(held, rank=0 if axis is None else axis.group.rank, sizes=self._sizes)
        dry = without_trace(self._module)
        with dry, model.meter.unrecorded(), moved, without_gradients(held.values()):
            for step in range(self._pipeline.options.verify_steps):
                found = self._of_stages(runner, step)
                if not are_finite(found):
                    self.line = f"{_NOT_PROVED}: {_NOT_FINITE}"
                elif model.is_last and (differs := difference(found, self._expected[step], self._rtol)):
                    cause = "looped" if step and stages > 1 else "stages"
                    cause = _CAUSES["again" if self._pipeline.recompute else cause]
                    error = (
                        "training would follow other gradients than one device's: in a dry run of the "
                        f"{('first', 'second', 'third')[min(step, 2)]} step those of {differs}. "
                        f"{cause.format(kept=self._kept, stages=stages)}"
                    )
                model.group.finish()
                error, self.line = model.group.from_last((error, self.line))
                if error or self.line.startswith(_NOT_PROVED):
                    break
        model.group.finish()
        if error:
            raise PipelineError(error)

    def _of_stages(self, runner: PipelineRunner, step: int) -> Gradients:
        """On the last stage all gradients of a step, in host memory, zeros where there is none; a collective.

        They travel as weights do.
        """
        pipeline, model = self._pipeline, self._model

        def run(number: int) -> Any:
            with without_differentiation():
                return pipeline.loss_of(cloned(self._parts[number]), self._batch.others)

        runner.train(run, self._kinds, self._batch.scales, self._seed_of(step))
        pipeline.clipping.sums.sum_gradients(model.ownership.common())
        model.group.finish()
        state: dict[str, Any] = {name: p for name, p in self._module.named_parameters() if p.requires_grad}
        for name, parameter in state.items():
            if not isinstance(parameter, Placeholder):
                gradient, parameter.grad = parameter.grad, None
                value = torch.zeros_like(parameter.data) if gradient is None else gradient.detach()
                state[name] = value.to_dense() if value.is_sparse else value
        found = model.whole_state_dict(state, streams=False)
        return {name: value.detach().cpu() for name, value in found.items()} if model.is_last else {}


class LossForms:
    """Remembers from which operations losses were computed: one with a new term is proved again.

    A form is the set of pairs of successive operations, with their distances from the loss. Distances of 8 and more
    count as 8, so that loops of varying length make few forms. A loss that lacks operations has no new form.
    """

    def __init__(self) -> None:
        self._known: set[tuple[int, str, str]] = set()

    def is_new(self, loss: Tensor) -> bool:
        """Whether the graph of ``loss``, before backward, has a pair of operations that no earlier loss had.

        The first loss has no new one. The graph is followed to the leaves and to the stage's inputs, over at most 2000
        operations.
        """
        found: set[tuple[int, str, str]] = set()
        nodes: list[Any] = [loss.grad_fn]
        seen = set(nodes)
        depth = 0
        while nodes and len(seen) < _MOST_NODES:
            following: list[Any] = []
            for node in nodes:
                name = node.name() if node is not None else ""
                for other, _ in () if node is None else node.next_functions:
                    if other is None:
                        continue
                    found.add((depth, name, other.name()))
                    if other not in seen:
                        seen.add(other)
                        following.append(other)
            nodes, depth = following, min(depth + 1, _DEPTH)
        is_new = bool(self._known) and not found <= self._known
        self._known |= found
        return is_new
