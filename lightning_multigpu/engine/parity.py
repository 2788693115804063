"""Parity: whether a strategy gives the gradients, and the step, of one device.

A batch is computed in two ways, each of which gives a dictionary from the names of parameters to gradients.
:func:`difference` names the parameter that differs most, and :data:`CAUSES` the likely cause::

    strategy                                           one device                       who compares
    ring_ddp        two halves of a rank's batch       mixtures of their samples        steps/dry_run.py
    pipelines       two micro-batches, in turn         apart, and mixtures              pipeline/proof.py
                    micro-batches on the stages        the whole module, on one rank    pipeline/proof.py
    tensor_split    split layers                       whole layers, before the split   proved_split
    pipelines       an optimizer's step of parameters  with other gradients of others   couples_parameters
"""

from __future__ import annotations

import copy
import inspect
import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
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
from lightning_multigpu.engine.step_state import preserved_values, torch_random_states, without_gradients
from lightning_multigpu.engine.tensor_split.parameter_split import split_of
from lightning_multigpu.planning.numbers import size

if TYPE_CHECKING:
    from lightning_multigpu.engine.tensor_split.trials import TracelessStep

_SMALLEST = 1e-3
"""A gradient smaller than this part of the largest one counts as this large: it may be only rounding."""
_SHIFT = 1e-2
"""Weights are moved by this part of their size: a weight that starts at zero, as in a gate, hides its factor."""
_AGAIN = 0.1
"""The part of what rounding explains that explains a difference of the same computation on the same samples."""
_FACTOR = 1e4  # of the gradients of every second parameter of an optimizer that is tried

_ONCE_A_BATCH = (
    "change it in on_train_batch_start or on_train_batch_end(outputs, batch, batch_idx), which every stage calls once "
    "a batch, with the loss of the whole batch"
)
_COUPLES = "training_step couples the samples of a batch: {found}. "
CAUSES = {
    "stages": "The step changes {kept}, which other stages do not get, or only as it was. Let a layer return a value "
    "with its output, and the later layers pass it on, as in x, own = layer(x, own); a value that only one layer uses "
    f"can stay in it; {_ONCE_A_BATCH}",
    "looped": "The step changes {kept} for the next one, and with {stages} stages a rank runs the beginning of a step "
    f"as often: {_ONCE_A_BATCH}; or use schedule='1f1b'",
    "again": "The step or a layer changes {kept}, and layers under activation_checkpointing run again in backward, "
    f"after the change: leave out those that keep values, or {_ONCE_A_BATCH}",
    "kept": "the step changes {kept} by itself, and with num_micro_batches={parts} a micro-batch finds what another "
    "one has left, where one device takes the whole batch: hidden states, a layer that sets itself up from its first "
    "batch (ActNorm, scales of a quantised layer), an average of weights. Pass num_micro_batches=1; set the layer up "
    f"before the fit, by a forward pass of the whole first batch; or {_ONCE_A_BATCH}",
    "coupled": f"{_COUPLES}Training in micro-batches would follow other gradients than one device's, as with the "
    "balancing loss of a mixture of experts, a contrastive loss, or mixup within the step. Pass num_micro_batches=1; "
    "mix samples in on_after_batch_transfer, which gets whole batches; or accept the difference by verify_steps=0",
    "shares": f"{_COUPLES}Each rank has a share of the global batch, so that training follows other gradients than one "
    "device's. A contrastive loss over all ranks gathers their embeddings with self.all_gather(embeddings, "
    "sync_grads=True); mix samples in the loader's collate_fn. verify_steps=0 accepts the difference, and is needed "
    "after all_gather too",
    "split": "A layer or a function computes something else on a part of a tensor, in code that torch's functions do "
    "not show. Keep such layers whole, by plan={'*.first': 'column', '*.second': 'row'} without them, or use "
    "strategy='ring_ddp'; verify_steps=0 trains all the same",
}

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


def difference(found: Gradients, expected: Gradients, rtol: float, gather: Gather = _alone) -> str:
    """Where gradients differ, on any rank, relative to their norms; empty if rounding explains it.

    A missing gradient counts as zero. ``gather`` returns the objects of all ranks, on every rank.
    """
    norms = {name: max(norm_of(found.get(name)), norm_of(expected.get(name))) for name in {**found, **expected}}
    smallest = _SMALLEST * max(gather(max(norms.values(), default=0.0)))
    own: list[tuple[float, str]] = []
    for name, norm in norms.items():
        error = norm_of(found.get(name), expected.get(name))
        relative = error and error / max(norm, smallest)
        if not relative <= rtol:
            own.append((math.inf if math.isnan(relative) else relative, name))
    all_ranks = sorted(pair for rank in gather(own) for pair in rank)
    if not all_ranks:
        return ""
    worst, name = all_ranks[-1]
    how = f"relative difference {worst:.2g}, rounding explains {rtol:.0e}"
    return f"{len({name for _, name in all_ranks})} parameters differ, most {name!r} ({how})"


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
def moved_weights(parameters: Mapping[str, Tensor], *, rank: int = 0, shift: float = _SHIFT) -> Iterator[None]:
    """Within the block parameters have no gradients, and noise moves the trained ones; at its end all are as before.

    The noise depends on their names, and is the same on all ranks.

    Args:
        rank: the index of this rank's parts; a part is moved as at its place in the whole parameter.
        shift: the size of the noise, relative to each value.
    """
    with preserved_values(parameters.values()), without_gradients(parameters.values()):
        for name, parameter in parameters.items():
            if shift and parameter.requires_grad:
                split, value = split_of(parameter), parameter.data
                shape = value.shape if split is None else split.whole_shape(value)
                generator = torch.Generator(value.device).manual_seed(zlib.crc32(name.encode()))
                noise = torch.randn(shape, generator=generator, dtype=value.dtype, device=value.device)
                noise = noise if split is None else split.part(noise, rank)
                value.add_(noise * value.abs().where(value != 0, 1.0), alpha=shift)
        yield


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


