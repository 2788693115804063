"""Blocks are found by the order in which layers run, and by the inputs that they share."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_multigpu.engine.tensor_split.blocks import find_blocks, find_pairs, order_of_calls


class Heads(nn.Module):
    """Layers of a list, each with its function, and two heads that get the same features."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.trunk = nn.ModuleList(nn.ModuleDict({"linear": nn.Linear(8, 8)}) for _ in range(num_layers))
        self.first, self.second = nn.Linear(8, 3), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.trunk:
            x = layer["linear"](x).tanh()  # type: ignore[index]
        return self.first(x) + self.second(x)  # type: ignore[no-any-return]


def test_layers_with_one_input_and_layers_in_a_row() -> None:
    """Three equal layers in a row looked like a gate, its value and the layer behind, and the trial refused them."""
    module = Heads(3)
    with order_of_calls(module) as called:
        module(torch.randn(2, 8))
    names = [f"trunk.{index}.linear" for index in range(3)]
    assert list(called) == [*names, "first", "second"]
    assert called["first"] == called["second"]
    assert len(set(called.values())) == 4
    assert all(block.shape == "first, second" for block in find_blocks(module, called))
    pairs = [list(block.roles) for block in find_pairs(module, called)]
    assert pairs == [names[:2], [names[2], "first"]]
