"""Proof that the first steps equal those of one device, and the causes where they do not.

Before the first step, two steps on the first batch run twice: on the stages, and in one process that has a copy of the
whole module. Their gradients must be equal. The second step shows what a step keeps for the next one. Where a batch is
cut into micro-batches, these must add up to it::

    stages      step, step                            gradients ---+
                                                                   equal, on the first and on the second step
    one device  step, step                            gradients ---+
                parts against the whole batch: changes of parameters, what a part keeps for the next one, losses, and
                gradients: a loss must not couple samples
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.nn import Parameter
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric

from lightning_multigpu._lightning_internals import attributes_of_lightning
from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.micro_batches import cloned, disagreement, moved, signature_of, split_batch
from lightning_multigpu.engine.parity import (
    Gradients,
    SumCheck,
    are_finite,
    difference,
    lack_of_memory,
    moved_weights,
    rounding_of,
    take_gradients,
    without_gradients,
)
from lightning_multigpu.engine.pipeline.measuring.recorder import Recorder
from lightning_multigpu.engine.pipeline.stages.layer_interception import LayerInterception
from lightning_multigpu.engine.step_state import (
    is_users,
    preserved_random_state,
    preserved_state,
    preserved_values,
    seed_of,
    set_random_state,
    without_differentiation,
)
from lightning_multigpu.strategies.pipeline.last_stage_outputs import mark
from lightning_multigpu.strategies.steps.dry_run import rounding, unlogged_loss, without_trace

if TYPE_CHECKING:
    from lightning_multigpu.strategies.pipeline.running_pipeline import RunningPipeline, TrainingBatch

_NOT_PROVED = "Whether the first steps equal those of one device is not proved"
_ONCE_A_BATCH = (
    "Change it in on_train_batch_start or on_train_batch_end(outputs, batch, batch_idx), which every stage calls once "
    "a batch, with the loss of the whole batch"
)
_CAUSES = {
    "again": "training_step or a layer changes {kept}: layers under activation_checkpointing run again in backward, "
    f"after the change. Leave out those that keep values. {_ONCE_A_BATCH}",
    "first step": "Layers keep a value for the rest of the step, as an attribute or by a hook (router logits, for "
    "example), which other stages do not get; the step changes {kept}. Let the layer return the value with its "
    f"output, and the later layers pass it on, as in x, own = layer(x, own). {_ONCE_A_BATCH}",
    "stages": "training_step changes {kept} for the next step, and with {stages} stages a rank runs the beginning of "
    f"the step as often. {_ONCE_A_BATCH}, or use schedule='1f1b'",
    "next step": "training_step changes {kept} for the next step where only one stage runs it, so that other stages "
    f"use an old value. {_ONCE_A_BATCH}; a value that only one layer uses can also be kept in that layer",
    "coupled": "Training in micro-batches would follow other gradients than one device's, as with the balancing loss "
    "of a mixture of experts, a contrastive loss, or mixup within the step. Pass num_micro_batches=1; mix samples in "
    "on_after_batch_transfer, which gets whole batches; or accept the difference by verify_steps=0",
    "own changes": "the step changes {kept} by itself, and with num_micro_batches={parts} these follow from "
    "micro-batches, where one device takes the whole batch: as where a layer sets itself up from its first batch "
    "(ActNorm, scales of a quantised layer), or a step updates an average of weights. Pass num_micro_batches=1; set "
    "the layer up before the fit, by a forward pass of the whole first batch; or make the change in "
    "on_train_batch_start, which comes once a batch",
    "kept": "the loss of a step depends on values that the previous step has kept ({kept}), and with "
    f"num_micro_batches={{parts}} every stage runs the step as often for a batch. {_ONCE_A_BATCH}, or pass "
    "num_micro_batches=1",
}
_RANDOM_LOSSES = (
    "Whether the losses of micro-batches add up to the loss of their batch cannot be told: the step draws random "
    "numbers in evaluation mode too, or does not return a loss there"
)
_COPIES = 4
"""Of the model, that have to fit into the memory: weights, their moved values, and the gradients of both ways."""
_SHARED = (Callback, LightningDataModule, DataLoader, Dataset)


class Proof:
    """Compares steps of a pipeline on a batch with those of one device.

    A proof leaves no trace in the module, in random states, in logs and in the batch; changes that the step makes to
    objects of libraries stay. Its messages have arrived when it ends, since the run may end there. ``one`` is, on the
    last stage, the copy of the module, before it was split over a tensor group.
    """

    def __init__(self, pipeline: RunningPipeline, one: WholeCopy | None, batch: TrainingBatch) -> None:
        self._pipeline, self._model = pipeline, pipeline.model
        self._one, self._batch, self._others = one, batch, batch.others
        self._parts = split_batch(batch.whole, len(batch.parts))  # again: a step may change lists in its micro-batch
        self._runner = pipeline.new_runner(Recorder(self._model.meter, self._model.device))
        self._rtol = rounding(self._model.module, self._model.device).gradients

    def run(self) -> str:
        """Ends the run, on every stage, if its steps would not equal those of one device; a collective.

        Returns:
            A line for the user about what cannot be told; empty if there is nothing.

        Raises:
            PipelineError: steps differ, or depend on values that an earlier step has kept.
            ValueError: losses or gradients of micro-batches do not add up, or micro-batches set a parameter otherwise.
        """
        group, module = self._model.group, self._model.module
        trained = [(parameter, parameter.requires_grad) for parameter in module.parameters()]
        with without_trace(module), self._model.meter.unrecorded():
            error, line = self._compare_steps()
            if self._one is not None and len(self._parts) > 1 and not (error or line):
                try:
                    line = self._compare_parts(self._one)
                except (PipelineError, ValueError) as problem:  # for all stages
                    error = problem
            error, line = group.from_last((error, line))
            group.finish()
        for parameter, is_trained in trained:  # a step may freeze layers
            parameter.requires_grad_(is_trained)
        if error is not None:
            raise error
        return line and f"{line}."

    # The stages and one device

    def _compare_steps(self) -> tuple[Exception | None, str]:
        """Compares steps; returns how they differ, and why that cannot be told; a collective, also if they differ."""
        model, one, axis = self._model, self._one, self._pipeline.tensor_axis
        held: dict[str, Any] = {
            holding.name: holding.tensor
            for holding in model.ownership.holdings
            if model.ownership.position in holding.holders and holding.is_parameter
        }
        moved = moved_weights(held, rank=0 if axis is None else axis.group.rank)
        found: tuple[Exception | None, str] = None, ""
        # What the steps leave in the copy must not hide from the next checks how a layer is set up by its first batch.
        with nullcontext() if one is None else preserved_state(one.module):
            with preserved_values(held.values()), moved, without_gradients(held.values()):
                self._load()
                for step in range(self._pipeline.options.verify_steps):
                    gradients = self._of_stages(step)
                    if one is not None:
                        found = self._compare_step(one, gradients, step)
                    model.group.finish()
                    found = model.group.from_last(found)
                    if any(found):
                        break
            self._load()
        return found

    def _load(self) -> None:
        state = self._pipeline.whole_weights(self._model.module.state_dict(), streams=False)
        if self._one is not None:
            self._one.load(state)

    def _seed(self, step: int) -> tuple[int, ...]:
        trainer = self._model.module.trainer
        return (self._pipeline.seed, 3, step, trainer.current_epoch, trainer.fit_loop.batch_idx)

    def _of_stages(self, step: int) -> Gradients:
        """On the last stage all gradients of a step, in host memory, zeros where there is none; a collective.

        They travel as weights do, in the place of the weights. Parameters have none then.
        """
        pipeline, model = self._pipeline, self._model

        def run(number: int) -> Any:
            with without_differentiation():
                return pipeline.loss_of(cloned(self._parts[number]), self._others)

        self._runner.train(run, [signature_of(part) for part in self._parts], self._batch.scales, self._seed(step))
        pipeline.agreement.sums.sum_gradients(model.ownership.common())
        model.group.finish()
        held = model.ownership.held()
        weights = [parameter.data for parameter in held]
        try:
            for parameter in held:
                gradient, parameter.grad = parameter.grad, None
                found = torch.zeros_like(parameter.data) if gradient is None else gradient.detach()
                parameter.data = found.to_dense() if found.is_sparse else found
            state = pipeline.whole_weights(model.module.state_dict(), streams=False)
        finally:
            for parameter, value in zip(held, weights, strict=True):
                parameter.data = value
        if not model.is_last:
            return {}
        return {name: value.detach().to("cpu", copy=True) for name, value in state.items() if isinstance(value, Tensor)}

    def _compare_step(self, one: WholeCopy, found: Gradients, step: int) -> tuple[Exception | None, str]:
        """How gradients of a step differ from those of one device, and why that cannot be told."""

        def run(seed: int) -> Gradients:
            one.run(self._parts, self._others, self._seed(seed), self._batch.scales, self._runner.order)
            return take_gradients(one.module)

        try:
            if self._pipeline.tensor_axis is not None:
                with preserved_state(one.module):
                    draws = difference(run(step), run(-1 - step), self._rtol)
                if draws is not None:
                    why = "the step draws random numbers, of which ranks with parts of a layer draw their own"
                    return None, f"{_NOT_PROVED}: {why}"
            expected = run(step)
        except Exception as error:  # whatever the user's code raises: the stages have run it
            return None, f"{_NOT_PROVED}: a copy of the module does not run ({type(error).__name__}: {error})"
        # Frozen parameters, perhaps of integers, and buffers have no gradients.
        trained = {name for name, parameter in one.parameters.items() if parameter.requires_grad}
        found = {name: gradient for name, gradient in found.items() if name in trained or name in expected}
        if not are_finite(found, expected):
            return None, f"{_NOT_PROVED}: gradients of the first batch are not finite"
        differs = difference(found, expected, self._rtol)
        if differs is None:
            return None, ""
        stages = self._pipeline.options.num_stages_of_rank
        cause = "first step" if step == 0 else "stages" if stages > 1 else "next step"
        cause = _CAUSES["again" if self._pipeline.recompute else cause].format(kept=one.kept, stages=stages)
        number = ("first", "second", "third")[min(step, 2)]
        text = "training would follow other gradients than one device's: in a dry run of the"
        return PipelineError(f"{text} {number} step those of {differs}. {cause}"), ""

    # The parts of a batch and the batch, on one device

    def _compare_parts(self, one: WholeCopy) -> str:
        """A line for the user about what cannot be told, or nothing; raises as :meth:`run`; no collective."""
        # Two weights that begin as equals have an average that does not change; one that begins at 0 may be set up.
        for moves in (nullcontext(), moved_weights(one.parameters)):
            with moves:
                self._check_changes(one)
        try:
            return self._check_sums(one)
        except ValueError as error:
            problem = error
            with preserved_state(one.module), suppress(Exception):
                self._losses(one, [self._batch.whole], 6)  # which sets the module up
                self._check_sums(one)
                problem = self._own_changes(f"values that it keeps ({one.kept})")
            raise problem from None

    def _losses(self, one: WholeCopy, parts: Sequence[Any], *seed: int) -> list[Tensor]:
        """The losses of parts in turn, forward only; empty if the step needs gradients, or returns no loss."""
        try:
            with torch.no_grad():
                losses = one.run(parts, self._others, (self._pipeline.seed, *seed))
        except Exception:  # whatever the user's code raises
            return []
        are_losses = all(isinstance(each, Tensor) and each.numel() == 1 and each.is_floating_point() for each in losses)
        return losses if are_losses else []

    def _check_changes(self, one: WholeCopy) -> None:
        """Checks that micro-batches leave parameters with the values that their batch leaves.

        Where a step applies the same change again (a norm, a limit), parts and the batch leave the same values.
        """
        left = []
        for parts in ([], [self._batch.whole], self._parts):
            with preserved_state(one.module), preserved_values(one.parameters.values()):
                if len(self._losses(one, parts, 6)) < len(parts):
                    return
                left.append({name: _wide(parameter) for name, parameter in one.parameters.items()})
        before, whole, apart = left
        for name, value in whole.items():
            limit = 1e-2 * _max(value - before[name]) + _rounding(one.parameters[name]) * _max(value)
            if not torch.allclose(apart[name], value, rtol=0.0, atol=limit, equal_nan=True):
                owner = one.module.get_submodule(name.rpartition(".")[0])
                raise self._own_changes(f"parameter {name} of {type(owner).__name__}")

    def _own_changes(self, what: str) -> ValueError:
        return ValueError(_CAUSES["own changes"].format(kept=what, parts=self._pipeline.num_micro_batches))

    def _check_sums(self, one: WholeCopy) -> str:
        """As :meth:`_compare_parts`, from the state that the copy has."""
        self._check_kept(one)
        is_random = self._check_losses(one)
        pipeline, batch = self._pipeline, self._batch

        def run(parts: Sequence[Any], weights: Sequence[float], seed: int) -> None:
            one.run(parts, self._others, (pipeline.seed, 5, seed), [weight * batch.multiplier for weight in weights])

        traceless = partial(preserved_state, one.module)
        check = SumCheck(one.module, run, traceless, pipeline.loss_reduction, self._rtol)
        coupling, line = check.find(batch.whole, len(self._parts))
        if coupling:
            raise ValueError(f"training_step couples the samples of a batch: {coupling}. {_CAUSES['coupled']}")
        return _RANDOM_LOSSES if is_random else line

    def _check_kept(self, one: WholeCopy) -> None:
        """Checks that the loss of a step depends on no value but buffers that the step before has kept."""
        buffers = [buffer.clone() for buffer in one.module.buffers()]
        with preserved_state(one.module):
            first = self._losses(one, self._parts[:1], 4)
            with torch.no_grad():
                for buffer, value in zip(one.module.buffers(), buffers, strict=True):
                    buffer.copy_(value)
            second = self._losses(one, self._parts[:1], 4)
        for a, b in zip(first, second, strict=False):  # both, or a step that needs gradients, as a penalty on them does
            rtol = _rounding(a) if a.device.type == "cpu" else rounding_of([a.dtype], a.device).losses
            if not torch.allclose(a, b, rtol=rtol, atol=0.0, equal_nan=True):
                parts = self._pipeline.num_micro_batches
                raise PipelineError(_CAUSES["kept"].format(kept=one.kept, parts=parts))

    def _check_losses(self, one: WholeCopy) -> bool:
        """Checks that losses add up; returns whether random numbers leave it open.

        They are computed forward only and in evaluation mode: dropout draws other numbers for a whole batch than for
        its parts, and BatchNorm's statistics of a part differ from those of the batch, as documented.
        """

        def losses_of(attempt: int) -> list[Tensor]:
            found = []
            for number, part in enumerate((self._batch.whole, *self._parts)):
                with preserved_state(one.module):
                    one.module.eval()
                    found += self._losses(one, [part], 2, attempt, number)
            return found

        losses = losses_of(0)
        if len(losses) <= len(self._parts):  # a step may work in training mode only
            return True
        rtol = rounding(self._model.module, losses[0].device, *(loss.dtype for loss in losses)).losses
        found, weights = [*map(float, losses)], self._batch.weights
        message = disagreement(found, self._parts, weights, self._pipeline.loss_reduction, rtol)
        if message is None or not math.isfinite(found[0]):
            return False
        if repr(found) == repr([*map(float, losses_of(1))]):  # to the bit, NaN too
            raise ValueError(message)
        return True


def _wide(tensor: Tensor) -> Tensor:
    """A copy in host memory, in the widest dtype."""
    return tensor.detach().to("cpu", torch.complex128 if tensor.is_complex() else torch.float64, copy=True)


def _max(tensor: Tensor) -> float:
    return float(tensor.abs().nan_to_num().max()) if tensor.numel() else 0.0


def _rounding(tensor: Tensor) -> float:
    """The relative difference of values of the same computation on a CPU."""
    return 8 * torch.finfo(tensor.dtype).eps if tensor.is_floating_point() or tensor.is_complex() else 0.0


def copied(pipeline: RunningPipeline) -> tuple[bool, WholeCopy | None]:
    """Whether the whole module has been copied on the last stage, and there the copy; a collective of the pipeline.

    Where that cannot be done, a line says why, and nothing is proved.
    """
    model, one = pipeline.model, None
    if pipeline.tensor_axis is not None and pipeline.tensor_axis.is_split:
        return False, None
    with model.meter.unrecorded():
        needed = _COPIES * sum(holding.tensor.nbytes for holding in model.ownership.holdings)
        problem = lack_of_memory("a copy of the model with its gradients", needed, model.device)
        problem = model.group.from_last(problem)  # in whose memory it would be
        if not problem:
            values = {id(holding.tensor): value for holding, value in model.ownership.values_of_others()}
            if model.is_last:
                try:
                    one = WholeCopy(pipeline, values)
                except Exception as error:  # whatever an object in the module raises
                    problem = f"the module cannot be copied ({type(error).__name__}: {error})"
            problem = model.group.from_last(problem)
    if problem:
        rank_zero_info(f"{_NOT_PROVED}: {problem}.")
    return not problem, one


class WholeCopy:
    """A copy of the user's module, on the device of the last stage.

    It draws the same random numbers as the stages do for equal micro-batches. It logs nothing. ``values`` are, by
    ``id``, those of tensors that this rank lacks.

    Attributes:
        changed: attributes and buffers that its steps have changed, as users write them.

    Raises:
        Exception: an object in the module cannot be copied.
    """

    def __init__(self, pipeline: RunningPipeline, values: Mapping[int, Tensor]) -> None:
        module, device, chain = pipeline.model.module, pipeline.model.device, pipeline.model.chain
        trainer = module.trainer
        known = (trainer, trainer.strategy, pipeline, chain.tensor_group, *trainer.callbacks)  # type: ignore[attr-defined]
        memo: dict[int, Any] = {id(each): each for each in known}
        for holding in pipeline.model.ownership.holdings:
            if id(holding.tensor) in values:
                value = values[id(holding.tensor)].to(device)
                memo[id(holding.tensor)] = (
                    Parameter(value, holding.tensor.requires_grad) if holding.is_parameter else value
                )
        for value in (value for part in module.modules() for value in vars(part).values()):
            if isinstance(value, Tensor) and value.grad_fn is not None:
                memo[id(value)] = value.detach().clone()
            elif isinstance(value, _SHARED):
                memo[id(value)] = value
        self.module, self._chain = copy.deepcopy((module, chain), memo)
        self.module.trainer = trainer
        self.parameters = dict(self.module.named_parameters())
        self.changed: dict[str, None] = {}
        self._pipeline, self._device = pipeline, device
        self._seed: tuple[int, ...] = ()
        self._layers = LayerInterception(self._chain, self._begin_part)

    def free(self) -> None:
        """Gives back the memory: references in cycles keep the copy until Python's garbage collector runs."""
        for tensor in (*self.parameters.values(), *self.module.buffers()):
            tensor.grad, tensor.data = None, tensor.new_empty(0)

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Takes values of parameters and buffers, by their names."""
        own = {**self.parameters, **dict(self.module.named_buffers())}
        with torch.no_grad():
            for name, tensor in own.items():
                if name in state:
                    tensor.copy_(state[name])

    def run(
        self,
        parts: Sequence[Any],
        others: Sequence[Any],
        seed: tuple[int, ...],
        scales: Sequence[float] | None = None,
        order: Sequence[int] = (),
    ) -> list[Any]:
        """The losses of copies of parts, in turn; random numbers follow from ``seed`` and the number of the part.

        With ``scales``, the factors of the losses, it also runs backward, and adds to the gradients.
        """
        pipeline, module, before = self._pipeline, self.module, self._marks()
        losses = []
        for number in order or range(len(parts)):
            self._seed = (*seed, number)
            part = moved(cloned(parts[number]), 0, pipeline.options.batch_dim)
            call = partial(module.training_step, part, *others)
            step = partial(unlogged_loss, pipeline.strategy.precision_plugin, module, call)
            # Lightning drops gradients that a step computes by itself.
            own, draws = without_gradients(self.parameters.values()), preserved_random_state(self._device)
            pipeline.in_step = True  # a metric gathers from the last stages, which all run this
            try:
                with own, draws, self._layers.installed():
                    loss = self._layers.run((0, len(self._chain)), step, None)[1]
            finally:
                pipeline.in_step = False
            if scales is not None and scales[number] and isinstance(loss, Tensor):
                (loss * scales[number]).backward()  # type: ignore[no-untyped-call]
            losses.append(loss.detach() if isinstance(loss, Tensor) else loss)
        after = self._marks()
        self.changed |= {name: None for name, found in after.items() if name not in before or before[name] != found}
        return losses

    @property
    def kept(self) -> str:
        """What its steps have changed, for a message."""
        return ", ".join(self.changed) or "a value in an object that is no module, such as a generator"

    def _begin_part(self, part: int) -> None:
        set_random_state(seed_of(*self._seed, part), self._device)

    def _marks(self) -> dict[str, Any]:
        """What shows a change of attributes and buffers; torch's own modules keep statistics, and torchmetrics states.

        An object of another class is looked into.
        """
        marks = {}
        for name, part in self.module.named_modules():
            if isinstance(part, Metric) or type(part).__module__.startswith("torch."):
                continue
            for key, value in {**vars(part), **part._buffers}.items():
                if key not in attributes_of_lightning() and key != "forward":
                    inside = vars(value) if is_users(value) else value
                    marks[".".join(filter(None, ("self", name, key)))] = mark(inside)
        return marks
