"""Trials of blocks: whether a step that runs on split layers gathers what lies between them.

A step computes the same on split layers as on whole ones. It is worth it where it computes on parts: a block whose
outputs are gathered for an operation of the user's code stays whole, with that operation as the reason.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from lightning_multigpu.communication.metering.traffic import sent_share
from lightning_multigpu.engine.gradient_check import trained, without_gradients
from lightning_multigpu.engine.tensor_split.blocks import Applied, Block, Way
from lightning_multigpu.engine.tensor_split.parameter_split import split_of
from lightning_multigpu.engine.tensor_split.parts import user_line, whole
from lightning_multigpu.engine.tensor_split.sequence_region import DIMS, SequenceRegion, layer_lists
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup
from lightning_multigpu.planning.split_plan import BlockTraffic, Direction, SplitBlocks

_TRIES = 3
"""Steps in which blocks of a kind are tried: a part that one block lets out may be gathered in the next one."""


class Sent(NamedTuple):
    """A collective inside a split layer: its pass, operation, layer, and the bytes of the whole tensor."""

    direction: Direction
    operation: str
    layer: str
    size_bytes: int


class Computed(NamedTuple):
    """What a step sends, what it gathers of which layer, and the error that it raises."""

    traffic: list[Sent]
    gathered: dict[str, str]
    error: str | None


class Left(NamedTuple):
    """Blocks of a kind that stay whole, and why."""

    blocks: Sequence[Block]
    reason: str


class Trials:
    """Splits the blocks of a module in which a step computes on parts; a collective of all ranks.

    Args:
        module: whole, and the same on all ranks.
        group: the ranks among which blocks are split.
        step: runs the step and returns its loss.
        traceless: a block at whose end the module and random states are as before it.
        gather: returns the objects of all ranks, also of other groups, on every rank.
        sequence_split: split activations between blocks along the sequence: "keep" or "gather_again" says what column
            layers do about their gathered inputs in backward. None for whole activations.
        keeps_whole: why activations stay whole in a list of layers, by its name; None if they may be split.
        optimizes_manually: the step runs backward itself.

    Attributes:
        regions: layers between whose blocks activations are split along the sequence.
        notes: about ``sequence_split``, for the user.
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
        sequence_split: Literal["keep", "gather_again"] | None = None,
        keeps_whole: Callable[[str], str | None] = lambda name: None,
        optimizes_manually: bool = False,
    ) -> None:
        self._module = module
        self._group = group
        self._step = step
        self._traceless = traceless
        self._gather = gather
        self._sequence_split = sequence_split
        self._keeps_whole = keeps_whole
        self._is_manual = optimizes_manually
        self.regions: list[SequenceRegion] = []
        self.notes: list[str] = []
        self.traffic: list[Sent] = []

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
            ValueError: the step gives no loss.
        """
        split: list[tuple[Block, Applied]] = []
        left: list[Left] = []
        parameters = [p for p in self._module.parameters() if p.is_floating_point()]
        with order(self._module) as found:
            self._run([], {}, trains=False)
        called = self._gather(found)[0]
        gc.collect()  # a graph of earlier runs that lives in a cycle would keep the whole shapes of parameters
        with without_gradients(parameters), trained(parameters):  # a callback may unfreeze parameters later
            for find in searches:
                by_kind: dict[str, list[Block]] = {}
                for block in [] if split else find(called):
                    by_kind.setdefault(block.kind, []).append(block)
                for blocks in by_kind.values():
                    self._split(blocks, split, left)
            if self._sequence_split is not None:
                self._split_sequences(split)
            if split:
                self.traffic = self._compute().traffic
        return split, left

    def _split(self, blocks: Sequence[Block], split: list[tuple[Block, Applied]], left: list[Left]) -> None:
        """Splits blocks of a kind, each in the first way in which the step does not gather what it computes."""
        reasons: dict[int, str] = {}
        for number in range(min(len(block.ways) for block in blocks)):
            good, bad = self._try(blocks, number)
            split += good
            for block, reason in bad:
                reasons.setdefault(id(block), reason)
            blocks = [block for block, _ in bad]
            if not blocks:
                return
        for reason in dict.fromkeys(reasons[id(block)] for block in blocks):
            left.append(Left([block for block in blocks if reasons[id(block)] == reason], reason))

    def _try(self, blocks: Sequence[Block], number: int) -> tuple[list[tuple[Block, Applied]], list[tuple[Block, str]]]:
        """Splits blocks in one of their ways; returns those that stay split, and the others with the reasons."""
        applied, problem = self._apply(blocks, [block.ways[number] for block in blocks])
        good, bad = [*zip(blocks, applied, strict=False)], [(block, problem or "") for block in blocks if problem]
        for _ in range(_TRIES):
            if not good:
                return good, bad
            computed = self._compute()
            reasons = [computed.error or self._reason(block, computed) for block, _ in good]
            if not any(reasons):
                for _, each in good:
                    each.keep()
                return good, bad
            for (block, each), reason in reversed([*zip(good, reasons, strict=True)]):
                if reason:
                    each.undo()
                    bad.append((block, reason))
            good = [each for each, reason in zip(good, reasons, strict=True) if not reason]
        for block, each in reversed(good):
            each.undo()
            bad.append((block, bad[0][1]))
        return [], bad

    @staticmethod
    def _reason(block: Block, computed: Computed) -> str | None:
        if block.shape in ("vocabulary", "plan"):  # logits may be gathered; a plan is the user's wish
            return None
        return next((computed.gathered[name] for name in block.roles if name in computed.gathered), None)

    def _split_sequences(self, split: Sequence[tuple[Block, Applied]]) -> None:
        """Splits activations in lists of layers along dimension 1, or 0, where the step then gathers no more."""
        done: list[str] = []
        before = self._compute().gathered
        for found in layer_lists(self._module, split):
            if any(found.name.startswith(f"{name}.") for name in done):
                continue
            reason = self._keeps_whole(found.name)
            reasons = [] if reason is None else [reason]
            for dim in DIMS if reason is None else ():
                keeps = self._sequence_split == "keep"
                region = SequenceRegion(self._module, found, self._group, dim=dim, keeps_gathered=keeps)
                computed = self._compute()
                new = [text for name, text in computed.gathered.items() if name not in before]
                problem = computed.error or next(iter(new), None)
                if problem is None:
                    self.regions.append(region)
                    done.append(found.name)
                    self.notes.append(f"activations between the blocks of {found.name} are split along dimension {dim}")
                    break
                region.undo()
                reasons.append(problem)
            else:
                self.notes.append(f"activations between the blocks of {found.name} stay whole ({reasons[0]})")

    def _apply(self, blocks: Sequence[Block], ways: Sequence[Way]) -> tuple[list[Applied], str | None]:
        applied: list[Applied] = []
        problem = None
        try:
            for block, way in zip(blocks, ways, strict=True):
                applied.append(Applied(self._module, block, way, self._group))
        except ValueError as error:
            problem = str(error)
        problem = self._first_of_ranks(problem)
        if problem is not None:
            for each in reversed(applied):
                each.undo()
            applied = []
        return applied, problem

    def _first_of_ranks(self, problem: str | None) -> str | None:
        return next(filter(None, self._gather(problem)), None)

    def _compute(self) -> Computed:
        """Runs the step forward and backward; first without the other ranks, as an error may be that of one rank."""
        error = None
        try:
            with self._group.alone():
                self._run([], {})
        except Exception as raised:  # whatever the user's code raises
            error = f"{type(raised).__name__}: {str(raised).partition(chr(10))[0]}"[:200]
        error = self._first_of_ranks(error)
        traffic: list[Sent] = []
        gathered: dict[str, str] = {}
        if error is None:
            self._run(traffic, gathered)
        return Computed(traffic, gathered, error)

    def _run(self, traffic: list[Sent], gathered: dict[str, str], *, trains: bool = True) -> None:
        """Runs the step as in training, and as in evaluation, which may run layers that training leaves out."""

        def note(layer: str, operation: str) -> None:
            gathered.setdefault(layer, f"{operation} needs the outputs of all ranks: {user_line()}")

        on_gather, self._group.on_gather = self._group.on_gather, note
        parameters = [(parameter, parameter.requires_grad) for parameter in self._module.parameters()]
        try:
            with self._traceless(), self._group.showing(parts=False):
                with self._observed(traffic):
                    loss = self.loss()
                    if loss is not None and loss.requires_grad and trains:
                        loss.backward()  # type: ignore[no-untyped-call]
                self._module.eval()
                self.loss()
        finally:
            self._group.on_gather = on_gather
            for parameter, is_trained in parameters:
                parameter.grad = None
                parameter.requires_grad_(is_trained)  # a manual step that fails leaves other optimizers' frozen

    @contextmanager
    def _observed(self, traffic: list[Sent]) -> Iterator[None]:
        def note(*sent: Any) -> None:
            is_backward = torch._C._current_graph_task_id() != -1
            traffic.append(Sent("backward" if is_backward else "forward", *sent))

        self._group.observer = note
        try:
            yield
        finally:
            self._group.observer = None

    def loss(self) -> Tensor | None:
        """The loss of a step; None if the step has run backward itself."""
        loss = whole(self._step())
        if self._is_manual:
            return None
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(f"training_step returns {type(loss).__name__}, and no loss that could be differentiated")
        return loss.as_subclass(Tensor)


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
