"""Parity: whether a strategy gives the gradients of one device.

Each proof computes a batch in two ways, and :func:`difference` compares the gradients::

    strategy                                           one device
    ring_ddp        halves of a rank's batch in turn   both halves together             share_proof.py
    pipelines       micro-batches on the stages        on a copy of the whole module    proof.py
                    two micro-batches in turn          both together                    proof.py
    tensor_split    split layers                       whole layers, before the split   split_proof.py
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from lightning_multigpu.engine.batch_size import leading_size
from lightning_multigpu.engine.data_parallel.agreement import LossReduction
from lightning_multigpu.engine.main_memory import host_memory
from lightning_multigpu.engine.micro_batches import samples_of, split_batch, weights_of
from lightning_multigpu.engine.tensor_split.parameter_split import split_of
from lightning_multigpu.planning.numbers import size

_SMALLEST = 1e-3
"""A gradient smaller than this part of the largest one counts as this large: it may be only rounding."""
_SHIFT = 1e-2
"""Weights are moved by this part of their size: a weight that starts at zero, as in a gate, hides its factor."""

Gradients = dict[str, Tensor]
Gather = Callable[[Any], list[Any]]


class Rounding(NamedTuple):
    """The relative differences of gradients and of losses that rounding explains."""

    gradients: float = 0.0
    losses: float = 0.0


# In float64 too, models compute norms, softmax and losses in float32. TF32 has ten bits of mantissa.
_ROUNDING = {torch.float64: Rounding(1e-5, 1e-8), torch.float32: Rounding(1e-4, 1e-5)}
_TF32, _HALF = Rounding(1e-2, 1e-3), Rounding(1e-1, 2e-2)


def rounding_of(dtypes: Iterable[torch.dtype], device: torch.device) -> Rounding:
    """What rounding explains of computations in these dtypes; the coarsest one decides."""
    is_gpu = device.type == "cuda"  # where float32 may pass through TF32
    found = [_TF32 if is_gpu and each == torch.float32 else _ROUNDING.get(each, _HALF) for each in dtypes]
    return max(found, default=Rounding())


class Difference(NamedTuple):
    """Where gradients differ by more than ``rtol``, relative to their norms.

    Attributes:
        name: the parameter that differs most, by ``size``.
        parameters: how many differ.
    """

    name: str
    size: float
    parameters: int
    rtol: float

    def __str__(self) -> str:
        return (
            f"{self.parameters} parameters differ, most {self.name!r} (relative difference {self.size:.2g}, rounding "
            f"explains {self.rtol:.0e})"
        )


def _alone(value: Any) -> list[Any]:
    return [value]


def difference(
    found: Gradients,
    expected: Gradients,
    rtol: float,
    *,
    norms: Mapping[str, float] | None = None,
    gather: Gather = _alone,
) -> Difference | None:
    """Where gradients differ, on any rank; None if rounding explains it. A missing gradient counts as zero.

    Args:
        norms: of the gradients, by name, where the given ones are parts.
        gather: returns the objects of all ranks, on every rank.
    """
    names = {**found, **expected}
    if norms is None:
        norms = {name: max(norm_of(found.get(name)), norm_of(expected.get(name))) for name in names}
    errors = {name: norm_of(found.get(name), expected.get(name)) for name in names}
    suspects = {name: (error, norms.get(name, 0.0)) for name, error in errors.items() if error}
    ranks = gather((max(norms.values(), default=0.0), suspects))
    smallest = _SMALLEST * max(largest for largest, _ in ranks)
    sizes: dict[str, float] = {}
    for name, (error, norm) in (suspect for _, suspects in ranks for suspect in suspects.items()):
        relative = error / max(norm, smallest)
        if not relative <= rtol:
            sizes[name] = max(sizes.get(name, 0.0), math.inf if math.isnan(relative) else relative)
    worst = max(sizes, key=lambda name: sizes[name], default=None)
    return None if worst is None else Difference(worst, sizes[worst], len(sizes), rtol)


def are_finite(*ways: Gradients, gather: Gather = _alone) -> bool:
    """Whether the gradients of all ways are finite, on all ranks."""
    return all(gather(all(bool(torch.isfinite(gradient).all()) for way in ways for gradient in way.values())))


@dataclass
class SumCheck:
    """Whether the gradients of two parts of a batch add up to those of both parts together; a collective of the ranks.

    They do if no sample takes part in another sample's gradients. Losses need not show a coupling: the losses of parts
    can agree to the last bit of float32 while their gradients do not, as with the balancing loss of a router. Two parts
    are enough: where samples of a batch are coupled, those of any two parts are.

    BatchNorm and dropout layers are in evaluation mode meanwhile: their differences are known. All other layers keep
    their mode. The check restores weights, gradients and the state that ``traceless`` restores.

    Args:
        module: ranks may have different parameters.
        run: ``run(parts, weights, seed)`` runs forward and backward of each part, whose loss is multiplied by its
            weight, and adds to the gradients. It does not change the parts. May be a collective.
        traceless: a block that restores the module and random states at its end.
        loss_reduction: gives the weights of the parts.
        rtol: the relative difference that rounding explains; the same on all ranks.
        gather: returns the objects of all ranks, on every rank.
    """

    module: Module
    run: Callable[[Sequence[Any], Sequence[float], int], None]
    traceless: Callable[[], AbstractContextManager[None]]
    loss_reduction: LossReduction
    rtol: float
    gather: Gather = _alone

    def find(self, batch: Any, num_parts: int) -> tuple[str, str]:
        """How the gradients of two of ``num_parts`` parts do not add up, and what cannot be told; or empty.

        The parts are those with the largest weights.
        """
        pair = _heaviest_pair(batch, num_parts, self.loss_reduction)
        if not all(self.gather(pair is not None)) or pair is None:
            return "", f"{_UNKNOWN}: a batch cannot be cut into two parts that count"
        parameters = dict(self.module.named_parameters())
        with moved_weights(parameters), without_gradients(parameters.values()):
            return self._find(batch, *pair)

    def _find(self, batch: Any, a: list[int], b: list[int]) -> tuple[str, str]:
        together, in_turn = self._gradients(batch, [a + b]), self._gradients(batch, [a, b])
        if not are_finite(together, in_turn, gather=self.gather):
            return "", f"{_UNKNOWN}: gradients are not finite"
        found = self._difference(in_turn, together)
        if found is None:
            return "", ""
        if self._difference(self._gradients(batch, [a], [b]), together) is None:  # b from the same state as a
            return "", _STATEFUL
        if self._difference(in_turn, self._gradients(batch, [a, b], again=True)) is not None:
            # With other random numbers they differ, too. Unions of equal shapes draw alike, and with w the weight of a
            # union, w(a+b) g(a+b) is a sum of one function of a and one of b, unless they are coupled.
            a, b = (part[: min(len(a), len(b))] for part in (a, b))
            mixed, alike = self._gradients(batch, [a + b], [b + a]), self._gradients(batch, [a + a], [b + b])
            found = self._difference(mixed, alike)
        sums = f"the gradients of {len(a)} and {len(b)} samples do not add up to those of the {len(a) + len(b)} samples"
        return f"{sums} together: {found}" if found else "", ""

    def _difference(self, found: Gradients, expected: Gradients) -> Difference | None:
        return difference(found, expected, self.rtol, gather=self.gather)

    def _gradients(self, batch: Any, *runs: Sequence[list[int]], again: bool = False) -> Gradients:
        """The sum of the weighted gradients of all runs, each of parts in turn, from the same state.

        With ``again`` each run is done twice, and only the second one, with other random numbers, counts.
        """
        parts = [[samples_of(batch, samples) for samples in run] for run in runs]
        weights = iter(weights_of([part for run in parts for part in run], self.loss_reduction))
        for run in parts:
            of_parts = [next(weights) for _ in run]
            with self.traceless():
                for layer in self.module.modules():
                    if isinstance(layer, _BatchNorm | _DropoutNd):
                        layer.train(False)
                if again:
                    self.run(run, of_parts, 0)
                    take_gradients(self.module)
                self.run(run, of_parts, int(again))
        return take_gradients(self.module)


_UNKNOWN = "Whether the gradients of parts of a batch add up to those of the batch cannot be told"
_STATEFUL = (
    "The module keeps values that each part of a batch changes and the next one trains with (as spectral norm, "
    "codebooks and queues do). One device changes them once a batch, and trains a little differently"
)


def _heaviest_pair(batch: Any, num_parts: int, loss_reduction: LossReduction) -> tuple[list[int], list[int]] | None:
    """The samples of the two parts with the largest weights; None if fewer count."""
    count = leading_size(batch) or 0
    if num_parts < 2 or count < num_parts:
        return None
    weights = weights_of(split_batch(batch, num_parts), loss_reduction)
    first, second = sorted(range(num_parts), key=lambda number: -weights[number])[:2]
    samples = [part.tolist() for part in torch.arange(count).tensor_split(num_parts)]
    return (samples[first], samples[second]) if weights[second] else None


def lack_of_memory(what: str, needed: int, device: torch.device) -> str:
    """Why ``needed`` bytes do not fit into the free memory of a device, or of a container; empty if they do."""
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0]
    else:
        memory = host_memory()
        free = min(memory.limit_bytes - memory.used_bytes, psutil.virtual_memory().available)
    return f"{what} would take {size(needed)} of {size(free)}" if needed > free else ""


@contextmanager
def moved_weights(
    parameters: Mapping[str, Tensor], *, rank: int = 0, sizes: dict[str, float] | None = None
) -> Iterator[None]:
    """Within the block noise moves trained weights; it depends on their names, and is the same on all ranks.

    Args:
        parameters: by their names; a part of one is moved as at its place in the whole parameter.
        rank: the index of this rank's parts.
        sizes: of whole weights, which are noted here when they are moved first.
    """
    sizes = {} if sizes is None else sizes
    parameters = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    before = {name: parameter.detach().to("cpu", copy=True) for name, parameter in parameters.items()}
    try:
        for name, parameter in parameters.items():
            split, device = split_of(parameter), parameter.device
            shape = parameter.shape if split is None else split.whole_shape(parameter)
            generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
            noise = torch.randn(shape, generator=generator, dtype=parameter.dtype, device=device) * _SHIFT
            scale = sizes.setdefault(name, norm_of(before[name]) / max(1, parameter.numel()) ** 0.5)
            parameter.data.add_(noise if split is None else split.part(noise, rank), alpha=scale or 1.0)
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


def take_gradients(module: Module) -> Gradients:
    """Moves the gradients from the module's parameters to host memory."""
    taken = {}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            gradient, parameter.grad = parameter.grad.detach(), None
            taken[name] = (gradient.to_dense() if gradient.is_sparse else gradient).to("cpu", copy=True)
    return taken


def norm_of(first: Tensor | None, second: Tensor | None = None) -> float:
    """The 2-norm of ``first - second``; None counts as zero."""
    value = second if first is None else first if second is None else first - second
    if value is None:
        return 0.0
    return float(torch.linalg.vector_norm(value.float() if value.element_size() < 4 else value))
