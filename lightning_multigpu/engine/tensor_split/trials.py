"""Trials of blocks: whether a step that runs on split layers gathers what lies between them.

A step computes the same on split layers as on whole ones. It is worth it where it computes on parts: a block whose
outputs are gathered for an operation of the user's code stays whole, with that operation as the reason. Each rank tries
by itself, as if the parts of the others were zeros: values do not matter, and an error may be that of one rank.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from torch import Tensor
from torch.nn import Module

from lightning_multigpu.engine.errors import error_of_users
from lightning_multigpu.engine.replaced_attributes import replaced
from lightning_multigpu.engine.step_state import without_gradients
from lightning_multigpu.engine.tensor_split.blocks import Applied, Block, order_of_calls
from lightning_multigpu.engine.tensor_split.parameter_split import split_of
from lightning_multigpu.engine.tensor_split.parts import local, user_line, whole
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup
from lightning_multigpu.planning.split_plan import SplitBlocks


class TracelessStep:
    """A module's training step for dry runs on the ranks that split its layers.

    Args:
        module: the same on all ranks, as whole tensors.
        step: runs the step and returns its loss.
        traceless: a block at whose end the module and random states are as before it.
        gather: returns the objects of all ranks, also of other groups, on every rank.
        optimizes_manually: the step runs backward itself.
    """

    def __init__(
        self,
        module: Module,
        group: TensorGroup,
        step: Callable[[], Any],
        *,
        traceless: Callable[[], AbstractContextManager[None]],
        gather: Callable[[Any], list[Any]],
        optimizes_manually: bool = False,
    ) -> None:
        self.module, self.group, self.gather = module, group, gather
        self._step, self._traceless, self._is_manual = step, traceless, optimizes_manually

    @contextmanager
    def running(self) -> Iterator[None]:
        """Within the block steps run on whole parameters without gradients; at its end all but weights is restored."""
        restoring = without_gradients(self.module.parameters())
        with self.group.showing(parts=True), restoring, self._traceless(), self.group.showing(parts=False):
            yield

    def forward(self) -> Tensor | None:
        """The loss of a step; None if the step has run backward itself.

        Raises:
            ValueError: the step gives no loss.
        """
        loss = whole(self._step())
        if self._is_manual:
            return None
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise ValueError(f"training_step returns {type(loss).__name__}, and no loss that could be differentiated")
        return loss.as_subclass(Tensor)

    def forward_and_backward(self) -> None:
        """Runs the step, and the backward pass of its loss."""
        loss = self.forward()
        if loss is not None and loss.requires_grad:
            loss.backward()  # type: ignore[no-untyped-call]

    def first_of_ranks(self, problem: str) -> str:
        """The problem of the first rank that has one; a collective."""
        return next(filter(None, self.gather(problem)), "")


class Trials:
    """Splits the blocks of a module in which a step computes on parts; a collective of all ranks."""

    def __init__(self, step: TracelessStep) -> None:
        self._step, self._module, self._group = step, step.module, step.group
        self.split: list[tuple[Block, Applied]] = []
        self.left: list[tuple[Block, str]] = []  # those that stay whole, and why

    def run(self, find: Callable[[dict[str, int]], list[Block]]) -> None:
        """Splits the blocks that a search finds by the order in which layers run.

        Raises:
            ValueError: the step gives no loss.
        """
        with order_of_calls(self._module) as found, self._step.running():
            self._step.forward()
            self._module.eval()  # which may run layers that training leaves out
            self._step.forward()
        called = self._step.gather(found)[0]
        gc.collect()  # a graph of earlier runs that lives in a cycle would keep the whole shapes of parameters
        by_kind: dict[str, list[Block]] = {}
        for block in find(called):
            by_kind.setdefault(block.kind, []).append(block)
        for blocks in by_kind.values():
            self._split(blocks)

    def _split(self, blocks: list[Block]) -> None:
        """Splits blocks of a kind, each in the first way in which the step does not gather what it computes."""
        reasons: dict[int, str] = {}
        for number in range(min(len(block.ways) for block in blocks)):
            applied: list[tuple[Block, Applied]] = []
            problems: dict[int, str] = {}
            try:
                for block in blocks:
                    applied.append((block, Applied(self._module, block, block.ways[number], self._group)))
            except ValueError as error:
                problems = dict.fromkeys(map(id, blocks), str(error))
            while True:  # a part that one block lets out may be gathered in the next one
                for block, each in reversed(applied):
                    if id(block) in problems:
                        each.undo()
                applied = [pair for pair in applied if id(pair[0]) not in problems]
                found = self._problems(applied)
                if not found:
                    break
                problems |= found
            for _, each in applied:
                each.keep()
            self.split += applied
            blocks = [block for block in blocks if id(block) in problems]
            reasons = problems | reasons
        self.left += [(block, reasons[id(block)]) for block in blocks]

    def _problems(self, applied: Sequence[tuple[Block, Applied]]) -> dict[int, str]:
        """Why split blocks have to stay whole: a step raises an error, or gathers what they compute."""
        gathered, error = self._compute() if applied else ({}, "")
        found = {}
        for block, _ in applied:
            # Logits may be gathered; a plan is the user's wish.
            may_gather = block.shape in ("vocabulary", "plan")
            names = [] if may_gather else [name for name in block.roles if name in gathered]
            if error or names:
                found[id(block)] = error or gathered[names[0]]
        return found

    def _compute(self) -> tuple[dict[str, str], str]:
        """What a step gathers of which layer, as in training and in evaluation, and the error that it raises."""
        gathered: dict[str, str] = {}
        error = ""

        def note(layer: str, operation: str) -> None:
            gathered.setdefault(layer, f"{operation} needs the outputs of all ranks: {user_line()}")

        with replaced(self._group, on_gather=note), self._group.alone():
            try:
                with self._step.running():
                    self._step.forward_and_backward()
                    self._module.eval()
                    self._step.forward()
            except Exception as raised:
                error = error_of_users(raised)
        ranks = self._step.gather((gathered, error))
        first = next((each for each in ranks if each[1]), None)
        return first or ({name: text for found, _ in reversed(ranks) for name, text in found.items()}, "")


def rows_of_plan(
    module: Module, split: Sequence[tuple[Block, Applied]], left: Sequence[tuple[Block, str]]
) -> list[SplitBlocks]:
    """The rows of a plan: for split blocks of a kind, and for those that stay whole for the same reason.

    Whole blocks have their full names if other blocks of their kind are split.
    """
    parts, split_kinds = dict(module.named_modules()), {block.kind for block, _ in split}
    by_row: dict[tuple[str, str], list[Block]] = {}
    for block, reason in [*((block, "") for block, _ in split), *left]:
        by_row.setdefault((block.kind, reason), []).append(block)
    rows = []
    for (kind, reason), blocks in by_row.items():
        names = ", ".join(block.name for block in blocks) if reason and kind in split_kinds else kind
        parameters = {p for block in blocks for name in block.roles for p in parts[name].parameters()}
        sizes = sum(map(_whole_bytes, parameters)), sum(local(parameter).nbytes for parameter in parameters)
        rows.append(SplitBlocks(blocks[0].shape, names, len(blocks), *sizes, reason))
    return rows


def _whole_bytes(parameter: Tensor) -> int:
    split = split_of(parameter)
    shape = parameter.shape if split is None else split.whole_shape(local(parameter))
    return math.prod(shape) * parameter.element_size()
