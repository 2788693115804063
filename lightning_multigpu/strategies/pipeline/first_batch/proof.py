"""Proof that the first steps equal those of one device, and the causes where they do not.

Before the first step, two steps on the first batch run twice: on the stages, and in one process that has a copy of the
whole module. Their gradients must be equal. The second step shows what a step keeps for the next one. Where a batch is
cut into micro-batches, these must add up to it::

    stages      step, step                            gradients ---+
                                                                   equal, on the first and on the second step
    one device  step, step                            gradients ---+
                losses and gradients of parts against those of the batch: a loss must not couple samples
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import psutil
import torch
from lightning.pytorch import Callback, LightningDataModule
from lightning.pytorch.utilities import rank_zero_info
from torch import Tensor
from torch.nn import Parameter
from torch.utils.data import DataLoader, Dataset
from torchmetrics import Metric

from lightning_multigpu._lightning_internals import attributes_of_lightning
from lightning_multigpu.engine.batch_size import leading_size
from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.gradient_check import (
    SMALLEST,
    GradientCheck,
    GradientFinding,
    Gradients,
    Verdict,
    moved_weights,
    norm_of,
    take_gradients,
    without_gradients,
)
from lightning_multigpu.engine.micro_batches import (
    cloned,
    disagreement,
    moved,
    relative_tolerance,
    signature_of,
    split_batch,
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
from lightning_multigpu.planning.numbers import size
from lightning_multigpu.strategies.pipeline.last_stage_outputs import mark
from lightning_multigpu.strategies.steps.dry_run import gradient_rtol, precision_dtypes, unlogged_loss, without_trace

if TYPE_CHECKING:
    from lightning_multigpu.strategies.pipeline.running_pipeline import RunningPipeline, TrainingBatch

_NOT_PROVED = "Whether the first steps equal those of one device is not proved"
_ONCE_A_BATCH = (
    "Change it in on_train_batch_start or on_train_batch_end(outputs, batch, batch_idx), which every stage calls once "
    "a batch, with the loss of the whole batch"
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
        model = self._model
        self._runner = pipeline.new_runner(Recorder(model.meter, model.device))

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
            is_open = self._compare_steps()
            found: tuple[Exception | None, str] = (None, "")
            if self._one is not None and len(self._parts) > 1 and not is_open:
                try:
                    found = None, self._compare_sums(self._one)
                except (PipelineError, ValueError) as problem:  # for all stages
                    found = problem, ""
            error, line = group.from_last(found)
            group.finish()
        for parameter, is_trained in trained:  # a step may freeze layers
            parameter.requires_grad_(is_trained)
        if error is not None:
            raise error
        return line or (is_open and f"{_NOT_PROVED}: {is_open}.")

    # The stages and one device

    def _compare_steps(self) -> str:
        """Compares steps; returns why that cannot be told, or nothing; a collective, also if steps differ."""
        model = self._model
        held = {
            holding.name: holding.tensor
            for holding in model.ownership.holdings
            if model.ownership.position in holding.holders and holding.is_parameter
        }
        trained = {name: parameter for name, parameter in held.items() if parameter.requires_grad}
        found: tuple[str | None, str] = None, ""
        axis = self._pipeline.tensor_axis
        moved = moved_weights(trained, rank=0 if axis is None else axis.group.rank)  # type: ignore[arg-type]
        # What the steps leave in the copy must not hide from the next checks how a layer is set up by its first batch.
        with nullcontext() if self._one is None else preserved_state(self._one.module):
            with preserved_values(held.values()), moved, without_gradients(held.values()):  # type: ignore[arg-type]
                self._load()
                for step in range(self._pipeline.options.verify_steps):
                    self._train(step)
                    gradients = self._whole_gradients()
                    if self._one is not None:
                        found = self._difference(self._one, gradients, step)
                    model.group.finish()
                    problem, is_open = model.group.from_last(found)
                    if problem is not None:
                        raise PipelineError(problem)
                    if is_open:
                        break
            self._load()
        return is_open  # type: ignore[no-any-return]

    def _load(self) -> None:
        state = self._pipeline.whole_weights(self._model.module.state_dict(), streams=False)
        if self._one is not None:
            self._one.load(state)

    def _seed(self, step: int) -> tuple[int, ...]:
        trainer = self._model.module.trainer
        return (self._pipeline.seed, 3, step, trainer.current_epoch, trainer.fit_loop.batch_idx)

    def _train(self, step: int) -> None:
        pipeline, model = self._pipeline, self._model

        def run(number: int) -> Any:
            with without_differentiation():
                return pipeline.loss_of(cloned(self._parts[number]), self._others)

        self._runner.train(run, [signature_of(part) for part in self._parts], self._batch.scales, self._seed(step))
        pipeline.agreement.sums.sum_gradients(model.ownership.common())
        model.group.finish()

    def _whole_gradients(self) -> Gradients:
        """On the last stage all gradients, in host memory, zeros where there is none; parameters have none then.

        They travel as weights do, in the place of the weights.
        """
        held = self._model.ownership.held()
        weights = [parameter.data for parameter in held]
        try:
            for parameter in held:
                gradient, parameter.grad = parameter.grad, None
                found = torch.zeros_like(parameter.data) if gradient is None else gradient.detach()
                parameter.data = found.to_dense() if found.is_sparse else found
            state = self._pipeline.whole_weights(self._model.module.state_dict(), streams=False)
        finally:
            for parameter, value in zip(held, weights, strict=True):
                parameter.data = value
        if not self._model.is_last:
            return {}
        return {name: value.detach().to("cpu", copy=True) for name, value in state.items() if isinstance(value, Tensor)}

    def _difference(self, one: WholeCopy, found: Gradients, step: int) -> tuple[str | None, str]:
        """The message that gradients of a step differ from those of one device, and why that cannot be told."""

        def run(seed: int) -> Gradients:
            one.backward(self._parts, self._others, self._batch.scales, self._seed(seed), self._runner.order)
            return one.taken()

        try:
            if self._pipeline.tensor_axis is not None:  # whose ranks draw numbers of their own
                with preserved_state(one.module):
                    drawn = run(step), run(-1 - step)
                if self._wrong(one, *drawn)[0]:
                    return None, "the step draws random numbers, of which ranks with parts of a layer draw their own"
            expected = run(step)
        except Exception as error:  # whatever the user's code raises: the stages have run it
            return None, f"a copy of the module does not run ({type(error).__name__}: {error})"
        # Frozen parameters, perhaps of integers, and buffers have no gradients.
        found = {name: g for name, g in found.items() if name in expected or one.is_trained(name)}
        if not all(torch.isfinite(gradient).all() for gradient in (*found.values(), *expected.values())):
            return None, "gradients of the first batch are not finite"
        wrong, difference, rtol = self._wrong(one, found, expected)
        if not wrong:
            return None, ""
        number = ("first", "second", "third")[min(step, 2)]
        return (
            f"training would follow other gradients than one device's: in a dry run of the {number} "
            f"step those of {len(wrong)} parameters differ, most of {wrong[0]!r} (relative difference "
            f"{difference:.2g}, rounding explains {rtol:.0e}). {self._cause(one, step)}",
            "",
        )

    def _wrong(self, one: WholeCopy, found: Gradients, expected: Gradients) -> tuple[list[str], float, float]:
        """The parameters whose gradients differ, the most first; its relative difference; what rounding explains."""
        rtol = gradient_rtol(self._model.module, self._model.device)
        norms = {name: max(norm_of(found.get(name)), norm_of(expected.get(name))) for name in {**found, **expected}}
        smallest = SMALLEST * max(norms.values(), default=0.0)
        errors = {
            name: norm_of(found.get(name), expected.get(name)) / max(norms[name], smallest, 1e-300) for name in norms
        }
        wrong = sorted((name for name in errors if errors[name] > rtol), key=lambda name: -errors[name])
        return wrong, errors[wrong[0]] if wrong else 0.0, rtol

    def _cause(self, one: WholeCopy, step: int) -> str:
        kept = ", ".join(one.changed) or "a value in an object that is no module"
        if self._pipeline.recompute:
            return (
                f"training_step or a layer changes {kept}: layers under activation_checkpointing run again in "
                f"backward, after the change. Leave out those that keep values. {_ONCE_A_BATCH}"
            )
        if step == 0:
            return (
                f"Layers keep a value for the rest of the step, as an attribute or by a hook (router logits, for "
                f"example), which other stages do not get; the step changes {kept}. Let the layer return the value "
                f"with its output, and the later layers pass it on, as in x, own = layer(x, own). {_ONCE_A_BATCH}"
            )
        if (stages := self._pipeline.options.num_stages_of_rank) > 1:
            return (
                f"training_step changes {kept} for the next step, and with {stages} stages a rank runs the beginning "
                f"of the step as often. {_ONCE_A_BATCH}, or use schedule='1f1b'"
            )
        return (
            f"training_step changes {kept} for the next step where only one stage runs it, so that other stages use an "
            f"old value. {_ONCE_A_BATCH}; a value that only one layer uses can also be kept in that layer"
        )

    # The parts of a batch and the batch, on one device

    def _compare_sums(self, one: WholeCopy) -> str:
        """A line for the user about what cannot be told, or nothing; raises as :meth:`run`; no collective."""
        self._check_parameters(one)
        with moved_weights({name: p for name, p in one.parameters.items() if p.requires_grad}):
            self._check_parameters(one)  # two weights that begin as equals have an average that does not change
        try:
            return self._sums(one)
        except ValueError:
            if not self._add_up_once_set_up(one):
                raise
        kept = ", ".join(one.changed) or "an object that is no module"
        raise ValueError(self._other_changes(f"values that it keeps ({kept})"))

    def _check_parameters(self, one: WholeCopy) -> None:
        """Checks that micro-batches leave parameters with the values that their batch leaves.

        Where a step applies the same change again (a norm, a limit), parts and the batch leave the same values.
        """
        before = {name: _wide(parameter) for name, parameter in one.parameters.items()}
        left: list[dict[str, Tensor]] = []
        try:
            for parts in ([self._batch.whole], self._parts):
                with preserved_state(one.module), preserved_values(one.parameters.values()), torch.no_grad():
                    for number, part in enumerate(parts):
                        one.loss(part, self._others, (self._pipeline.seed, 6, number))
                    left.append({name: _wide(parameter) for name, parameter in one.parameters.items()})
        except Exception:  # of a step that needs gradients
            return
        whole, apart = left
        names = []
        for name, value in whole.items():
            limit = 1e-2 * _max(value - before[name]) + 8 * _eps(one.parameters[name]) * _max(value)
            if not torch.allclose(apart[name], value, rtol=0.0, atol=limit, equal_nan=True):
                owner = one.module.get_submodule(name.rpartition(".")[0])
                names.append(f"parameter {name} of {type(owner).__name__}")
        if names:
            raise ValueError(self._other_changes(", ".join(names[:3]) + (" and others" if names[3:] else "")))

    def _other_changes(self, what: str) -> str:
        return (
            f"the step changes {what} by itself, and with num_micro_batches={self._pipeline.num_micro_batches} these "
            "follow from micro-batches, where one device takes the whole batch: as where a layer sets itself up from "
            "its first batch (ActNorm, scales of a quantised layer), or a step updates an average of weights. Pass "
            "num_micro_batches=1; set the layer up before the fit, by a forward pass of the whole first batch; or make "
            "the change in on_train_batch_start, which comes once a batch"
        )

    def _add_up_once_set_up(self, one: WholeCopy) -> bool:
        """Whether losses and gradients add up if the module has seen the whole batch: its first one sets it up."""
        try:
            with preserved_state(one.module):
                with torch.no_grad():
                    one.loss(self._batch.whole, self._others, (self._pipeline.seed, 6, 0))
                self._sums(one)
        except Exception:  # of either
            return False
        return True

    def _sums(self, one: WholeCopy) -> str:
        """As :meth:`_compare_sums`, from the state that the copy has."""
        self._check_kept(one)
        is_random = self._check_losses(one)
        finding = self._gradients(one)
        if finding is not None and finding.verdict == Verdict.COUPLED:
            raise ValueError(
                f"training_step couples the samples of a batch: {finding.describe()}. Training in micro-batches would "
                "follow other gradients than one device's, as with the balancing loss of a mixture of experts, a "
                "contrastive loss, or mixup within the step. Pass num_micro_batches=1; mix samples in "
                "on_after_batch_transfer, which gets whole batches; or accept the difference by verify_steps=0"
            )
        if is_random:
            return (
                "Whether the losses of micro-batches add up to the loss of their batch cannot be told: the step draws "
                "random numbers in evaluation mode too, or does not return a loss there."
            )
        if finding is None or finding.verdict == Verdict.UNCLEAR:
            why = "its micro-batches do not count." if finding is None else "some of them are not finite."
            return f"Whether the gradients of micro-batches add up to those of their batch cannot be told: {why}"
        if finding.verdict == Verdict.STATEFUL:
            return (
                "The module keeps values that each micro-batch changes and the next one trains with (as spectral norm, "
                "codebooks and queues do). One device changes them once a batch, and trains a little differently."
            )
        return ""

    def _check_kept(self, one: WholeCopy) -> None:
        """Checks that the loss of a step depends on no value but buffers that the step before has kept."""
        module = one.module
        buffers = [buffer.clone() for buffer in module.buffers()]

        def loss() -> Any:
            return one.loss(self._parts[0], self._others, (self._pipeline.seed, 4))

        try:
            with preserved_state(module), torch.no_grad():
                first = loss()
                for buffer, value in zip(module.buffers(), buffers, strict=True):
                    buffer.copy_(value)
                second = loss()
        except Exception:  # of a step that needs gradients, as a penalty on them does
            return
        if not (_is_loss(first) and _is_loss(second)) or _same(first, second):
            return
        kept = ", ".join(one.changed) or "an object that is no module, such as a generator"
        raise PipelineError(
            f"the loss of a step depends on values that the previous step has kept ({kept}), and with "
            f"num_micro_batches={self._pipeline.num_micro_batches} every stage runs the step as often for a batch. "
            f"{_ONCE_A_BATCH}, or pass num_micro_batches=1"
        )

    def _check_losses(self, one: WholeCopy) -> bool:
        """Checks that losses add up; returns whether random numbers leave it open.

        They are computed forward only and in evaluation mode: dropout draws other numbers for a whole batch than for
        its parts, and BatchNorm's statistics of a part differ from those of the batch, as documented.
        """
        module = one.module

        def losses_of(attempt: int) -> list[Any]:
            found = []
            for number, part in enumerate((self._batch.whole, *self._parts)):
                with preserved_state(module):
                    module.eval()
                    try:
                        found.append(one.loss(part, self._others, (self._pipeline.seed, 2, attempt, number)))
                    except Exception:  # a step may work in training mode only
                        found.append(None)
            return found

        with torch.no_grad():
            losses = losses_of(0)
            message = self._disagreement(losses)
            if message is not None and all(map(_is_loss, losses)) and _all_equal(losses, losses_of(1)):
                raise ValueError(message)
        return message is not None

    def _disagreement(self, losses: list[Any]) -> str | None:
        """The message about losses that do not add up; None if they do."""
        if not all(map(_is_loss, losses)):
            return "no loss"
        whole, *rest = (float(loss) for loss in losses)
        if not torch.isfinite(losses[0]).all():
            return None
        module, reduction = self._pipeline.model.module, self._pipeline.loss_reduction
        dtypes = {loss.dtype for loss in losses} | {p.dtype for p in module.parameters() if p.is_floating_point()}
        rtol = relative_tolerance(sorted(dtypes | precision_dtypes(module), key=str), losses[0].device.type)
        given = getattr(reduction, "__name__", "a function") if callable(reduction) else repr(reduction)
        samples = [leading_size(part) or 1 for part in self._parts]
        return disagreement(whole, rest, self._batch.weights, samples, given=given, rtol=rtol)

    def _gradients(self, one: WholeCopy) -> GradientFinding | None:
        """Compares the gradients of two parts with those of both together, in training mode.

        BatchNorm and dropout are in evaluation mode: their differences are known.
        """
        pipeline = self._pipeline

        def run(parts: Sequence[Any], weights: Sequence[float], seed: int) -> None:
            one.backward(parts, self._others, [w * self._batch.multiplier for w in weights], (pipeline.seed, 5, seed))

        check = GradientCheck(
            one.module,
            one.parameters,
            run,
            traceless=lambda: preserved_state(one.module),
            gather=lambda value: [value],
            loss_reduction=pipeline.loss_reduction,
            rtol=gradient_rtol(pipeline.model.module, pipeline.model.device),
        )
        return check.find(self._batch.whole, len(self._parts))


def _wide(tensor: Tensor) -> Tensor:
    """A copy in host memory, in the widest dtype."""
    return tensor.detach().to("cpu", torch.complex128 if tensor.is_complex() else torch.float64, copy=True)


def _max(tensor: Tensor) -> float:
    return float(tensor.abs().nan_to_num().max()) if tensor.numel() else 0.0


def _eps(tensor: Tensor) -> float:
    return torch.finfo(tensor.dtype).eps if tensor.is_floating_point() or tensor.is_complex() else 0.0


def _same(loss: Tensor, other: Tensor) -> bool:
    """Whether two losses may come from the same computation on one device."""
    eps = torch.finfo(loss.dtype).eps
    rtol = 8 * eps if loss.device.type == "cpu" else relative_tolerance([loss.dtype], loss.device.type)
    return torch.allclose(loss, other, rtol=rtol, atol=0.0, equal_nan=True)


def _is_loss(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and value.is_floating_point()


def _all_equal(losses: Sequence[Any], others: Sequence[Any]) -> bool:
    """Whether two runs gave the same losses, to the bit."""
    return all(
        _is_loss(a) and _is_loss(b) and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
        for a, b in zip(losses, others, strict=True)
    )


def copied(pipeline: RunningPipeline) -> tuple[bool, WholeCopy | None]:
    """Whether the whole module has been copied on the last stage, and there the copy; a collective of the pipeline.

    Where that cannot be done, a line says why, and nothing is proved.
    """
    model, one = pipeline.model, None
    if pipeline.tensor_axis is not None and pipeline.tensor_axis.is_split:
        return False, None
    with model.meter.unrecorded():
        problem = model.group.from_last(lacks_memory(pipeline) if model.is_last else None)
        if problem is None:
            values = {id(holding.tensor): value for holding, value in model.ownership.values_of_others()}
            if model.is_last:
                try:
                    one = WholeCopy(pipeline, values)
                except Exception as error:  # whatever an object in the module raises
                    problem = f"the module cannot be copied ({type(error).__name__}: {error})"
            problem = model.group.from_last(problem)
    if problem is not None:
        rank_zero_info(f"{_NOT_PROVED}: {problem}.")
    return problem is None, one


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

    def loss(self, part: Any, others: Sequence[Any], seed: tuple[int, ...]) -> Any:
        """The loss of the step for a copy of ``part``, whose random numbers follow from ``seed``."""
        pipeline, self._seed = self._pipeline, seed
        part = moved(cloned(part), 0, pipeline.options.batch_dim)
        plugin, module = pipeline.strategy.precision_plugin, self.module
        pipeline.in_step = True  # a metric gathers from the last stages, which all run this
        try:
            with preserved_random_state(self._device), self._layers.installed():
                step = partial(unlogged_loss, plugin, module, partial(module.training_step, part, *others))
                return self._layers.run((0, len(self._chain)), step, None)[1]
        finally:
            pipeline.in_step = False

    def backward(
        self,
        parts: Sequence[Any],
        others: Sequence[Any],
        scales: Sequence[float],
        seed: tuple[int, ...],
        order: Sequence[int] | None = None,
    ) -> None:
        """Forward and backward of a batch in parts, each with the factor of its loss; adds to the gradients."""
        before = self._marks()
        for number in range(len(parts)) if order is None else order:
            with without_gradients(self.parameters.values()):  # Lightning drops those that a step computes by itself
                loss = self.loss(parts[number], others, (*seed, number))
            if scales[number] and isinstance(loss, Tensor):
                (loss * scales[number]).backward()  # type: ignore[no-untyped-call]
        after = self._marks()
        self.changed |= {name: None for name, found in after.items() if name not in before or before[name] != found}

    def is_trained(self, name: str) -> bool:
        return name in self.parameters and self.parameters[name].requires_grad

    def taken(self) -> Gradients:
        """The gradients, in host memory; they are taken from the parameters."""
        taken = take_gradients(self.parameters)
        return {name: value.to_dense() if value.is_sparse else value for name, value in taken.items()}

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


def lacks_memory(pipeline: RunningPipeline) -> str | None:
    """Why a copy of the whole model does not fit on this rank's device; None if it does."""
    needed = _COPIES * sum(holding.tensor.nbytes for holding in pipeline.model.ownership.holdings)
    device = pipeline.model.device
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
    return None if needed <= free else f"a copy of the model with its gradients takes {size(needed)} of {size(free)}"
