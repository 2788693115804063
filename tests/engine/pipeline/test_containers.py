"""Tensors are found and replaced as torch's own pytree does it, whatever containers layers use."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from lightning_multigpu.engine.pipeline.splitting.placeholder import Placeholder
from lightning_multigpu.engine.pipeline.stages.containers import map_only, tensors_of
from lightning_multigpu.engine.pipeline.stages.layer_interception import Slot

Pair = namedtuple("Pair", "first second")
A, B, C = torch.ones(1), torch.nn.Parameter(torch.ones(2)), Placeholder(torch.ones(3), "a layer")

VALUES: list[Any] = [
    A,
    None,
    "text",
    (A, [B, {"c": C, "n": None}], 1.5),
    {"b": B, "a": A, "nested": {"c": [C]}},
    Pair(A, (B, Pair(C, None))),
    OrderedDict(b=B, a=[A]),
    [(), [], {}, True],
    (A, A, [A]),
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_finds_the_tensors_in_order(value: Any) -> None:
    expected = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    found = tensors_of(value)
    assert [id(tensor) for tensor in found] == [id(tensor) for tensor in expected]


@pytest.mark.parametrize("kind", [Tensor, Placeholder])
@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_replaces_what_is_of_a_kind(value: Any, kind: Any) -> None:
    replaced = map_only(kind, lambda tensor: ("new", id(tensor)), value)
    expected = tree_map_only(kind, lambda tensor: ("new", id(tensor)), value)
    assert type(replaced) is type(expected)
    assert repr(replaced) == repr(expected)


def test_what_travels_is_put_back_in_its_place() -> None:
    structure = (Slot(1), Pair([Slot(0)], None))
    assert map_only(Slot, lambda slot: 10 + slot.index, structure) == (11, Pair([10], None))
