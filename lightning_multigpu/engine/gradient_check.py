"""Gradient check: whether the gradients of two parts of a batch add up to the gradients of both parts together.

They do if no sample of a batch takes part in another sample's gradients. Losses need not show a coupling: the losses of
parts can agree to the last bit of float32 while their gradients do not, as with the balancing loss of a router. Two
parts are enough: where samples of a batch are coupled, those of any two parts are::

    weights, slightly moved            a + b together         compared with         a, then b
                                       differ: b from the same state as a; the parts with other random numbers;
                                       (a, b) + (b, a) with (a, a) + (b, b), which are of equal shapes and draw alike
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from lightning_multigpu.engine.batch_size import leading_size
from lightning_multigpu.engine.data_parallel.agreement import LossReduction
from lightning_multigpu.engine.micro_batches import samples_of, split_batch, weights_of
from lightning_multigpu.engine.tensor_split.parameter_split import split_of

# Relative to a gradient's own norm. In float64 too, models compute norms, softmax and losses in float32.
_TOLERANCES = {torch.float64: 1e-5, torch.float32: 1e-4}
_TOLERANCE_TF32 = 1e-2
_TOLERANCE_HALF = 1e-1
SMALLEST = 1e-3
"""A gradient smaller than this part of the largest one counts as this large: it may be only rounding."""
_SHIFT = 1e-2
"""Weights are moved by this part of their size: a weight that starts at zero, as in a gate, hides its factor."""

Gradients = dict[str, Tensor]
Run = Callable[[Sequence[Any], Sequence[float], int], None]


class Verdict(Enum):
    """The result of a check."""

    EQUAL = "equal"
    """The gradients add up, or differ only by random numbers."""
    COUPLED = "coupled"
    """The gradients do not add up."""
    STATEFUL = "stateful"
    """They add up only if each part starts from the same state of the module."""
    UNCLEAR = "unclear"
    """Some gradients are not finite."""


class Difference(NamedTuple):
    """The norms of a parameter's gradient and of its error."""

    name: str
    error: float
    norm: float


class GradientFinding(NamedTuple):
    """A verdict, and the differences behind it, the largest first.

    Attributes:
        sizes: the samples of each part.
        rtol: the relative difference that rounding explains.
    """

    verdict: Verdict
    differences: Sequence[Difference] = ()
    sizes: tuple[int, int] = (0, 0)
    rtol: float = 0.0

    def describe(self) -> str:
        """The differences, as a part of a sentence."""
        worst, (first, second) = self.differences[0], self.sizes
        return (
            f"the gradients of {first} and {second} samples do not add up to those of the {first + second} samples "
            f"together, in {len(self.differences)} parameters, most in {worst.name!r} (relative difference "
            f"{worst.error / max(worst.norm, worst.error):.2g}, rounding explains {self.rtol:.0e})"
        )


def gradient_tolerance(dtype: torch.dtype, device_type: str) -> float:
    """The relative difference of two gradients that rounding explains.

    Args:
        dtype: the coarsest dtype that takes part.
        device_type: on "cuda" float32 may pass through TF32.
    """
    if dtype == torch.float32 and device_type == "cuda":
        return _TOLERANCE_TF32
    return _TOLERANCES.get(dtype, _TOLERANCE_HALF)


