"""Dropout: the same mask on all ranks outside of a split block, and different ones inside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

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


def _masks(reentrant: bool | None) -> dict[str, Any]:
    """A block with dropout inside and after it, twice, with and without recomputation."""
    with tensor_group() as (group, _):
        torch.manual_seed(0)
        inside, after = Noting(), Noting()
        block = nn.Sequential(
            ColumnSplitLinear.of(nn.Linear(8, 16), group),
            inside,
            RowSplitLinear.of(nn.Linear(16, 8), group),
            after,
        )
        x = torch.randn(4, 8, requires_grad=True)
        for _ in range(2):
            y = block(x) if reentrant is None else checkpoint(block, x, use_reentrant=reentrant)
            y.sum().backward()
        return {"inside": inside.masks, "after": after.masks, "state": torch.get_rng_state()}


def test_masks_of_blocks(world2: World) -> None:
    first, second = world2.run(_masks, None)
    for call in range(2):
        assert torch.equal(first["after"][call], second["after"][call])
        assert not torch.equal(first["inside"][call], second["inside"][call])
    assert torch.equal(first["state"], second["state"])
    assert not torch.equal(*first["inside"])


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
def test_an_activation_checkpoint_draws_the_same_again(world2: World, reentrant: bool) -> None:
    """The mask of the recomputation is that of the forward pass, and numbers after it go on as without one."""
    plain = world2.run(_masks, None)
    for expected, result in zip(plain, world2.run(_masks, reentrant), strict=True):
        first, second = expected["inside"]
        assert all(map(torch.equal, result["inside"], (first, first, second, second)))
        assert torch.equal(result["state"], expected["state"])
