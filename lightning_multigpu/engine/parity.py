"""Parity: whether a strategy gives the gradients, and the step, of one device.

Each proof computes a batch in two ways, and :func:`difference` compares their gradients; a proof of optimizers compares
their steps::

    strategy                                           one device
    ring_ddp        halves of a rank's batch           both together                    steps/dry_run.py
    pipelines       micro-batches on the stages        the whole module, on one rank    pipeline/proof.py
                    two micro-batches                  both together                    pipeline/proof.py
                    an optimizer's step of parameters  with other gradients of others   couples_parameters
    tensor_split    split layers                       whole layers, before the split   SplitProof
"""

from __future__ import annotations

import copy
import inspect
import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import psutil
import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.optim import LBFGS, Optimizer

from lightning_multigpu.engine.batch_size import leading_size
from lightning_multigpu.engine.data_parallel.agreement import LossReduction
from lightning_multigpu.engine.errors import error_of_users
from lightning_multigpu.engine.main_memory import host_memory
from lightning_multigpu.engine.micro_batches import samples_of, split_batch, weights_of
from lightning_multigpu.engine.step_state import preserved_values, torch_random_states
from lightning_multigpu.engine.tensor_split.parameter_split import split_of
from lightning_multigpu.planning.numbers import size

if TYPE_CHECKING:
    from lightning_multigpu.engine.tensor_split.trials import TracelessStep

_SMALLEST = 1e-3
"""A gradient smaller than this part of the largest one counts as this large: it may be only rounding."""
_SHIFT = 1e-2
"""Weights are moved by this part of their size: a weight that starts at zero, as in a gate, hides its factor."""
_CHANGES = 1e-2
"""The relative difference of a step's own changes of a parameter that rounding explains."""

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


def _alone(value: Any) -> list[Any]:
    return [value]


def difference(
    found: Gradients,
    expected: Gradients,
    rtol: float,
    *,
    norms: Mapping[str, float] | None = None,
    gather: Gather = _alone,
) -> str:
    """Where gradients differ, on any rank, relative to their norms; empty if rounding explains it.

    A missing gradient counts as zero.

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
    if not sizes:
        return ""
    worst = max(sizes, key=lambda name: sizes[name])
    how = f"relative difference {sizes[worst]:.2g}, rounding explains {rtol:.0e}"
    return f"{len(sizes)} parameters differ, most {worst!r} ({how})"


def are_finite(*ways: Gradients, gather: Gather = _alone) -> bool:
    """Whether the gradients of all ways are finite, on all ranks."""
    return all(gather(all(bool(torch.isfinite(gradient).all()) for way in ways for gradient in way.values())))


def norm_of(first: Tensor | None, second: Tensor | None = None) -> float:
    """The 2-norm of ``first - second``; None counts as zero."""
    value = second if first is None else first if second is None else first - second
    if value is None:
        return 0.0
    return float(torch.linalg.vector_norm(value.float() if value.element_size() < 4 else value))


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

    At its end all parameters have their former values again.

    Args:
        parameters: by their names; a part of one is moved as at its place in the whole parameter.
        rank: the index of this rank's parts.
        sizes: of whole weights, which are noted here when they are moved first.
    """
    sizes = {} if sizes is None else sizes
    with preserved_values(parameters.values()):
        for name, parameter in parameters.items():
            if not parameter.requires_grad:
                continue
            split, device = split_of(parameter), parameter.device
            shape = parameter.shape if split is None else split.whole_shape(parameter)
            generator = torch.Generator(device).manual_seed(zlib.crc32(name.encode()))
            noise = torch.randn(shape, generator=generator, dtype=parameter.dtype, device=device) * _SHIFT
            if name not in sizes:
                sizes[name] = norm_of(parameter.detach()) / max(1, parameter.numel()) ** 0.5
            parameter.data.add_(noise if split is None else split.part(noise, rank), alpha=sizes[name] or 1.0)
        yield