class GradientCheck:
    """Compares gradients of the ranks' parameters; a check is a collective of the ranks.

    BatchNorm and dropout layers are in evaluation mode meanwhile: their differences are known. All other layers keep
    their mode. The check restores weights, gradients and the state that ``traceless`` restores.

    Args:
        parameters: this rank's parameters by name; ranks may have different ones.
        run: ``run(parts, weights, seed)`` runs forward and backward of each part, whose loss is multiplied by its
            weight, and adds to the gradients. It does not change the parts. May be a collective.
        traceless: a block that restores the module and random states at its end.
        gather: returns the objects of all ranks, on every rank.
        loss_reduction: gives the weights of the parts.
        rtol: the relative difference that rounding explains; the same on all ranks.
    """

    def __init__(
        self,
        module: Module,
        parameters: dict[str, Parameter],
        run: Run,
        *,
        traceless: Callable[[], AbstractContextManager[None]],
        gather: Callable[[Any], list[Any]],
        loss_reduction: LossReduction,
        rtol: float,
    ) -> None:
        self._module = module
        self._parameters = {name: p for name, p in parameters.items() if p.requires_grad}
        self._run = run
        self._traceless = traceless
        self._gather = gather
        self._loss_reduction = loss_reduction
        self._rtol = rtol

    def find(self, batch: Any, num_parts: int) -> GradientFinding | None:
        """Checks two neighbouring parts of ``num_parts`` parts of a batch: those with the largest weights.

        None if a rank's batch has too few samples, or only samples of weight 0.
        """
        pair = _heaviest_pair(batch, num_parts, self._loss_reduction)
        if not all(self._gather(pair is not None)) or pair is None:
            return None
        with moved_weights(self._parameters), without_gradients(self._parameters.values()):
            return self._find(batch, *pair)

    def _find(self, batch: Any, first: list[int], second: list[int]) -> GradientFinding:
        a, b, both = (samples_of(batch, samples) for samples in (first, second, first + second))
        weights = weights_of([a, b], self._loss_reduction)
        union = self._gradients([[both]], [[1.0]])
        apart = self._gradients([[a, b]], [weights])
        differences = self._differences(union, apart)
        finding = GradientFinding(Verdict.COUPLED, differences or (), (len(first), len(second)), self._rtol)
        if not differences:
            return finding._replace(verdict=Verdict.UNCLEAR if differences is None else Verdict.EQUAL)
        if self._differences(union, self._gradients([[a], [b]], [[weight] for weight in weights])) == []:
            return finding._replace(verdict=Verdict.STATEFUL)
        if self._differences(apart, self._gradients([[a, b]], [weights], again=True)) == []:
            return finding
        return self._find_interaction(batch, first, second)

    def _find_interaction(self, batch: Any, first: list[int], second: list[int]) -> GradientFinding:
        """Finds couplings in a step that draws random numbers: compares parts that draw the same numbers.

        With w the weight of a part, w(a+b) g(a+b) is a sum of one function of a and one of b, unless they are coupled.
        """
        size = min(len(first), len(second))
        a, b = first[:size], second[:size]
        parts = [samples_of(batch, samples) for samples in (a + b, b + a, a + a, b + b)]
        weights = weights_of(parts, self._loss_reduction)
        mixed, alike = (
            self._gradients([[part] for part in parts[start : start + 2]], [[w] for w in weights[start : start + 2]])
            for start in (0, 2)
        )
        differences = self._differences(mixed, alike)
        finding = GradientFinding(Verdict.COUPLED, differences or (), (size, size), self._rtol)
        return finding if differences else finding._replace(verdict=Verdict.EQUAL)

    def _gradients(self, runs: Sequence[Sequence[Any]], weights: Sequence[Sequence[float]], again: bool = False) -> Any:
        """The sum of the weighted gradients of all runs, each of which starts from the same state, in host memory.

        With ``again`` each run is done twice, and only the second one, with other random numbers, counts.
        """
        for parts, of_parts in zip(runs, weights, strict=True):
            with self._traceless():
                for part in self._module.modules():
                    if isinstance(part, _BatchNorm | _DropoutNd):
                        part.train(False)
                if again:
                    self._run(parts, of_parts, 0)
                    take_gradients(self._parameters)
                self._run(parts, of_parts, int(again))
        return take_gradients(self._parameters)

    def _differences(self, first: Gradients, second: Gradients) -> list[Difference] | None:
        """Differences on all ranks that rounding does not explain, largest first; None if a gradient is not finite."""
        found = []
        for name in {**first, **second}:
            norms = [norm_of(gradients.get(name)) for gradients in (first, second)]
            found.append(Difference(name, norm_of(first.get(name), second.get(name)), max(norms)))
        mine = max((difference.norm for difference in found), default=0.0)
        finite = all(math.isfinite(difference.error + difference.norm) for difference in found)
        suspects = [difference for difference in found if not difference.error <= self._rtol * difference.norm]
        gathered = self._gather((mine, finite, suspects))
        if not all(finite for _, finite, _ in gathered):
            return None
        smallest = SMALLEST * max(largest for largest, *_ in gathered)
        sizes = {}
        for difference in (difference for *_, suspects in gathered for difference in suspects):
            size = difference.error / max(difference.norm, smallest)
            if size > self._rtol:
                sizes[difference] = size
        return sorted(sizes, key=lambda difference: -sizes[difference])