class _Outcome(NamedTuple):
    """The sum of weighted gradients of parts, and the step's own changes of parameters."""

    gradients: Gradients
    changes: Gradients

    def difference(self, expected: _Outcome, rtol: float, gather: Gather) -> str:
        return difference(self.gradients, expected.gradients, rtol, gather) or difference(
            self.changes, expected.changes, rtol, gather
        )


@dataclass
class PartsCheck:
    """Whether parts of a batch give what all its samples give together; a collective of the ranks.

    With a and b the samples of two parts, and f the gradients of samples, f(ab) + f(ba) = f(aa) + f(bb) if no sample
    takes part in another sample's gradients. All four have equal shapes, and so draw the same random numbers at the
    same places. Losses need not show a coupling: those of parts can agree to the last bit of float32 while their
    gradients do not, as with the balancing loss of a router. Two parts are enough: where samples of a batch are
    coupled, those of any two parts are.

    BatchNorm and dropout layers are in evaluation mode meanwhile: their differences are known. All other layers keep
    their mode. The check restores values of parameters, gradients and the state that ``traceless`` restores.

    Args:
        module: ranks may have different parameters.
        run: ``run(part, weight)`` runs forward and backward of a copy of a part, whose loss is multiplied by its
            weight, from the same random state each time, and adds to the gradients. May be a collective.
        traceless: a block that restores the module and random states at its end.
        loss_reduction: gives the weights of the parts.
        rtol: the relative difference that rounding explains; the same on all ranks.
        in_turn: the strategy trains parts of a batch in turn, so that one may find what another one has kept.
        gather: returns the objects of all ranks, on every rank.
    """

    module: Module
    run: Callable[[Any, float], Any]
    traceless: Callable[[], AbstractContextManager[None]]
    loss_reduction: LossReduction
    rtol: float
    in_turn: bool = False
    gather: Gather = _alone

    def find(self, batch: Any, num_parts: int) -> tuple[Cause, str]:
        """Compares the two of ``num_parts`` parts with the largest weights.

        Returns:
            "coupled", and how gradients do not add up; "kept" where a part finds values that another one has kept, and
            the parameters that it has changed; "stateful" or "unknown", and a line for the user.
        """
        pair: list[list[int]] = []
        if 2 <= num_parts <= (count := leading_size(batch) or 0):
            weights = weights_of(split_batch(batch, num_parts), self.loss_reduction)
            samples = [part.tolist() for part in torch.arange(count).tensor_split(num_parts)]
            pair = [samples[n] for n in sorted(range(num_parts), key=lambda n: -weights[n])[:2] if weights[n]]
        if not all(self.gather(len(pair) == 2)):
            return "unknown", f"{_UNKNOWN}: a batch cannot be cut into two parts that count"
        a, b = (part[: min(map(len, pair))] for part in pair)
        parts = [samples_of(batch, each) for each in (a + a, b + b, a + b, b + a)]
        weighted = list(zip(parts, weights_of(parts, self.loss_reduction), strict=True))
        parameters: dict[str, Tensor] = dict(self.module.named_parameters())
        found: tuple[Cause, str] = "", ""
        # Two weights that begin as equals have an average that does not change; one that begins at 0 may be set up.
        for shift in (0.0, _SHIFT)[not self.in_turn :]:
            with moved_weights(parameters, shift=shift):
                found = self._find(weighted[:2], weighted[2:])
            if found[0] in ("coupled", "kept"):
                break
        return found

    def _find(self, alike: list[Any], mixed: list[Any]) -> tuple[Cause, str]:
        apart, mixture = self._outcome(*([part] for part in alike)), self._outcome(*([part] for part in mixed))
        if not are_finite(apart.gradients, mixture.gradients, gather=self.gather):
            return "unknown", f"{_UNKNOWN}: gradients are not finite"
        found, is_stateful = mixture.difference(apart, self.rtol, self.gather), False
        if self.in_turn:
            turn, again = self._outcome(alike), (_AGAIN * self.rtol, self.gather)
            is_stateful = bool(turn.difference(apart, *again))
            if is_stateful and (found or self._outcome(alike, resets=True).difference(apart, *again)):
                return "kept", ", ".join(turn.changes)
        if found:
            return "coupled", f"the gradients of two groups of samples do not add up to those of both together: {found}"
        return ("stateful", _STATEFUL) if is_stateful else ("", "")

    def _outcome(self, *turns: list[Any], resets: bool = False) -> _Outcome:
        """What parts give; each turn begins with the same state, and if it ``resets`` each part with its buffers."""
        parameters, changes = dict(self.module.named_parameters()), Gradients()
        for turn in turns:
            with self.traceless(), preserved_values(parameters.values()) as before:
                for layer in self.module.modules():
                    if isinstance(layer, _BatchNorm | _DropoutNd):
                        layer.train(False)
                buffers = [buffer.clone() for buffer in self.module.buffers()] if resets else []
                for part in turn:
                    for buffer, value in zip(self.module.buffers(), buffers, strict=False):
                        buffer.copy_(value)
                    self.run(*part)
                found = map(_change, parameters.values(), before)
                changes |= {name: change for name, change in zip(parameters, found, strict=True) if change is not None}
        return _Outcome(take_gradients(self.module), changes)


