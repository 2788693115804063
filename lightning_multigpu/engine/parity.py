"""Parity: whether a strategy gives the gradients, and the step, of one device.

A batch is computed in two ways, each of which gives a dictionary from the names of parameters to gradients.
:func:`difference` names the parameter that differs most, and :data:`CAUSES` the likely cause::

    strategy                                        one device                       who compares
    ring_ddp        two halves of a rank's batch    mixtures of their samples        coupling
    pipelines       two micro-batches               mixtures of their samples        coupling
                    micro-batches in turn           each by itself                   pipeline/proof.py
                    micro-batches on the stages     the whole module, on one rank    pipeline/proof.py
                    an optimizer's step             with other gradients of others   couples_parameters
    tensor_split    split layers                    whole layers, before the split   proved_split
"""

from __future__ import annotations

import copy
import inspect
import math
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, Literal

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
from lightning_multigpu.engine.placeholder import Placeholder
from lightning_multigpu.engine.step_state import preserved_values, torch_random_states, without_gradients
from lightning_multigpu.engine.tensor_split.parameter_split import split_of
from lightning_multigpu.engine.tensor_split.parts import local
from lightning_multigpu.engine.tensor_split.trials import TracelessStep
from lightning_multigpu.planning.numbers import size

_SMALLEST = 1e-3  # a gradient smaller than this part of the largest one counts as this large: it may be only rounding
_SHIFT = 1e-2  # weights are moved by this part of their size: one that starts at zero, as in a gate, hides its factor
_FACTOR = 1e4  # of the values and gradients of every second parameter of an optimizer that is tried

_ONCE = (
    "change it in on_train_batch_start or on_train_batch_end(outputs, batch, batch_idx), which every stage calls once "
    "a batch, with the loss of the whole batch"
)
_COUPLES = "training_step couples the samples of a batch, as a contrastive loss or a balanced router does: {found}. "
CAUSES = {
    "stages": "The step changes {kept}, which other stages do not get, or find as changed already where a rank has "
    "several stages (use schedule='1f1b') or runs layers again (leave them out of activation_checkpointing). Let a "
    f"layer return it with its output, as in x, own = layer(x, own), and the later layers pass it on; or {_ONCE}",
    "kept": "the step changes {kept} by itself, and with num_micro_batches={parts} a micro-batch finds what another "
    "one has left: hidden states, a layer that sets itself up (ActNorm, scales of a quantised layer), an average of "
    f"weights. Pass num_micro_batches=1; set the layer up before the fit, by a whole batch; or {_ONCE}",
    "coupled": f"{_COUPLES}Micro-batches would train other gradients than one device. Pass num_micro_batches=1; mix "
    "samples in on_after_batch_transfer, which gets whole batches; or accept the difference by verify_steps=0",
    "shares": f"{_COUPLES}Each rank has a share of the global batch, and would train other gradients than one device. "
    "Mix samples in the loader's collate_fn; accept the difference by verify_steps=0; or gather all ranks' embeddings "
    "with self.all_gather(embeddings, sync_grads=True), and pass verify_steps=0 then",
    "split": "A layer or a function computes something else on a part of a tensor, in code that torch's functions do "
    "not show. Keep such layers whole, by plan={'*.first': 'column', '*.second': 'row'} without them, or use "
    "strategy='ring_ddp'; verify_steps=0 trains all the same",
}

Gradients = dict[str, Tensor]
Outcome = tuple[Gradients, Gradients]  # gradients, and the changes of parameters that steps make by themselves
Gather = Callable[[Any], list[Any]]
Turn = Sequence[Callable[[], Any]]
Traceless = Callable[[], AbstractContextManager[None]]
Cause = Literal["", "coupled", "kept", "buffers", "untold"]

_UNTOLD = "Whether the gradients of parts of a batch add up to those of the batch cannot be told"
_BUFFERS = (
    "The module keeps values that each part of a batch changes and the next one trains with (as spectral norm, "
    "codebooks and queues do). One device changes them once a batch, and trains a little differently"
)


