"""Layers that are split over ranks compute what whole ones compute, and communicate once in each pass."""

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_multigpu.engine.tensor_split.layers import (
    BlockInput,
    ColumnSplitLinear,
    RowSplitLinear,
    VocabSplitEmbedding,
)
from lightning_multigpu.engine.tensor_split.parameter_split import ParameterSplit
from lightning_multigpu.engine.tensor_split.parts import PartLayout, SplitTensor, local
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup
from tests.engine.tensor_split.shared import assert_equal, assert_parts, counts, gradient_of, tensor_group
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


KINDS = {2: ("linear", "no bias", "gated", "conv1d"), 4: ("linear", "no bias", "gated")}


def _compute() -> None:
    with tensor_group() as (group, meter):
        for kind in KINDS[group.size]:
            whole, split = _pair(kind, group)
            meter.end_step()
            x, weights = torch.randn(3, LENGTH, WIDTH, requires_grad=True), torch.randn(3, LENGTH, WIDTH)
            own = x.detach().clone().requires_grad_()
            expected, actual = whole(x), split(own)
            for output in (expected, actual):
                (output * weights).sum().backward()
            ends = ("tensor input" if kind == "gated" else "tensor up", "tensor down")
            assert counts(meter) == {("all_reduce", end): 1 for end in ends}
            assert_equal(actual, expected)
            assert_equal(gradient_of(own), gradient_of(x))
            assert_parts(split, whole, group)


def test_a_block_sums_once_forward_and_once_back(world: World) -> None:
    world.run(_compute)


def an_input_that_changes_in_place() -> None:
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


def test_an_embedding_that_looks_at_all_rows_is_refused() -> None:
    with pytest.raises(ValueError, match="max_norm cannot be split"):
        VocabSplitEmbedding.of(nn.Embedding(4, 2, max_norm=1.0), mock.Mock(rank=0, size=2))


class Scaled(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) * 4 + self.weight.mean()


def _embedding(kind: type[nn.Embedding], num_rows: int) -> dict[tuple[str, str], int]:
    with tensor_group() as (group, meter), group.showing(parts=kind is not Scaled):
        torch.manual_seed(1)
        whole = kind(num_rows, 4, num_rows - 1)
        split = VocabSplitEmbedding.of(copy.deepcopy(whole), group, name="tokens")
        tokens = torch.randint(num_rows, (3, 5))
        outputs = [whole(tokens), split(tokens)]
        for output in outputs:
            output.pow(2).sum().backward()
        collectives = counts(meter)
        assert_equal(outputs[1], outputs[0])
        with group.showing(parts=True):
            assert_parts(split, whole, group)
        return collectives


@pytest.mark.parametrize(("kind", "num_rows"), [(nn.Embedding, 11), (nn.Embedding, 3), (Scaled, 11)])
def test_embedding(world: World, kind: type[nn.Embedding], num_rows: int) -> None:
    """Gemma's factor was lost: split embeddings had a forward of their own, whatever the class of the user."""
    for collectives in world.run(_embedding, kind, num_rows):
        assert kind is Scaled or collectives == {("all_reduce", "tensor tokens"): 1}


@pytest.mark.parametrize(("rank", "token"), [(0, -1), (1, 11)])
def test_an_unknown_token_raises_as_on_one_device(rank: int, token: int) -> None:
    """Each rank took it for a row of another one, and its embedding was zero."""
    split = VocabSplitEmbedding.of(nn.Embedding(11, 4), mock.Mock(rank=rank, size=2))
    with pytest.raises(IndexError):
        split(torch.tensor([1, token]))


def gradients_of_gradients_are_refused() -> None:
    """They would lack the parts of other ranks."""
    with tensor_group() as (group, _):
        x = torch.randn(2, WIDTH, requires_grad=True)
        output = ColumnSplitLinear.of(nn.Linear(WIDTH, HIDDEN), group)(x)
        (gradient,) = torch.autograd.grad(output.pow(2).sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()


@pytest.mark.parametrize("check", [an_input_that_changes_in_place, gradients_of_gradients_are_refused])
def test_on_ranks(world2: World, check: Callable[[], None]) -> None:
    world2.run(check)


class Noting(nn.Module):
    """Dropout of ones; notes its masks."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        mask = F.dropout(torch.ones_like(x), 0.5, self.training)
        self.masks.append(local(mask))
        return x * mask


def _masks(reentrant: bool | None) -> dict[str, Any]:
    """A block with dropout inside and after it, twice, with and without recomputation."""
    with tensor_group() as (group, _):
        torch.manual_seed(0)
        inside, after = Noting(), Noting()
        block = nn.Sequential(
            ColumnSplitLinear.of(nn.Linear(8, 16), group), inside, RowSplitLinear.of(nn.Linear(16, 8), group), after
        )
        x = torch.randn(4, 8, requires_grad=True)
        for _ in range(2):
            y = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
            y.sum().backward()
        return {"inside": inside.masks, "after": after.masks, "state": torch.get_rng_state()}


def test_masks_of_blocks(world2: World) -> None:
    """The mask of a recomputation is that of the forward pass, and numbers after it go on as without one."""
    plain = first, second = world2.run(_masks, None)
    for call in range(2):
        assert torch.equal(first["after"][call], second["after"][call])
        assert not torch.equal(first["inside"][call], second["inside"][call])
    assert torch.equal(first["state"], second["state"])
    assert not torch.equal(*first["inside"])
    for reentrant in (True, False):
        for expected, result in zip(plain, world2.run(_masks, reentrant), strict=True):
            one, other = expected["inside"]
            assert all(map(torch.equal, result["inside"], (one, one, other, other)))
            assert torch.equal(result["state"], expected["state"])
