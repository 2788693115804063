"""Which part of a parameter each rank has."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lightning_multigpu.engine.tensor_split.parameter_split import ParameterSplit, split_of, whole_size
from lightning_multigpu.engine.tensor_split.parts import PartLayout, cut, local, make_whole


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("size", "sections", "unit"), [(7, (), 1), (24, (12, 6, 6), (4, 2, 2)), (12, (4, 8), 4), (3, (), 3)]
)
def test_parts_make_the_whole(size: int, sections: tuple[int, ...], unit: int, num_ranks: int) -> None:
    for dim in (0, 1):
        whole = torch.arange(size * 5.0).view(size, 5).movedim(0, dim)
        split = ParameterSplit.even(size, num_ranks, dim=dim, sections=sections, unit=unit)
        parts = [split.part(whole, rank) for rank in range(num_ranks)]
        assert [part.shape[dim] for part in parts] == [split.size(rank) for rank in range(num_ranks)]
        assert split.whole_size == size
        assert torch.equal(split.whole(parts), whole)


def test_each_section_is_cut_in_its_own_units() -> None:
    """Four heads of queries, two of keys and two of values, of two entries each: queries stay with their keys."""
    split = ParameterSplit.even(16, 2, sections=(8, 4, 4), unit=(4, 2, 2))
    assert split.ranges == (((0, 4), (8, 10), (12, 14)), ((4, 8), (10, 12), (14, 16)))
    assert split.part(torch.arange(16), 1).tolist() == [4, 5, 6, 7, 10, 11, 14, 15]


@pytest.mark.parametrize(
    ("size", "options"), [(10, {"sections": (4, 4)}), (10, {"unit": 4}), (8, {"sections": (4, 4), "unit": (2,)})]
)
def test_sections_have_to_fit(size: int, options: dict[str, object]) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{size} entries cannot be cut into sections of")):
        ParameterSplit.even(size, 2, **options)  # type: ignore[arg-type]


def test_a_cut_parameter_is_the_same_object() -> None:
    parameter = nn.Parameter(torch.arange(12.0).view(4, 3))
    parameter.grad = torch.ones(4, 3)
    split, group = ParameterSplit.even(4, 2), SimpleNamespace(rank=1, shows_parts=True)
    cut(parameter, PartLayout(split, group, "up"))  # type: ignore[arg-type]
    assert parameter.tolist() == [[6, 7, 8], [9, 10, 11]]
    assert parameter.grad is None
    assert split_of(parameter) is split
    assert (whole_size(parameter, 0), whole_size(parameter, 1)) == (4, 3)
    cut(parameter, PartLayout(ParameterSplit.even(4, 2), group, "head"))  # type: ignore[arg-type]  # a second layer
    assert local(parameter).shape == (2, 3)
    with pytest.raises(ValueError, match="two layers share cannot be cut in two ways"):
        cut(parameter, PartLayout(ParameterSplit.even(3, 2, dim=1), group, "up"))  # type: ignore[arg-type]
    make_whole(parameter, torch.zeros(4, 3))
    assert split_of(parameter) is None
    assert (type(parameter), parameter.shape) == (nn.Parameter, (4, 3))