def _heaviest_pair(batch: Any, num_parts: int, loss_reduction: LossReduction) -> tuple[list[int], list[int]] | None:
    """The samples of the two neighbouring parts whose smaller weight is largest."""
    if num_parts < 2 or (leading_size(batch) or 0) < num_parts:
        return None
    parts = split_batch(batch, num_parts)
    weights = weights_of(parts, loss_reduction)
    index = max(range(num_parts - 1), key=lambda number: min(weights[number : number + 2]))
    if min(weights[index : index + 2]) == 0:
        return None
    sizes = [leading_size(part) or 0 for part in parts]
    start, middle, stop = (sum(sizes[: index + number]) for number in range(3))
    return list(range(start, middle)), list(range(middle, stop))


@contextmanager
def moved_weights(
    parameters: dict[str, Parameter], *, step: int = 0, rank: int = 0, sizes: dict[str, float] | None = None
) -> Iterator[None]:
    """Within the block noise moves the weights; it depends on their names, and is the same on all ranks.

    Args:
        parameters: by their names; a part of one is moved as at its place in the whole parameter.
        step: other steps have other noise.
        rank: the index of this rank's parts.
        sizes: of whole weights, which are noted here when they are moved first.
    """
    sizes = {} if sizes is None else sizes
    before = {name: parameter.detach().to("cpu", copy=True) for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            split, device = split_of(parameter), parameter.device
            shape = parameter.shape if split is None else split.whole_shape(parameter)
            generator = torch.Generator(device).manual_seed(zlib.crc32(f"{step} {name}".encode()))
            noise = torch.randn(shape, generator=generator, dtype=parameter.dtype, device=device) * _SHIFT
            size = sizes.setdefault(name, norm_of(before[name]) / max(1, parameter.numel()) ** 0.5)
            parameter.data.add_(noise if split is None else split.part(noise, rank), alpha=size or 1.0)
        yield
    finally:
        for name, parameter in parameters.items():
            parameter.data.copy_(before[name])


@contextmanager
def without_gradients(parameters: Iterable[Parameter]) -> Iterator[None]:
    """Takes the gradients away at the beginning of the block, and puts them back at its end."""
    before = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


@contextmanager
def trained(parameters: Iterable[Parameter]) -> Iterator[None]:
    """Within the block frozen parameters get gradients too: their layers may be unfrozen later."""
    frozen = [parameter for parameter in parameters if not parameter.requires_grad]
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def take_gradients(parameters: dict[str, Parameter]) -> Gradients:
    """Moves the gradients from the parameters to host memory."""
    taken = {name: p.grad.detach().to("cpu") for name, p in parameters.items() if p.grad is not None}
    for parameter in parameters.values():
        parameter.grad = None
    return taken


def relative_errors(found: Gradients, expected: Gradients, norms: Mapping[str, float]) -> dict[str, float]:
    """How far gradients are from the expected ones, relative to their norms, by name; a missing one counts as zero.

    A norm far below the largest one counts as larger than it is: see :data:`SMALLEST`.
    """
    smallest = SMALLEST * max(norms.values(), default=0.0)
    return {
        name: norm_of(found.get(name), expected.get(name)) / max(norm, smallest, 1e-300) for name, norm in norms.items()
    }


def norm_of(first: Tensor | None, second: Tensor | None = None) -> float:
    """The 2-norm of ``first - second``; None counts as zero."""
    if first is None or second is None:
        value = first if second is None else second
        if value is None:
            return 0.0
    else:
        value = first - second
    values = value.coalesce().values() if value.is_sparse else value
    return float(torch.linalg.vector_norm(values.float() if values.element_size() < 4 else values))