def rounding_of(dtypes: Iterable[torch.dtype], device: torch.device) -> float:
    """The relative difference of gradients that rounding explains, ten times that of losses; the coarsest type decides.

    In float64 too, models compute norms, softmax and losses in float32; a GPU may compute float32 in TF32, of ten bits.
    """
    known = {torch.float64: 1e-5, torch.float32: 1e-2 if device.type == "cuda" else 1e-4}
    return max((known.get(dtype, 1e-1) for dtype in dtypes), default=0.0)


def _alone(value: Any) -> list[Any]:
    return [value]


def difference(found: Gradients, expected: Gradients, rtol: float, gather: Gather = _alone) -> str:
    """Where gradients differ, on any rank, relative to their norms; empty if rounding explains it.

    A missing gradient counts as zero. ``gather`` returns the objects of all ranks, on every rank.
    """
    norms = {name: max(norm_of(found.get(name)), norm_of(expected.get(name))) for name in {**found, **expected}}
    smallest = _SMALLEST * max(gather(max(norms.values(), default=0.0)))
    errors = []
    for name, norm in norms.items():
        error = norm_of(found.get(name), expected.get(name))
        relative = error and error / max(norm, smallest)
        if not relative <= rtol:
            errors.append((math.inf if math.isnan(relative) else relative, name))
    errors = sorted(pair for rank in gather(errors) for pair in rank)
    if not errors:
        return ""
    how = f"relative difference {errors[-1][0]:.2g}, rounding explains {rtol:.0e}"
    return f"{len({name for _, name in errors})} parameters differ, most {errors[-1][1]!r} ({how})"


def outcomes_differ(found: Outcome, expected: Outcome, rtol: float, gather: Gather = _alone) -> str:
    """Where gradients, or else the step's own changes of parameters, differ; as :func:`difference`."""
    return next(filter(None, (difference(*ways, rtol, gather) for ways in zip(found, expected, strict=True))), "")


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
def preserved_weights(module: Module, *, rank: int = 0) -> Iterator[Callable[[], None]]:
    """Takes gradients away at the beginning of the block; at its end they, and all values, are as before.

    Yields a function that moves trained weights by noise, which depends on their names and is the same on all ranks; a
    part of a weight, on the rank of this index, is moved as at its place in the whole one.
    """
    held = {name: p for name, p in module.named_parameters() if not isinstance(p, Placeholder)}

    def move() -> None:
        for name, parameter in held.items():
            if parameter.requires_grad:
                split, value = split_of(parameter), local(parameter).data
                shape = value.shape if split is None else split.whole_shape(value)
                generator = torch.Generator(value.device).manual_seed(zlib.crc32(name.encode()))
                noise = torch.randn(shape, generator=generator, dtype=value.dtype, device=value.device)
                noise = noise if split is None else split.part(noise, rank)
                value.add_(noise * value.abs().where(value != 0, 1.0), alpha=_SHIFT)

    with preserved_values(held.values()), without_gradients(held.values()):
        yield move


def take_gradients(module: Module) -> Gradients:
    """Moves the gradients from the module's parameters to host memory."""
    taken = {}
    for name, parameter in module.named_parameters():
        if parameter.grad is not None:
            gradient, parameter.grad = parameter.grad.detach(), None
            taken[name] = (gradient.to_dense() if gradient.is_sparse else gradient).to("cpu", copy=True)
    return taken


# Parts of a batch, and the batch


def outcome(module: Module, turns: Iterable[Turn], traceless: Traceless, *, resets: bool = False) -> Outcome:
    """What steps give, in turns that begin with the same state; with ``resets`` each step finds the same buffers."""
    parameters, changes = dict(module.named_parameters()), Gradients()
    for turn in turns:
        with traceless(), preserved_values(parameters.values()) as before:
            buffers = [buffer.clone() for buffer in module.buffers()] if resets else []
            for run in turn:
                for buffer, value in zip(module.buffers(), buffers, strict=False):
                    buffer.copy_(value)
                run()
            for name, change in zip(parameters, map(_change, parameters.values(), before), strict=True):
                if change is not None:  # of other rows than an earlier turn's, or as there: Embedding(max_norm=)
                    changes[name] = change if name not in changes else changes[name].where(changes[name] != 0, change)
    return take_gradients(module), changes


