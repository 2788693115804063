"""Trials of blocks: whether a step that runs on split layers still computes what it computed on whole ones.

A step is run on a whole module and on one with split blocks, without dropout and with slightly moved weights. The
losses, the gradients of all parameters, and the loss in evaluation mode have to agree. A block that does not fit stays
whole, with the reason. Frozen parameters have gradients meanwhile: a callback may unfreeze them later.

The step computes in float32, or in float64 if the module does, also where the Trainer's precision has 16 bits. Sums of
parts are rounded in another order than those of a whole layer. That changes a gradient by 1e-6 of its size or so in
float32, and by several per cent in 16 bits. A block whose code depends on its width, such as a norm of hidden features,
may be wrong by as little: in 16 bits it would pass.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.utils.hooks import RemovableHandle

from lightning_multigpu.communication.metering.traffic import sent_share
from lightning_multigpu.engine.gradient_check import (
    SMALLEST,
    moved_weights,
    norm_of,
    taking_gradients,
    trained,
    without_gradients,
)
from lightning_multigpu.engine.tensor_split.blocks import Applied, Block, Way
from lightning_multigpu.engine.tensor_split.parameter_split import split_of
from lightning_multigpu.engine.tensor_split.random_draws import Draw, NoDropout, misplaced
from lightning_multigpu.engine.tensor_split.sequence_region import WAYS, SequenceRegion, layer_lists
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup
from lightning_multigpu.planning.split_plan import BlockTraffic, Direction, SplitBlocks

_TRIES = 4
"""Groups of blocks that are tried for each doubling of their number: two bad blocks are found for sure."""


class Sent(NamedTuple):
    """A collective inside a split layer: its pass, operation, layer, and the bytes of the whole tensor."""

    direction: Direction
    operation: str
    layer: str
    size_bytes: int


class Computed(NamedTuple):
    """What a step computes, sends and draws: losses in training and evaluation, gradients by name in host memory."""

    loss: float
    gradients: dict[str, Tensor]
    evaluated: float
    traffic: list[Sent]
    draws: list[Draw]


class Left(NamedTuple):
    """Blocks of a kind that stay whole, and why."""

    blocks: Sequence[Block]
    reason: str


class Trials:
    """Splits the blocks of a module that compute the same when they are split; a collective of all ranks.

    Args:
        module: whole, and the same on all ranks.
        group: the ranks among which blocks are split.
        step: runs the step and returns its loss.
        traceless: a block at whose end the module and random states are as before it.
        gather: returns the objects of all ranks, also of other groups, on every rank.
        precisions: blocks within which the step computes in one precision; each gives the relative difference that
            rounding explains. The first one counts in which the step runs on the whole module.
        wrap_logits: makes of a head's outputs on a rank what the step gets.
        sequence_split: split activations between blocks along the sequence: "keep" or "gather_again" says what column
            layers do about their gathered inputs in backward. None for whole activations.
        keeps_whole: why activations stay whole in a list of layers, by its name; None if they may be split.

    Attributes:
        summed: hooks that sum the gradients of whole parameters within blocks over the ranks, by the parameters' names;
            to be removed at the end.
        regions: layers between whose blocks activations are split along the sequence.
        notes: about ``sequence_split`` and the precision, for the user.
        traffic: of a step with all blocks that are split.
    """

    def __init__(
        self,
        module: Module,
        group: TensorGroup,
        step: Callable[[], Any],
        *,
        traceless: Callable[[], AbstractContextManager[None]],
        gather: Callable[[Any], list[Any]],
        precisions: Sequence[Callable[[], AbstractContextManager[float]]],
        wrap_logits: Callable[[Tensor, Any], Tensor],
        sequence_split: Literal["keep", "gather_again"] | None = None,
        keeps_whole: Callable[[str], str | None] = lambda name: None,
    ) -> None:
        self._module = module
        self._group = group
        self._step = step
        self._traceless = traceless
        self._gather = gather
        self._precisions = precisions
        self._rtol = 0.0
        self._wrap_logits = wrap_logits
        self.summed: dict[str, RemovableHandle] = {}
        self._sequence_split = sequence_split
        self._keeps_whole = keeps_whole
        self.regions: list[SequenceRegion] = []
        self.notes: list[str] = []
        self.traffic: list[Sent] = []
        self._tries_left = 0
        self._device = next(module.parameters()).device
        self._parameters = {name: p for name, p in module.named_parameters() if p.is_floating_point()}

    def run(
        self,
        order: Callable[[Module], AbstractContextManager[dict[str, int]]],
        *searches: Callable[[dict[str, int]], list[Block]],
    ) -> tuple[list[tuple[Block, Applied]], list[Left]]:
        """The blocks that are split now, and those that stay whole.

        Args:
            order: notes which layers run.
            searches: each finds blocks, of the layers that have run; later ones are asked if nothing is split so far.

        Raises:
            ValueError: the step gives no loss that could be compared.
        """
        split: list[tuple[Block, Applied]] = []
        left: list[Left] = []
        parameters = self._parameters.values()
        self._group.random.is_off = self._group.sequence_random.is_off = True
        try:
            with without_gradients(parameters):
                for number, precision in enumerate(self._precisions, start=1):
                    with (
                        precision() as self._rtol,
                        moved_weights(self._parameters, self._own_part),
                        trained(parameters),
                    ):
                        found = self._compute_whole(order, is_last=number == len(self._precisions))
                        if found is not None:
                            self._split_found(*found, searches, split, left)
                            break
                if split:
                    self.traffic = self._compute().traffic
        finally:
            self._begin_step()
            self._group.random.is_off = self._group.sequence_random.is_off = False
        return split, left

    def _compute_whole(
        self, order: Callable[[Module], AbstractContextManager[dict[str, int]]], *, is_last: bool
    ) -> tuple[Computed, dict[str, int]] | None:
        """What the whole module computes, and its order of calls; None if the step does not run in this precision."""
        problem = None
        try:
            with order(self._module) as called:
                whole = self._compute()
        except Exception as error:  # whatever the user's code raises
            if is_last:
                raise
            problem = _first_line(error)
        problem = self._first_of_ranks(problem)
        if problem is None:
            return whole, self._gather(called)[0]
        self.notes.append(
            "the trial has run in the Trainer's precision, which hides a difference of a few per cent, since in "
            f"float32 training_step raises {problem}"
        )
        return None

    def _split_found(
        self,
        whole: Computed,
        called: dict[str, int],
        searches: Sequence[Callable[[dict[str, int]], list[Block]]],
        split: list[tuple[Block, Applied]],
        left: list[Left],
    ) -> None:
        for find in searches:
            by_kind: dict[str, list[Block]] = {}
            for block in [] if split else find(called):
                by_kind.setdefault(block.kind, []).append(block)
            for blocks in by_kind.values():
                self._tries_left = _TRIES * (1 + len(blocks).bit_length())
                self._split(blocks, whole, split, left)
        if self._sequence_split is not None:
            self._split_sequences(split, whole)

    def _own_part(self, parameter: Parameter, whole: Tensor) -> Tensor:
        split = split_of(parameter)
        return whole if split is None else split.part(whole, self._group.rank)

    def _split(
        self, blocks: Sequence[Block], whole: Computed, split: list[tuple[Block, Applied]], left: list[Left]
    ) -> None:
        """Splits those blocks of a kind that compute the same; bad ones are found by halving."""
        self._tries_left -= 1
        applied, reason = self._try(blocks, whole)
        if applied:
            split += zip(blocks, applied, strict=True)
        elif len(blocks) == 1 or self._tries_left <= 0:
            left.append(Left(blocks, reason))
        else:
            middle = len(blocks) // 2
            self._split(blocks[:middle], whole, split, left)
            self._split(blocks[middle:], whole, split, left)

    def _split_sequences(self, split: Sequence[tuple[Block, Applied]], whole: Computed) -> None:
        """Splits activations in lists of layers along dimension 1, or 0, where the step computes the same."""
        done: list[str] = []
        for found in layer_lists(self._module, split):
            if any(found.name.startswith(f"{name}.") for name in done):
                continue
            reason = self._keeps_whole(found.name)
            reasons = [] if reason is None else [reason]
            for dim, place in WAYS if reason is None else ():
                region = SequenceRegion(
                    self._module,
                    found,
                    self._group,
                    dim=dim,
                    gathers_at=place,
                    keeps_gathered=self._sequence_split == "keep",
                )
                self.regions.append(region)
                problem = self._problem(whole)
                if problem is None:
                    done.append(found.name)
                    self.notes.append(f"activations between the blocks of {found.name} are split along dimension {dim}")
                    break
                self.regions.pop().undo()
                reasons.append(problem)
            else:
                self.notes.append(f"activations between the blocks of {found.name} stay whole ({reasons[0]})")

    def _try(self, blocks: Sequence[Block], whole: Computed) -> tuple[list[Applied], str]:
        """Splits blocks of a kind in the first way that computes the same; or nothing, and why the first did not."""
        reasons = []
        for number in range(min(len(block.ways) for block in blocks)):
            applied, problem = self._apply(blocks, [block.ways[number] for block in blocks])
            if problem is None:
                problem = self._problem(whole)
            if problem is None:
                for each in applied:
                    each.keep()
                return applied, ""
            for each in reversed(applied):
                each.undo()
            reasons.append(problem)
        return [], reasons[0]

    def _apply(self, blocks: Sequence[Block], ways: Sequence[Way]) -> tuple[list[Applied], str | None]:
        applied: list[Applied] = []
        problem = None
        try:
            for block, way in zip(blocks, ways, strict=True):
                applied.append(Applied(self._module, block, way, self._group, self._wrap_logits))
        except ValueError as error:
            problem = str(error)
        return applied, self._first_of_ranks(problem)

    def _problem(self, whole: Computed) -> str | None:
        """Why the step does not compute what it did; None if it does."""
        problem = None
        try:
            with self._group.alone():
                self._compute()
        except Exception as error:  # whatever the user's code raises
            problem = _first_line(error)
        problem = self._first_of_ranks(problem)
        if problem is not None:
            return problem
        split = self._compute()
        problem = self._first_of_ranks(self._misplaced(whole.draws, split.draws))
        if problem is not None:
            return problem
        problem, differing = self._difference(whole, split)
        problem = self._first_of_ranks(problem)
        partial = self._partial(differing, split)
        if not partial:
            return problem
        # A whole parameter within a block, such as a norm of queries, or between blocks whose activations are split
        # along the sequence, gets a part of its gradient on each rank.
        for name in partial:
            self._group.all_reduce(split.gradients.setdefault(name, torch.zeros_like(whole.gradients[name])), name)
        remaining = self._first_of_ranks(self._difference(whole, split)[0])
        if remaining is not None:
            return problem
        for name in partial:
            self.summed[name] = self._parameters[name].register_hook(self._sum(name))  # type: ignore[no-untyped-call]
        return None

    def _misplaced(self, whole: Sequence[Draw], split: Sequence[Draw]) -> str | None:
        """What is wrong about the random numbers that ranks would draw on split layers; a collective of the group."""
        shapes = [draw.shape for draw in split[: len(whole)]] + [None] * (len(whole) - len(split))
        own = [len(whole) != len(split), *(draw.shape != shape for draw, shape in zip(whole, shapes, strict=True))]
        told = torch.tensor(own, dtype=torch.float32, device=self._device)
        differs, *are_parts = self._group.all_reduce(told, "random numbers").bool().tolist()
        return "random numbers are drawn in another number" if differs else misplaced(split, are_parts)

    def _partial(self, differing: set[str], split: Computed) -> list[str]:
        """Those of the whole parameters whose gradients differ between the ranks of the group; a collective."""
        names = sorted(set().union(*self._gather(differing)))
        if not names:
            return []
        own = [_checksum(split.gradients.get(name)) for name in names]
        told = torch.tensor([own], dtype=torch.float64, device=self._parameters[names[0]].device)
        bounds = [(rank, rank + 1) for rank in range(self._group.size)]
        of_ranks = self._group.all_gather(told, 0, bounds, "checksums of gradients")
        differ = (of_ranks != of_ranks[0]).any(0).tolist()
        found = [name for name, differs in zip(names, differ, strict=True) if differs]
        return sorted(set().union(*self._gather(found)))

    def _sum(self, name: str) -> Callable[[Tensor], Tensor]:
        return lambda gradient: self._group.all_reduce(gradient.detach().clone().contiguous(), f"{name} gradient")

    def _first_of_ranks(self, problem: str | None) -> str | None:
        return next(filter(None, self._gather(problem)), None)

    def _compute(self) -> Computed:
        self._begin_step()
        with (
            self._traceless(),
            self._no_dropout() as random,
            taking_gradients(self._parameters) as gradients,
        ):
            traffic: list[Sent] = []
            with self._observed("forward", traffic):
                loss = self._loss()
            draws = list(random.draws)
            with self._observed("backward", traffic):
                _backward(loss)
        self._begin_step()
        with self._traceless(), self._no_dropout():  # and with gradients: a step may take some itself
            self._module.eval()
            evaluated = float(self._loss().detach())
        return Computed(float(loss.detach()), gradients, evaluated, traffic, draws)

    def _no_dropout(self) -> NoDropout:
        regions = self._group.random, self._group.sequence_random
        return NoDropout(self._device, lambda: any(region.is_open for region in regions))

    def _begin_step(self) -> None:
        """A step begins with whole activations; the one before may have raised an error where they are split."""
        self._group.random.forget()
        self._group.sequence_random.forget()
        for region in self.regions:
            region.begin_step()

    @contextmanager
    def _observed(self, direction: Direction, traffic: list[Sent]) -> Iterator[None]:
        self._group.observer = lambda *sent: traffic.append(Sent(direction, *sent))
        try:
            yield
        finally:
            self._group.observer = None

    def _loss(self) -> Tensor:
        loss = self._step()
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(f"training_step returns {type(loss).__name__}, and no loss that could be compared")
        return loss.as_subclass(Tensor)

    def _difference(self, whole: Computed, split: Computed) -> tuple[str | None, set[str]]:
        """What differs; and the whole parameters whose gradients differ, however small, if nothing else does."""
        for what, first, second in (
            ("the loss", whole.loss, split.loss),
            ("the loss in evaluation mode", whole.evaluated, split.evaluated),
        ):
            if not math.isnan(first) and not math.isclose(first, second, rel_tol=self._rtol):
                return f"{what} becomes {second:.6g} instead of {first:.6g}", set()
        reference = {name: self._own_part(self._parameters[name], g) for name, g in whole.gradients.items()}
        largest = max((norm_of(gradient) for gradient in reference.values()), default=0.0)
        errors: dict[str, float] = {}
        differing: set[str] = set()
        for name in {**reference, **split.gradients}:
            gradient = reference.get(name)
            norm = norm_of(gradient)
            size = max(norm, SMALLEST * largest)
            error = norm_of(gradient, split.gradients.get(name))
            if not error <= self._rtol * size:
                errors[name] = error / size if size else math.inf
            if not error <= self._rtol * norm and split_of(self._parameters[name]) is None and name in reference:
                differing.add(name)
        if not errors:
            return None, differing
        worst = max(errors, key=lambda name: errors[name])
        problem = f"the gradient of {worst} becomes another one (relative difference {errors[worst]:.2g})"
        return problem, differing if differing.issuperset(errors) else set()


def _backward(loss: Tensor) -> None:
    """``loss.backward()`` without leaving the modes that are on: checkpoints would compute again with dropout."""
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward(
        (loss,), (torch.ones_like(loss),), False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _checksum(gradient: Tensor | None) -> int:
    return -1 if gradient is None else zlib.crc32(gradient.contiguous().flatten().view(torch.uint8).numpy())  # type: ignore[arg-type]


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"[:200]


def split_blocks(module: Module, blocks: Sequence[Block], traffic: Sequence[Sent], num_ranks: int) -> SplitBlocks:
    """The row of a plan for blocks of a kind.

    Args:
        module: with the blocks split.
        blocks: of one kind.
        traffic: of a step.
        num_ranks: among which each layer is split.
    """
    parts = dict(module.named_modules())
    parameters = {p for block in blocks for name in block.roles for p in parts[name].parameters()}
    block = blocks[0]
    found: dict[tuple[Direction, str], list[int]] = {}
    output = 0
    for each in traffic:
        name = each.layer.partition(" ")[0]
        if any(name == layer or name.startswith(f"{layer}.") for layer in block.roles):
            found.setdefault((each.direction, each.operation), []).append(each.size_bytes)
        if each.direction == "forward" and block.roles.get(each.layer) in ("row", "vocab", "attention"):
            output = each.size_bytes
    return SplitBlocks(
        block.shape,
        block.kind,
        len(blocks),
        sum(_whole_bytes(parameter) for parameter in parameters),
        sum(parameter.nbytes for parameter in parameters),
        [
            BlockTraffic(direction, operation, len(sizes), sum(sizes), sent_share(operation, num_ranks) * sum(sizes))
            for (direction, operation), sizes in found.items()
        ],
        output,
    )


def _whole_bytes(parameter: Tensor) -> int:
    split = split_of(parameter)
    shape = parameter.shape if split is None else split.whole_shape(parameter)
    return math.prod(shape) * parameter.element_size()
