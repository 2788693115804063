"""Column layers of a block get their common input once, and sum up its gradient once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_multigpu.engine.tensor_split.block_input import BlockInput, sequence_placement
from lightning_multigpu.engine.tensor_split.layers import ColumnSplitLinear, RowSplitLinear
from lightning_multigpu.engine.tensor_split.parts import SplitTensor, local
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup
from tests.engine.tensor_split.shared import assert_equal, assert_parts, counts, tensor_group
from tests.world import World

LENGTH, WIDTH, HIDDEN = 7, 6, 10


class Gated(nn.Module):
    def __init__(self, gate: nn.Module, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.gate, self.up, self.down = gate, up, down

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.gate(x).sigmoid() * self.up(x))  # type: ignore[no-any-return]


def _pair(group: TensorGroup, kind: str) -> tuple[Gated, Gated, tuple[int, int]]:
    """A whole block, one that is split, and this rank's part of a sequence."""
    torch.manual_seed(0)
    whole = Gated(nn.Linear(WIDTH, HIDDEN), nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH))
    torch.manual_seed(0)
    dim = None if kind == "whole" else 1
    split = Gated(
        ColumnSplitLinear.of(nn.Linear(WIDTH, HIDDEN), group, name="gate"),
        ColumnSplitLinear.of(nn.Linear(WIDTH, HIDDEN), group, name="up"),
        RowSplitLinear.of(nn.Linear(HIDDEN, WIDTH), group, name="down"),
    )
    split.gate.entry = split.up.entry = BlockInput(group, "input", split.up)  # type: ignore[assignment]
    split.down.sequence_dim = dim  # type: ignore[assignment]
    return whole, split, (0, LENGTH) if kind == "whole" else group.bounds(LENGTH)[group.rank]


def _part(own: Tensor, group: TensorGroup, kind: str) -> Any:
    return own if kind == "whole" else SplitTensor.of(own, sequence_placement(1, LENGTH, group, "x"))


def _compute(kind: str) -> dict[tuple[str, str], int]:
    with tensor_group() as (group, meter):
        whole, split, (start, stop) = _pair(group, kind)
        x = torch.randn(3, LENGTH, WIDTH, requires_grad=True)
        own = x.detach()[:, start:stop].clone().requires_grad_()
        weights = torch.randn(3, LENGTH, WIDTH)
        expected, actual = whole(x), local(split(_part(own, group, kind)))
        (expected * weights).sum().backward()
        (actual * weights[:, start:stop]).sum().backward()
        found = counts(meter)
        assert_equal(actual, expected[:, start:stop])
        assert own.grad is not None
        assert x.grad is not None
        assert_equal(own.grad, x.grad[:, start:stop])
        assert_parts(split, whole, group)
        return found


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("whole", {("all_reduce", "input"): 1, ("all_reduce", "down"): 1}),
        (
            "part",
            {(way, name): 1 for way in ("all_gather", "reduce_scatter") for name in ("input", "down")},
        ),
    ],
)
def test_one_collective_for_all_column_layers(world: World, kind: str, expected: dict[tuple[str, str], int]) -> None:
    for found in world.run(_compute, kind):
        assert found == {(way, f"tensor {name}"): count for (way, name), count in expected.items()}


def _change() -> None:
    with tensor_group() as (group, _), torch.no_grad():
        whole, split, (start, stop) = _pair(group, "part")
        x = torch.randn(3, LENGTH, WIDTH)
        own = _part(x[:, start:stop].clone(), group, "part")
        split.gate(own)
        own.mul_(2)
        assert_equal(
            local(split.up(own)), split.up.placed.split.part(whole.up(2 * x).movedim(-1, 0), group.rank).movedim(0, -1)
        )


def test_an_input_that_changes_in_place(world2: World) -> None:
    world2.run(_change)