def _change(parameter: Tensor, before: Tensor) -> Tensor | None:
    """What a step has added to a parameter, which may be of integers or of 8 bits; None if rounding explains it."""
    after = parameter.detach().cpu()
    if torch.equal(after, before):
        return None
    eps = torch.finfo(before.dtype).eps if before.is_floating_point() or before.is_complex() else 0.0
    change = after.to(torch.complex128) - before
    return change if norm_of(change) > 8 * eps * norm_of(before.to(torch.complex128)) else None


def coupling(
    module: Module,
    batch: Any,
    num_parts: int,
    run: Callable[[Any, float], Any],
    traceless: Traceless,
    loss_reduction: LossReduction,
    rtol: float,
    *,
    in_turn: bool = False,
    gather: Gather = _alone,
) -> tuple[Cause, str]:
    """How samples take part in each other's gradients; a collective of the ranks, which may have different parameters.

    With a and b the samples of two of ``num_parts`` parts, and f the gradients of samples, f(ab) + f(ba) = f(aa) +
    f(bb) if no sample takes part in another one's gradients. All four have equal shapes, so that they draw the same
    random numbers. Losses need not show a coupling, as with the balancing loss of a router. BatchNorm and dropout
    layers are in evaluation mode meanwhile: their differences are known.

    Args:
        run: ``run(part, weight)`` adds to the gradients those of a copy of a part, whose loss is multiplied by its
            weight, from the same random state each time. May be a collective.
        traceless: a block that restores the module and random states at its end.
        in_turn: the strategy trains parts in turn, so that one may find what another one has kept.

    Returns:
        "coupled" or "kept", and how gradients differ; or "untold", or "buffers" for what is kept in buffers alone, and
        a line for the user.
    """
    pair: list[list[int]] = []
    if 2 <= num_parts <= (count := leading_size(batch) or 0):
        weights = weights_of(split_batch(batch, num_parts), loss_reduction)
        samples = [part.tolist() for part in torch.arange(count).tensor_split(num_parts)]
        pair = [samples[n] for n in sorted(range(num_parts), key=lambda n: -weights[n])[:2] if weights[n]]
    if not all(gather(len(pair) == 2)):
        return "untold", f"{_UNTOLD}: a batch cannot be cut into two parts that count"
    a, b = (part[: min(map(len, pair))] for part in pair)
    parts = [samples_of(batch, each) for each in (a + a, b + b, a + b, b + a)]
    aa, bb, ab, ba = (partial(run, *each) for each in zip(parts, weights_of(parts, loss_reduction), strict=True))
    in_buffers = False
    with traceless(), preserved_weights(module) as move:
        for layer in module.modules():
            if isinstance(layer, _BatchNorm | _DropoutNd):
                layer.eval()
        # Two weights that begin as equals have an average that does not change; one that begins at 0 may be set up.
        for moves in (False, True)[not in_turn :]:
            if moves:
                move()
            alike = outcome(module, [[aa], [bb]], traceless)
            if not are_finite(alike[0], gather=gather):
                return "untold", f"{_UNTOLD}: gradients are not finite"
            for resets in (False, True)[: 1 + in_turn]:
                mixed = outcome(module, [[ab, ba]] if in_turn else [[ab], [ba]], traceless, resets=resets)
                if not (found := outcomes_differ(mixed, alike, rtol, gather)):
                    in_buffers |= resets
                    break
            else:
                is_kept = in_turn and outcomes_differ(outcome(module, [[aa, bb]], traceless), alike, rtol)
                how = "the gradients of two groups of samples do not add up to those of both together"
                return "kept" if is_kept else "coupled", f"{how}: {found}"
    return ("buffers", _BUFFERS) if in_buffers else ("", "")


