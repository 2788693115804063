"""Dropout: the same mask on all ranks outside of a split block, and different ones inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_multigpu.engine.tensor_split.attention import SplitMultiheadAttention
from lightning_multigpu.engine.tensor_split.cross_entropy import split_cross_entropy
from lightning_multigpu.engine.tensor_split.layers import ColumnSplitLinear, RowSplitLinear
from lightning_multigpu.engine.tensor_split.parts import local
from tests.engine.tensor_split.shared import tensor_group
from tests.world import World


class Noting(nn.Module):
    """Dropout of ones; notes its masks."""

    def __init__(self) -> None:
        super().__init__()
        self.masks: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        mask = F.dropout(torch.ones_like(x), 0.5, self.training)
        self.masks.append(local(mask))
        return x * mask


def _masks(training: bool, reentrant: bool | None) -> dict[str, Any]:
    """A block with dropout inside and after it, twice, with and without recomputation."""
    with tensor_group() as (group, _):
        torch.manual_seed(0)
        inside, after = Noting(), Noting()
        block = nn.Sequential(
            ColumnSplitLinear.of(nn.Linear(8, 16), group),
            inside,
            RowSplitLinear.of(nn.Linear(16, 8), group),
            after,
        ).train(training)
        x = torch.randn(4, 8, requires_grad=True)
        for _ in range(2):
            y = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
            y.sum().backward()
        return {"inside": inside.masks, "after": after.masks, "state": torch.get_rng_state()}


def _same(results: list[dict[str, Any]], place: str, call: int) -> bool:
    return torch.equal(results[0][place][call], results[1][place][call])


def test_masks_of_blocks(world2: World) -> None:
    results = world2.run(_masks, True, None)
    assert [_same(results, "after", call) for call in range(2)] == [True, True]
    assert [_same(results, "inside", call) for call in range(2)] == [False, False]
    assert torch.equal(results[0]["state"], results[1]["state"])
    assert not torch.equal(results[0]["inside"][0], results[0]["inside"][1])


def test_evaluation_draws_nothing(world2: World) -> None:
    torch.manual_seed(0)
    for result in world2.run(_masks, False, None):
        assert all(mask.eq(1).all() for mask in result["inside"])


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_an_activation_checkpoint_draws_the_same_again(world2: World, reentrant: bool) -> None:
    """The mask of the recomputation is that of the forward pass, and numbers after it go on as without one."""
    plain = world2.run(_masks, True, None)
    for expected, result in zip(plain, world2.run(_masks, True, reentrant), strict=True):
        forward, again, second_forward, second_again = result["inside"]
        assert torch.equal(forward, again)
        assert torch.equal(second_forward, second_again)
        assert torch.equal(forward, expected["inside"][0])
        assert torch.equal(second_forward, expected["inside"][1])
        assert torch.equal(result["state"], expected["state"])


def _dropped_weights() -> Tensor:
    with tensor_group() as (group, _):
        torch.manual_seed(0)
        attention = SplitMultiheadAttention.of(nn.MultiheadAttention(8, 4, dropout=0.5, batch_first=True), group)
        x = torch.randn(2, 6, 8)
        _, weights = attention(x, x, x)
        assert attention.training
        own = torch.rand(4)
        assert weights is not None
        return torch.cat([own, weights.flatten()])


def test_dropout_of_attention(world2: World) -> None:
    first, second = world2.run(_dropped_weights)
    assert torch.equal(first, second)  # the sum over all heads, and the numbers after it
    # Each head has a mask of its own: with the same on all ranks a weight would be zero more often.
    assert (first[4:] > 0).double().mean() > 0.85


def _masks_before_a_head() -> list[Tensor]:
    with tensor_group() as (group, _):
        torch.manual_seed(0)
        head = ColumnSplitLinear.of(nn.Linear(8, 6), group)
        masks = []
        for _ in range(2):
            masks.append(F.dropout(torch.ones(1, 8)))
            split_cross_entropy(local(head(masks[-1])), torch.tensor([3]), group, head.placed.split)
        return masks


def test_the_next_step_drops_the_same_on_all_ranks(world2: World) -> None:
    """Behind a head without a row layer the random numbers of ranks stayed different."""
    (first, second), others = world2.run(_masks_before_a_head)
    assert torch.equal(first, others[0])
    assert torch.equal(second, others[1])