@contextmanager
def without_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Takes the gradients away at the beginning of the block, and puts them back at its end."""
    before = [(parameter, parameter.grad) for parameter in parameters]
    for parameter, _ in before:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in before:
            parameter.grad = gradient


def take_gradients(module: Module) -> Gradients:
    """Moves the gradients from the module's parameters to host memory."""
    taken = {}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            gradient, parameter.grad = parameter.grad.detach(), None
            taken[name] = (gradient.to_dense() if gradient.is_sparse else gradient).to("cpu", copy=True)
    return taken


# Parts of a batch, and the batch

Cause = Literal["", "coupled", "kept", "stateful", "unknown"]
_UNKNOWN = "Whether the gradients of parts of a batch add up to those of the batch cannot be told"
_STATEFUL = (
    "The module keeps values that each part of a batch changes and the next one trains with (as spectral norm, "
    "codebooks and queues do). One device changes them once a batch, and trains a little differently"
)
_Turn = Sequence[tuple[list[int], int]]
"""Parts that run in turn, from the state that the first one finds: samples, and a seed of random numbers."""


class _Outcome(NamedTuple):
    """Of parts: the sum of their weighted gradients, their losses, and their own changes of parameters."""

    gradients: Gradients
    losses: list[Tensor]
    left: dict[str, Tensor]