# Split layers, and whole ones


@contextmanager
def proved_split(step: TracelessStep, *, rtol: float) -> Iterator[str]:
    """Compares the gradients of a step before the block, on whole layers, with those after it, on split ones.

    A collective of all ranks. Ranks draw random numbers of their own for parts of tensors. So a step that draws some is
    run in evaluation mode. Yields why nothing is compared; empty if it is.

    Args:
        step: of a module whose layers the block splits.

    Raises:
        ValueError: on all ranks, gradients differ.
    """
    module, group, trains, expected = step.module, step.group, True, Gradients()
    parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}

    def gradients() -> Gradients:
        with group.showing(parts=True), preserved_weights(module, rank=group.rank) as move, step.running():
            move()
            if not trains:
                module.eval()
            step.forward_and_backward()
            with group.showing(parts=True):
                return take_gradients(module)

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
    if obstacle:
        return
    for name, whole in expected.items():
        if (split := split_of(parameters[name])) is not None:
            expected[name] = split.part(whole, group.rank)
    if found := difference(gradients(), expected, rtol, step.gather):
        raise ValueError(f"split layers would train other gradients than whole ones: {found}. {CAUSES['split']}")


# An optimizer's step on a stage, which has only the gradients of its own parameters, and on one device

_torchs = (value for value in vars(torch.optim).values() if isinstance(value, type) and issubclass(value, Optimizer))
_KNOWN = {inspect.unwrap(cls.step) for cls in _torchs if cls not in (Optimizer, LBFGS)}


def couples_parameters(optimizer: Any) -> bool:
    """Whether the optimizer changes a parameter by the values or gradients of others, as one that clips by their norm.

    torch's optimizers but LBFGS, and subclasses with their ``step``, are known not to. A copy of another one takes
    two steps: its parameters have 2 numbers in each dimension, and every second one has large gradients.

    Raises:
        RuntimeError: it cannot be told, since hooks around ``step`` may use the original parameters.
        Exception: whatever the copy raises.
    """
    hooks = any(vars(optimizer).get(f"_optimizer_step_{when}_hooks") for when in ("pre", "post"))
    if isinstance(optimizer, LBFGS):
        return True
    if inspect.unwrap(type(optimizer).step) in _KNOWN and not hooks:
        return False
    with torch.random.fork_rng(devices=[]):
        small, large = (_updated(optimizer, factor)[::2] for factor in (1.0, _FACTOR))
    couples = not all(map(torch.equal, small, large))
    if hooks and not couples:
        raise RuntimeError("it has hooks around its step")
    return couples


def _updated(optimizer: Any, factor: float) -> list[Tensor]:
    """The parameters of a copy after two steps; ``factor`` multiplies every second one, and its gradients."""
    torch.default_generator.manual_seed(0)  # that of the CPU alone, whose state the caller keeps
    stepping = object.__new__(type(optimizer))
    memo: dict[int, Any] = {id(optimizer): stepping, id(optimizer.state): defaultdict(dict)}
    slopes: dict[Tensor, Tensor] = {}
    for parameter in dict.fromkeys(p for group in optimizer.param_groups for p in group["params"]):
        value, slope = torch.randn((2, *[2] * parameter.ndim), dtype=torch.float64) * factor ** (len(slopes) % 2)
        slopes[memo.setdefault(id(parameter), Parameter(value))] = slope
    attributes = {name: value for name, value in vars(optimizer).items() if name != "step"}  # a scheduler wraps it
    vars(stepping).update(copy.deepcopy(attributes, memo))

    def closure() -> Tensor:
        with torch.enable_grad():
            loss = torch.stack([(p.square() + slope * p).sum() for p, slope in slopes.items()]).sum()
            loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    for _ in range(2):
        closure()  # an earlier batch, whose gradients accumulate
        stepping.step(closure)
    return [parameter.detach() for parameter in slopes]
