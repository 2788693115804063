"""Activations that are split along the sequence between the blocks of a list."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import nn

from lightning_multigpu.engine.tensor_split.parameter_split import ParameterSplit
from lightning_multigpu.engine.tensor_split.parts import PartLayout, SplitTensor
from lightning_multigpu.engine.tensor_split.sequence_region import LayerList, SequenceRegion


def test_the_end_of_a_list_gathers_in_the_name_of_the_list() -> None:
    """A row layer's output may be the last operation of the list; the gathering is not the row layer's."""
    layers, names = nn.ModuleList([nn.Identity()]), []

    def all_gather(part: Any, dim: int, bounds: Any, name: str) -> Any:
        names.append(name)
        return torch.cat([part, part], dim)

    group: Any = mock.Mock(rank=0, size=2, all_gather=all_gather)
    region = SequenceRegion(layers, LayerList("blocks", [*layers], []), group, dim=1)
    output = SplitTensor.of(torch.ones(3, 1, 4), PartLayout(ParameterSplit.even(2, 2), group, "blocks.0.down").at(1))
    found = region._end(layers[0], (), (output, None))
    assert found[0].shape == (3, 2, 4)
    assert found[1] is None
    assert names == ["blocks sequence gathered"]
    region.undo()
