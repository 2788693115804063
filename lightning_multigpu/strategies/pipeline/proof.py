"""Proof that a pipeline's first steps equal those of one device, and the causes where they do not.

Before the first step, two steps on the first batch run twice: on the last stage's rank, which has the whole module
meanwhile, and on the stages. Their gradients must be equal. The second step shows what a step keeps for the next one,
and what weights that begin as zeros or as equals hide: noise moves them. Where a batch is cut into micro-batches, these
must give the same in turn as each by itself, two of them what both together give (:func:`.coupling`), and all losses
must add up to that of the batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_multigpu._lightning_internals import attributes_of_lightning
from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.micro_batches import cloned, disagreement, signature_of, split_batch
from lightning_multigpu.engine.parity import (
    CAUSES,
    Gradients,
    are_finite,
    coupling,
    difference,
    lack_of_memory,
    outcome,
    outcomes_differ,
    preserved_weights,
    take_gradients,
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
    from lightning_multigpu.strategies.pipeline.running_pipeline import RunningPipeline, TrainingBatch

_NOT_PROVED = "Whether the first steps equal those of one device is not proved"
_RANDOM_LOSSES = (
    "Whether the losses of micro-batches add up to the loss of their batch cannot be told: the step draws random "
    "numbers in evaluation mode too, or does not return a loss there"
)


class Proof:
    """Compares steps of a pipeline on a batch with those of one device; its methods are collectives of the pipeline.

    A proof leaves no trace in the module, in random states, in logs and in the batch; changes that the step makes to
    objects of libraries stay. Its messages have arrived when a method ends, since the run may end there.

    Attributes:
        line: for the user, about what cannot be told; empty if there is nothing.
    """

    def __init__(self, pipeline: RunningPipeline, batch: TrainingBatch) -> None:
        self._pipeline, self._model, self._batch = pipeline, pipeline.model, batch
        self._module, self.line, self._kept = self._model.module, "", ""
        self._parts = split_batch(batch.whole, len(batch.parts))  # again: a step may change lists in its micro-batch
        self._kinds = [signature_of(part) for part in self._parts]
        self._num_steps, self._rtol = pipeline.options.verify_steps, rounding(self._module, self._model.device)
        self._traceless = partial(preserved_state, self._module)
        self._expected: list[Gradients] = []
        self._trains = True
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
            # Gradients of three ways, and values to restore twice; and here the two of the device.
            lack = lack or lack_of_memory(what, (5 if is_gpu else 7) * total, torch.device("cpu"))
            self.line = model.group.from_last(lack and f"{_NOT_PROVED}: {lack}")
            if not self.line:
                with model.ownership.whole_at_last():
                    if model.is_last:
                        try:
                            error = self._compute()
                        except Exception as problem:  # whatever the user's code raises: the stages will run it, too
                            how = f"the whole module does not run ({type(problem).__name__}: {problem})"
                            self.line = f"{_NOT_PROVED}: {how}"
                    told = model.group.from_last((error, self.line, self._trains))
                    error, self.line, self._trains = told
            model.group.finish()
        if error:
            raise ValueError(error)

    def _compute(self) -> str:
        """Computes the gradients of the steps; returns how micro-batches do not give what the batch gives."""
        pipeline, module, cause, found, error = self._pipeline, self._module, "", "", ""
        if len(self._parts) > 1:
            whole, run = self._batch.whole, partial(self._run, (pipeline.seed, 5))
            given = self._traceless, pipeline.loss_reduction, self._rtol
            cause, found = coupling(module, whole, len(self._parts), run, *given, in_turn=True)
            error = "" if cause == "kept" else self._check_losses()
        changed: dict[str, Any] = {}
        with preserved_weights(module) as move:
            if pipeline.tensor_axis is not None:  # whose ranks draw random numbers of their own for parts of tensors
                one, other = (outcome(module, [self._runs(number)], self._traceless) for number in (0, -1))
                self._trains = not outcomes_differ(one, other, self._rtol)
            for number in range(self._num_steps):
                if number == 1:
                    move()
                before = self._marks()
                for each in self._runs(number):
                    each()
                self._expected.append(take_gradients(module))
                changed |= {name: None for name, mark in self._marks().items() if before.get(name) != mark}
        self._kept = ", ".join(changed) or "a value in an object that is no module, such as a generator"
        if not are_finite(*self._expected):
            self.line = f"{_NOT_PROVED}: gradients of the first batch are not finite"
        elif cause in CAUSES and not error:
            return CAUSES[cause].format(found=found, kept=self._kept, parts=pipeline.num_micro_batches)
        self.line = self.line or found
        return error

    def _runs(self, number: int) -> list[Callable[[], Any]]:
        """The micro-batches of a step on the whole module, with the order and the random numbers of the stages."""
        order: Any = range(len(self._parts))
        if number == 0:  # the first micro-batch of each shape runs before all others
            order = sorted(order, key=lambda n: self._kinds.index(self._kinds[n]) != n)
        seed, weights = self._pipeline.seed, self._batch.weights
        return [partial(self._run, (seed, 3, number, n), self._parts[n], weights[n]) for n in order]

    def _run(self, seed: tuple[int, ...], part: Any, weight: float = 0.0) -> Any:
        """The loss of a part; with a ``weight``, the factor of the loss, it adds to the gradients."""
        self._seed = seed
        if not self._trains:
            self._module.eval()
        step = partial(self._pipeline.loss_of, cloned(part), self._batch.others)
        with self._layers.installed():
            loss = self._layers.run((0, len(self._model.chain)), step, None)[1]
        if weight and isinstance(loss, Tensor):
            (loss * (weight * self._batch.multiplier)).backward()  # type: ignore[no-untyped-call]
        return loss

    def _check_losses(self) -> str:
        """How the losses of all micro-batches do not add up; notes where random numbers leave it open.

        They are computed forward only and in evaluation mode: dropout draws other numbers for a whole batch than for
        its parts, and BatchNorm's statistics of a part differ from those of the batch, as documented.
        """

        def losses_of(attempt: int) -> list[float]:
            found = []
            for part in (self._batch.whole, *self._parts):
                with self._traceless(), preserved_values(self._module.parameters()), torch.no_grad():
                    self._module.eval()
                    found.append(float(self._run((self._pipeline.seed, 2, attempt), part)))
            return found

        with suppress(Exception):  # whatever the user's code raises: a step may work in training mode only
            losses = losses_of(0)
            error = disagreement(losses, self._parts, self._pipeline.loss_reduction, self._rtol / 10)
            if not error or not math.isfinite(losses[0]):
                return ""
            if repr(losses) == repr(losses_of(1)):  # to the bit, NaN too
                return error
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
        model, pipeline, module, error = self._model, self._pipeline, self._module, ""
        axis = pipeline.tensor_axis
        runner = pipeline.new_runner(Recorder(model.meter, model.device))

        def run(part: int) -> Any:
            with without_differentiation():
                return pipeline.loss_of(cloned(self._parts[part]), self._batch.others)

        weights = preserved_weights(module, rank=0 if axis is None else axis.group.rank)
        with without_trace(module), model.meter.unrecorded(), weights as move:
            if not self._trains:
                module.eval()
            for number in range(self._num_steps):
                if number == 1:
                    move()
                runner.train(run, self._kinds, self._batch.scales, (pipeline.seed, 3, number))
                pipeline.clipping.sums.sum_gradients(model.ownership.common())
                found = self._gathered()
                differs = difference(found, self._expected[number], self._rtol) if model.is_last else ""
                if differs and not error:
                    cause = CAUSES["stages"].format(kept=self._kept)
                    cause = cause if axis is None else f"{CAUSES['split']}. Or: {cause}"
                    where = f"other gradients than one device's: in a dry run of step {number + 1} {differs}"
                    error = f"training would follow {where}. {cause}"
            error = model.group.from_last(error)
        model.group.finish()
        if error:
            raise PipelineError(error)

    def _gathered(self) -> Gradients:
        """On the last stage the gradients of all, in host memory; a collective. They travel as weights do."""
        self._model.group.finish()
        trained = {name: p for name, p in self._module.named_parameters() if p.requires_grad}
        zeros = {n: torch.zeros_like(p.data) for n, p in trained.items() if not isinstance(p, Placeholder)}
        return self._model.whole_state_dict({**trained, **zeros, **take_gradients(self._module)}, streams=False)


def form_of(loss: Tensor) -> set[tuple[int, str, str]]:
    """The pairs of successive operations that have computed ``loss``, of 2000 at most, with their distances from it.

    Distances of 8 and more count as 8, so that loops of varying length make few forms.
    """
    form: set[tuple[int, str, str]] = set()
    distances: dict[Any, int] = {loss.grad_fn: 0}
    nodes = list(distances)
    for node in nodes:  # which grows
        for other, _ in () if node is None else node.next_functions:
            if other is not None:
                form.add((distances[node], node.name(), other.name()))
                if other not in distances and len(nodes) < 2000:
                    distances[other] = min(distances[node] + 1, 8)
                    nodes.append(other)
    return form
