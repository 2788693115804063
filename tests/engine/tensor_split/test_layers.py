"""Layers that are split over ranks compute what whole ones compute, and communicate once in each pass."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_multigpu.engine.tensor_split.layers import (
    BlockInput,
    ColumnSplitLinear,
    RowSplitLinear,
    VocabSplitEmbedding,
)
from lightning_multigpu.engine.tensor_split.parameter_split import ParameterSplit
from lightning_multigpu.engine.tensor_split.parts import PartLayout, SplitTensor, local
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup
from tests.engine.tensor_split.shared import assert_equal, assert_parts, counts, tensor_group
from tests.world import World

LENGTH, WIDTH, HIDDEN = 7, 6, 10


class Block(nn.Module):
    """A column layer, or two on the same input, and a row layer."""

    def __init__(self, up: nn.Module, gate: nn.Module | None, down: nn.Module) -> None:
        super().__init__()
        self.up, self.gate, self.down = up, gate, down

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(self.up(x))
        return self.down(hidden if self.gate is None else hidden * self.gate(x))  # type: ignore[no-any-return]


def _linear(kind: str, inputs: int, outputs: int) -> nn.Module:
    if kind == "conv1d":
        from transformers.pytorch_utils import Conv1D  # takes seconds

        return Conv1D(outputs, inputs)
    return nn.Linear(inputs, outputs, bias=kind != "no bias")


def _pair(kind: str, group: TensorGroup) -> tuple[Block, Block]:
    """A whole block and the same one, split in place."""
    torch.manual_seed(0)
    gate = _linear(kind, WIDTH, HIDDEN) if kind == "gated" else None
    whole = Block(_linear(kind, WIDTH, HIDDEN), gate, _linear(kind, HIDDEN, WIDTH))
    split = copy.deepcopy(whole)
    parameters = list(split.parameters())
    up = ColumnSplitLinear.of(split.up, group, name="up")
    if split.gate is not None:
        last = ColumnSplitLinear.of(split.gate, group, name="gate")
        up.block_input = last.block_input = BlockInput(group, "input", last)
    RowSplitLinear.of(split.down, group, name="down")
    assert all(old is new for old, new in zip(parameters, split.parameters(), strict=True))
    return whole, split


def _compute(kinds: Sequence[str]) -> list[dict[tuple[str, str], int]]:
    collectives = []
    with tensor_group() as (group, meter):
        for kind in kinds:
            whole, split = _pair(kind, group)
            meter.end_step()
            x, weights = torch.randn(3, LENGTH, WIDTH, requires_grad=True), torch.randn(3, LENGTH, WIDTH)
            own = x.detach().clone().requires_grad_()
            expected, actual = whole(x), split(own)
            for output in (expected, actual):
                (output * weights).sum().backward()
            collectives.append(counts(meter))
            assert_equal(actual, expected)
            assert own.grad is not None
            assert x.grad is not None
            assert_equal(own.grad, x.grad)
            assert_parts(split, whole, group)
    return collectives


KINDS = {2: ("linear", "no bias", "gated", "conv1d"), 4: ("linear", "no bias", "gated")}


def test_a_block_sums_once_forward_and_once_back(world: World) -> None:
    kinds = KINDS[world.num_ranks]
    for found in world.run(_compute, kinds):
        for kind, collectives in zip(kinds, found, strict=True):
            ends = ("tensor input" if kind == "gated" else "tensor up", "tensor down")
            assert collectives == {("all_reduce", end): 1 for end in ends}


def _change() -> None:
    with tensor_group() as (group, _), torch.no_grad():
        whole, split = _pair("gated", group)
        x = torch.randn(3, LENGTH, WIDTH)
        placed = PartLayout(ParameterSplit.even(WIDTH, group.size), group, "x").at(2)
        own = SplitTensor.of(placed.own(x), placed)  # which is gathered
        split.up(own)
        own.mul_(2)
        gate: Any = split.gate
        assert whole.gate is not None
        assert_equal(local(gate(own)).movedim(-1, 0), gate.part_layout.own(whole.gate(2 * x).movedim(-1, 0)))


def test_an_input_that_changes_in_place(world2: World) -> None:
    world2.run(_change)


def test_an_embedding_that_looks_at_all_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="max_norm cannot be split"):
        VocabSplitEmbedding.of(nn.Embedding(4, 2, max_norm=1.0), SimpleNamespace(rank=0, size=2))  # type: ignore[arg-type]


def _embedding(num_rows: int) -> dict[tuple[str, str], int]:
    with tensor_group() as (group, meter):
        torch.manual_seed(1)
        whole = nn.Embedding(num_rows, 4, num_rows - 1)
        torch.manual_seed(1)
        split = VocabSplitEmbedding.of(nn.Embedding(num_rows, 4, num_rows - 1), group, name="tokens")
        tokens = torch.randint(num_rows, (3, 5))
        outputs = [whole(tokens), split(tokens)]
        for output in outputs:
            output.pow(2).sum().backward()
        collectives = counts(meter)
        assert_equal(outputs[1], outputs[0])
        assert_parts(split, whole, group)
        return collectives


@pytest.mark.parametrize("num_rows", [11, 3])
def test_embedding(world: World, num_rows: int) -> None:
    for collectives in world.run(_embedding, num_rows):
        assert collectives == {("all_reduce", "tensor tokens"): 1}


class Scaled(nn.Embedding):
    """As Gemma has it."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 4 + self.weight.mean()


def _scaled() -> None:
    with tensor_group() as (group, _), group.showing(parts=False):
        torch.manual_seed(1)
        whole = Scaled(11, 4)
        split = copy.deepcopy(whole)
        VocabSplitEmbedding.of(split, group)
        tokens = torch.randint(11, (3, 5))
        outputs = [whole(tokens), split(tokens)]
        for output in outputs:
            output.pow(2).sum().backward()
        assert_equal(outputs[1], outputs[0])
        with group.showing(parts=True):
            assert_parts(split, whole, group)


def test_a_subclass_keeps_what_its_forward_adds(world: World) -> None:
    """Gemma's factor was lost: split embeddings had a forward of their own, whatever the class of the user."""
    world.run(_scaled)


def _raises(token: int) -> bool:
    """Whether this rank does; the collective is left out, in which the others would wait."""
    with tensor_group() as (group, _), group.alone():
        try:
            VocabSplitEmbedding.of(nn.Embedding(11, 4), group)(torch.tensor([1, token]))
        except IndexError:
            return True
        return False


@pytest.mark.parametrize("token", [-1, 11])
def test_an_unknown_token_raises_as_on_one_device(world2: World, token: int) -> None:
    """Each rank took it for a row of another one, and its embedding was zero."""
    assert world2.run(_raises, token) == [token < 0, token > 0]


def _gradient_of_a_gradient() -> None:
    with tensor_group() as (group, _):
        x = torch.randn(2, WIDTH, requires_grad=True)
        output = ColumnSplitLinear.of(nn.Linear(WIDTH, HIDDEN), group)(x)
        (gradient,) = torch.autograd.grad(output.pow(2).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()


def test_gradients_of_gradients_are_refused(world2: World) -> None:
    """They would lack the parts of other ranks."""
    world2.run(_gradient_of_a_gradient)