@dataclass
class PartsCheck:
    """Whether two parts of a batch give what both together give; a collective of the ranks.

    Gradients of parts add up to those of the batch if no sample takes part in another sample's gradients. Losses need
    not show a coupling: those of parts can agree to the last bit of float32 while their gradients do not, as with the
    balancing loss of a router. Two parts are enough: where samples of a batch are coupled, those of any two parts are.

    BatchNorm and dropout layers are in evaluation mode meanwhile: their differences are known. All other layers keep
    their mode. The check restores values of parameters, gradients and the state that ``traceless`` restores.

    Args:
        module: ranks may have different parameters.
        run: ``run(part, weight, seed)`` runs forward and backward of a copy of a part, whose loss is multiplied by its
            weight, adds to the gradients, and returns the loss. May be a collective.
        traceless: a block that restores the module and random states at its end.
        loss_reduction: gives the weights of the parts.
        rtol: the relative difference that rounding explains; the same on all ranks.
        in_turn: the strategy trains parts of a batch in turn, so that one may find what another one has kept.
        gather: returns the objects of all ranks, on every rank.
    """

    module: Module
    run: Callable[[Any, float, int], Any]
    traceless: Callable[[], AbstractContextManager[None]]
    loss_reduction: LossReduction
    rtol: float
    in_turn: bool = False
    gather: Gather = _alone
    batch: Any = field(default=None, init=False)

    def find(self, batch: Any, num_parts: int) -> tuple[Cause, str]:
        """Compares the two of ``num_parts`` parts with the largest weights, and both together.

        Returns:
            "coupled", and how gradients do not add up; "kept" where a part finds values that another one has kept, or
            where parts change parameters otherwise than the batch does, and these parameters; "stateful" or "unknown",
            and a line for the user.
        """
        pair, self.batch = _heaviest_pair(batch, num_parts, self.loss_reduction), batch
        if not all(self.gather(pair is not None)) or pair is None:
            return "unknown", f"{_UNKNOWN}: a batch cannot be cut into two parts that count"
        parameters = dict(self.module.named_parameters())
        found: tuple[Cause, str] = "", ""
        # Two weights that begin as equals have an average that does not change; one that begins at 0 may be set up.
        for moves in (nullcontext(), moved_weights(parameters))[not self.in_turn :]:
            with moves, without_gradients(parameters.values()):
                found = self._find(*pair)
            if found[0] in ("coupled", "kept"):
                break
        return found

    def _find(self, a: list[int], b: list[int]) -> tuple[Cause, str]:
        apart, in_turn = self._outcome([(a, 0)], [(b, 1)]), self._outcome([(a, 0), (b, 1)])
        is_stateful = not self._agree(in_turn, apart)
        if self.in_turn and is_stateful and not self._agree(self._outcome([(a, 0), (b, 1)], resets=True), apart):
            return "kept", ", ".join(in_turn.left)
        together = self._outcome([(a + b, 0)])
        if self.in_turn and difference(in_turn.left, together.left, _CHANGES):
            return "kept", ", ".join(in_turn.left)
        if not are_finite(together.gradients, apart.gradients, gather=self.gather):
            return "unknown", f"{_UNKNOWN}: gradients are not finite"
        found = self._difference(apart, together)
        if found and self._difference(
            self._outcome([(a + b, 0), (a + b, 1)]), self._outcome([(a + b, 0)], [(a + b, 0)])
        ):
            # With other random numbers they differ, too. Unions of equal shapes draw alike, and with w the weight of a
            # union, w(a+b) g(a+b) is a sum of one function of a and one of b, unless they are coupled.
            a, b = (part[: min(len(a), len(b))] for part in (a, b))
            mixed, alike = self._outcome([(a + b, 0)], [(b + a, 0)]), self._outcome([(a + a, 0)], [(b + b, 0)])
            found = self._difference(mixed, alike)
        if not found:
            return ("stateful", _STATEFUL) if is_stateful else ("", "")
        sums = f"the gradients of {len(a)} and {len(b)} samples do not add up to those of the {len(a) + len(b)} samples"
        return ("kept", "") if self.in_turn and is_stateful else ("coupled", f"{sums} together: {found}")

    def _outcome(self, *turns: _Turn, resets: bool = False) -> _Outcome:
        """What parts give; each turn begins with the same state, and if it ``resets`` each part with its buffers."""
        parameters, losses, left = dict(self.module.named_parameters()), [], {}
        parts = [[samples_of(self.batch, samples) for samples, _ in turn] for turn in turns]
        weights = iter(weights_of([part for turn in parts for part in turn], self.loss_reduction))
        for turn, own in zip(turns, parts, strict=True):
            with self.traceless(), preserved_values(parameters.values() if self.in_turn else ()) as before:
                for layer in self.module.modules():
                    if isinstance(layer, _BatchNorm | _DropoutNd):
                        layer.train(False)
                buffers = [buffer.clone() for buffer in self.module.buffers()] if resets else []
                for part, (_, seed) in zip(own, turn, strict=True):
                    for buffer, value in zip(self.module.buffers(), buffers, strict=False):
                        buffer.copy_(value)
                    losses.append(self.run(part, next(weights), seed))
                for (name, parameter), value in zip(parameters.items(), before, strict=False):
                    if not torch.equal(parameter.detach().cpu(), value):
                        change = _wide(parameter) - _wide(value)
                        if norm_of(change) > _exact(value) * norm_of(_wide(value)):
                            left[name] = change
        return _Outcome(take_gradients(self.module), [each for each in losses if isinstance(each, Tensor)], left)

    def _agree(self, one: _Outcome, other: _Outcome) -> bool:
        """Whether the losses of the same parts are equal, but for the order of a GPU's sums."""
        found = True
        for a, b in zip(one.losses, other.losses, strict=False):
            rtol = _exact(a) if a.device.type == "cpu" else rounding_of([a.dtype], a.device).losses
            found &= torch.allclose(a, b, rtol=rtol, atol=0.0, equal_nan=True)
        return all(self.gather(found))

    def _difference(self, found: _Outcome, expected: _Outcome) -> str:
        return difference(found.gradients, expected.gradients, self.rtol, gather=self.gather)


def _wide(tensor: Tensor) -> Tensor:
    """In host memory, in the widest dtype: frozen parameters may be of integers, or of 8 bits."""
    return tensor.detach().to("cpu", torch.complex128 if tensor.is_complex() else torch.float64)


