"""Layers that are split over ranks compute what whole ones compute, with the collectives that their tables promise."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from lightning_multigpu.engine.tensor_split.block_input import sequence_placement
from lightning_multigpu.engine.tensor_split.layers import ColumnSplitLinear, RowSplitLinear, VocabSplitEmbedding
from lightning_multigpu.engine.tensor_split.parameter_split import split_of
from lightning_multigpu.engine.tensor_split.parts import SplitTensor, local
from tests.engine.tensor_split.shared import assert_equal, assert_parts, counts, tensor_group
from tests.world import World

LENGTH, WIDTH, HIDDEN = 7, 6, 10


class Block(nn.Module):
    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(F.gelu(self.first(x)))  # type: ignore[no-any-return]


def _block(sequence_dim: int | None) -> dict[tuple[str, str], int]:
    with tensor_group() as (group, meter):
        torch.manual_seed(0)
        whole = Block(nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH))
        torch.manual_seed(0)
        split = Block(
            ColumnSplitLinear.of(nn.Linear(WIDTH, HIDDEN), group, name="up"),
            RowSplitLinear.of(nn.Linear(HIDDEN, WIDTH), group, name="down"),
        )
        split.second.sequence_dim = sequence_dim  # type: ignore[assignment]
        x = torch.randn(3, LENGTH, WIDTH, requires_grad=True)
        weights = torch.randn(3, LENGTH, WIDTH)
        expected = whole(x)
        (expected * weights).sum().backward()

        start, stop = (0, LENGTH) if sequence_dim is None else group.bounds(LENGTH)[group.rank]
        own = x.detach()[:, start:stop].clone().requires_grad_()
        placed = sequence_placement(1, LENGTH, group, "x")
        actual = split(own if sequence_dim is None else SplitTensor.of(own, placed))
        assert actual.shape == x.shape
        actual = local(actual)
        (actual * weights[:, start:stop]).sum().backward()
        collectives = counts(meter)
        assert_equal(actual, expected[:, start:stop])
        assert own.grad is not None
        assert x.grad is not None
        assert_equal(own.grad, x.grad[:, start:stop])
        assert_parts(split, whole, group)
        return collectives


def test_a_block_sums_once_forward_and_once_back(world: World) -> None:
    for collectives in world.run(_block, None):
        assert collectives == {("all_reduce", "tensor up"): 1, ("all_reduce", "tensor down"): 1}


def test_sequences_of_uneven_parts(world: World) -> None:
    ways = [(way, f"tensor {name}") for way in ("all_gather", "reduce_scatter") for name in ("up", "down")]
    for collectives in world.run(_block, 1):
        assert collectives == dict.fromkeys(ways, 1)


def _converted(first: nn.Module, second: nn.Module) -> None:
    with tensor_group() as (group, _):
        whole = copy.deepcopy(Block(first, second)).double()
        split = copy.deepcopy(whole)
        parameters = list(split.parameters())
        ColumnSplitLinear.of(split.first, group)
        RowSplitLinear.of(split.second, group)
        assert all(old is new for old, new in zip(parameters, split.parameters(), strict=True))
        x = torch.randn(2, 3, WIDTH, generator=torch.Generator().manual_seed(1))
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        outputs = [block(each) for block, each in zip((whole, split), inputs, strict=True)]
        for output in outputs:
            (output * torch.arange(output.numel()).view_as(output)).sum().backward()
        assert_equal(outputs[1], outputs[0])
        assert inputs[0].grad is not None
        assert inputs[1].grad is not None
        assert_equal(inputs[1].grad, inputs[0].grad)
        assert_parts(split, whole, group)


@pytest.mark.parametrize("kind", ["linear", "no bias", "conv1d"])
def test_layers_are_split_in_place(world: World, kind: str) -> None:
    first: nn.Module = nn.Linear(WIDTH, HIDDEN, bias=kind != "no bias")
    second: nn.Module = nn.Linear(HIDDEN, WIDTH, bias=kind != "no bias")
    if kind == "conv1d":
        first, second = Conv1D(HIDDEN, WIDTH), Conv1D(WIDTH, HIDDEN)
    world.run(_converted, first, second)


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


def _autocast() -> None:
    with tensor_group() as (group, _):
        torch.manual_seed(0)
        whole = Block(nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)).float()
        split = copy.deepcopy(whole)
        ColumnSplitLinear.of(split.first, group)
        RowSplitLinear.of(split.second, group)
        x = torch.randn(2, 3, WIDTH, dtype=torch.float32)
        outputs = []
        for block in (whole, split):
            with torch.autocast("cpu", torch.bfloat16):
                outputs.append(block(x))
            outputs[-1].float().sum().backward()
        assert outputs[0].dtype == outputs[1].dtype == torch.bfloat16
        torch.testing.assert_close(outputs[1], outputs[0], rtol=2e-2, atol=1e-2)
        for (name, parameter), expected in zip(split.named_parameters(), whole.parameters(), strict=True):
            assert parameter.grad is not None, name
            assert expected.grad is not None
            assert parameter.grad.dtype == torch.float32
            cut = split_of(parameter)
            own = expected.grad if cut is None else cut.part(expected.grad, group.rank)
            torch.testing.assert_close(parameter.grad, own, rtol=2e-2, atol=1e-2)


def test_autocast(world2: World) -> None:
    world2.run(_autocast)


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