def _change(parameter: Tensor, before: Tensor) -> Tensor | None:
    """What a step has added to a parameter, which may be of integers or of 8 bits; None if rounding explains it."""
    after = parameter.detach().cpu()
    if torch.equal(after, before):
        return None
    eps = torch.finfo(before.dtype).eps if before.is_floating_point() or before.is_complex() else 0.0
    change = after.to(torch.complex128) - before
    return change if norm_of(change) > 8 * eps * norm_of(before.to(torch.complex128)) else None


# Split layers, and whole ones


@contextmanager
def proved_split(step: TracelessStep, *, rtol: float) -> Iterator[str]:
    """Compares the gradients of a step before the block, on whole layers, with those after it, on split ones.

    A collective of all ranks. Ranks draw random numbers of their own for parts of tensors. So a step that draws some is
    run in evaluation mode. Yields why nothing is compared; empty if it is.

    Args:
        step: of a module whose layers the block splits.
        rtol: the relative difference of gradients that rounding explains.

    Raises:
        ValueError: on all ranks, gradients differ.
    """
    module, group, trains = step.module, step.group, True
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}

    def gradients() -> Gradients:
        with moved_weights(parameters, rank=group.rank), step.running():
            module.train(module.training and trains)
            step.forward_and_backward()
            with group.showing(parts=True):
                return take_gradients(module)

    expected: Gradients = {}
    obstacle = lack_of_memory("gradients", group.size * sum(p.nbytes for p in parameters.values()), torch.device("cpu"))
    try:
        if not obstacle:
            with step.running():
                before = torch_random_states(device := next(module.parameters()).device)
                step.forward()
                trains = all(map(torch.equal, before, torch_random_states(device)))
            expected = gradients()
            obstacle = "" if are_finite(expected) else "gradients of whole layers are not finite"
    except Exception as error:  # a step may work in training mode only
        obstacle = error_of_users(error)
    obstacle = step.first_of_ranks(obstacle)
    yield obstacle and f"Whether split layers train as whole ones is not proved: {obstacle}"
    if not obstacle:
        for name, whole in expected.items():
            if (split := split_of(parameters[name])) is not None:
                expected[name] = split.part(whole, group.rank)
        found = difference(gradients(), expected, rtol, step.gather)
        if found:
            raise ValueError(
                "split layers would train other gradients than whole ones: in a dry run of the first batch "
                f"{found}. {CAUSES['split']}"
            )


# An optimizer's step on a stage, which has only the gradients of its own parameters, and on one device

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
            small, large = (_updated(optimizer, factor)[::2] for factor in (1.0, _FACTOR))
    except Exception as error:  # any class may come from the optimizer
        raise ProbeError(f"{type(error).__name__}: {error}") from error
    couples = not all(map(torch.equal, small, large))
    if hooks and not couples:
        raise ProbeError("it has hooks around its step")
    return couples


def _updated(optimizer: Any, factor: float) -> list[Tensor]:
    """The parameters of a copy after two steps; ``factor`` multiplies every second one, and its gradients."""
    torch.default_generator.manual_seed(0)  # that of the CPU alone, whose state the caller keeps
    memo: dict[int, Any] = {}
    tiny: dict[Parameter, Tensor] = {}
    for parameter in dict.fromkeys(p for group in optimizer.param_groups for p in group["params"]):
        value, slope = torch.randn((2, *[2] * parameter.ndim), dtype=torch.float64) * factor ** (len(tiny) % 2)
        memo[id(parameter)] = Parameter(value)
        tiny[memo[id(parameter)]] = slope
    stepping = _copied(optimizer, memo)

    def closure() -> Tensor:
        with torch.enable_grad():
            loss = torch.stack([(p.square() + slope * p).sum() for p, slope in tiny.items()]).sum()
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

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