def _exact(tensor: Tensor) -> float:
    """The relative difference of values of the same computation on a CPU."""
    return 8 * torch.finfo(tensor.dtype).eps if tensor.is_floating_point() or tensor.is_complex() else 0.0


def _heaviest_pair(batch: Any, num_parts: int, loss_reduction: LossReduction) -> tuple[list[int], list[int]] | None:
    """The samples of the two parts with the largest weights; None if fewer count."""
    count = leading_size(batch) or 0
    if num_parts < 2 or count < num_parts:
        return None
    weights = weights_of(split_batch(batch, num_parts), loss_reduction)
    first, second = sorted(range(num_parts), key=lambda number: -weights[number])[:2]
    samples = [part.tolist() for part in torch.arange(count).tensor_split(num_parts)]
    return (samples[first], samples[second]) if weights[second] else None


# Split layers, and whole ones


class SplitProof:
    """Compares gradients of a step on whole layers with those on split layers; made before the split.

    Ranks draw random numbers of their own for parts of tensors. So a step that draws some is run in evaluation mode.

    Args:
        step: of a module whose layers will be split.
        rtol: the relative difference of gradients that rounding explains.

    Attributes:
        obstacle: why nothing is compared; empty if it is. The same on all ranks.
    """

    def __init__(self, step: TracelessStep, *, rtol: float) -> None:
        self._step, self._module, self._group, self._rtol = step, step.module, step.group, rtol
        self._parameters = {name: p for name, p in self._module.named_parameters() if p.requires_grad}
        self._sizes: dict[str, float] = {}
        self._expected: Gradients = {}
        self._trains = True
        needed = self._group.size * sum(each.nbytes for each in self._parameters.values())
        obstacle = lack_of_memory("gradients", needed, torch.device("cpu"))
        try:
            if not obstacle:
                device = next(self._module.parameters()).device
                with step.running():
                    before = torch_random_states(device)
                    step.forward()
                    self._trains = all(map(torch.equal, before, torch_random_states(device)))
                self._expected = self._gradients()
                obstacle = "" if are_finite(self._expected) else "gradients of whole layers are not finite"
        except Exception as error:  # a step may work in training mode only
            obstacle = error_of_users(error)
        obstacle = step.first_of_ranks(obstacle)
        self.obstacle = obstacle and f"Whether split layers train as whole ones is not proved: {obstacle}"

    def check(self) -> None:
        """Compares, where there is no obstacle; a collective of all ranks. Raises ValueError if gradients differ."""
        own = {
            name: whole if (split := split_of(self._parameters[name])) is None else split.part(whole, self._group.rank)
            for name, whole in self._expected.items()
        }
        norms = {name: norm_of(whole) for name, whole in self._expected.items()}
        found = difference(self._gradients(), own, self._rtol, norms=norms, gather=self._step.gather)
        if found:
            raise ValueError(
                "split layers would train other gradients than whole ones: in a dry run of the first batch "
                f"{found}. A layer or a function computes something else on a part of a tensor, in code that "
                "torch's functions do not show. Keep such layers whole, by plan={'*.first': 'column', '*.second': "
                "'row'} without them, or use strategy='ring_ddp'; verify_steps=0 trains all the same"
            )

    def _gradients(self) -> Gradients:
        """This rank's gradients, in host memory: of whole parameters, or of its parts."""
        with moved_weights(self._parameters, rank=self._group.rank, sizes=self._sizes), self._step.running():
            if not self._trains:
                self._module.eval()
            self._step.forward_and_backward()
            with self._group.showing(parts=True):
                return take_gradients(self._module)


# An optimizer's step on a stage, which has only the gradients of its own parameters, and on one device

_FACTOR = 1e4
_torchs = (value for value in vars(torch.optim).values() if isinstance(value, type) and issubclass(value, Optimizer))
_KNOWN = {inspect.unwrap(cls.step) for cls in _torchs if cls not in (Optimizer, LBFGS)}


class ProbeError(Exception):
    """The optimizer cannot be probed."""


def couples_parameters(optimizer: Any) -> bool:
    """Whether the optimizer changes a parameter by the values or gradients of others, as one that clips by their norm.

    torch's optimizers but LBFGS, and subclasses with their ``step``, are known not to. A copy of another one takes
    two steps: its parameters have 2 numbers in each dimension, and every second one has large gradients.

    Args:
        optimizer: has ``param_groups`` and ``step``; it is not changed.

    Raises:
        ProbeError: the copy cannot be made, or fails; or hooks around ``step`` may use the original parameters.
    """
    hooks = any(vars(optimizer).get(f"_optimizer_step_{when}_hooks") for when in ("pre", "post"))
    step = vars(optimizer).get("step")
    is_replaced = step is not None and not getattr(step, "_wrapped_by_lr_sched", False)  # and not by a scheduler
    if inspect.unwrap(type(optimizer).step) in _KNOWN and not hooks and not is_replaced:
        return False
    if isinstance(optimizer, LBFGS):
        return True
    if is_replaced:
        raise ProbeError("its step has been replaced")
    try:
        with torch.random.fork_rng(devices=[]):
            expected = _updated(optimizer, 0, 1.0)
            for kept in (0, 1):
                if not all(map(torch.equal, _updated(optimizer, kept, _FACTOR)[kept::2], expected[kept::2])):
                    return True
    except Exception as error:  # any class may come from the optimizer
        raise ProbeError(f"{type(error).__name__}: {error}") from error
    if hooks:
        raise ProbeError("it has hooks around its step")
    return False


def _updated(optimizer: Any, kept: int, factor: float) -> list[Tensor]:
    """The parameters of a copy after two steps; those of index ``kept`` modulo 2 are the same for every factor."""
    generator = torch.Generator().manual_seed(0)
    torch.default_generator.manual_seed(0)  # that of the CPU alone, whose state the caller keeps
    memo: dict[int, Any] = {}
    tiny: list[Parameter] = []
    slopes: list[Tensor] = []
    for parameter in dict.fromkeys(p for group in optimizer.param_groups for p in group["params"]):
        scale = 1.0 if len(tiny) % 2 == kept else factor
        values = torch.randn((2, *[2] * parameter.ndim), generator=generator, dtype=torch.float64)
        slopes.append(scale * values[1])
        memo[id(parameter)] = Parameter((1.0 if scale == 1.0 else 3.0) * values[0])
        tiny.append(memo[id(parameter)])
    stepping = _copied(optimizer, memo)

    def closure() -> Tensor:
        loss = torch.zeros((), dtype=torch.float64)
        for parameter, slope in zip(tiny, slopes, strict=True):
            parameter.grad = (0 if parameter.grad is None else parameter.grad) + 0.5 * parameter.detach() + slope
            loss = loss + (0.25 * parameter.detach().square() + slope * parameter.detach()).sum()
        return loss

    for _ in range(2):
        closure()  # an earlier batch, whose gradients accumulate
        stepping.step(closure)
    return [parameter.detach() for parameter in tiny]


def _copied(optimizer: Any, memo: dict[int, Any]) -> Any:
    """A copy with the parameters of ``memo`` and without states; optimizers within it are copied in the same way."""
    memo[id(optimizer)] = made = object.__new__(type(optimizer))
    memo.setdefault(id(optimizer.state), defaultdict(dict))
    for value in vars(optimizer).values():
        if isinstance(value, Optimizer) and id(value) not in memo:
            _copied(value, memo)
    attributes = {name: value for name, value in vars(optimizer).items() if name != "step"}
    vars(made).update({name: copy.deepcopy(value, memo) for name, value in attributes.items()})
    return made
