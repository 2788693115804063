"""Batches of every form are cut along their samples, and nothing is lost."""

import math
from collections import OrderedDict, UserDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from lightning_multigpu.engine.batch_size import tensors_in
from lightning_multigpu.engine.micro_batches import (
    checksum_of,
    cloned,
    combined_loss,
    disagreement,
    first_part,
    num_micro_batches_of,
    signature_of,
    split_batch,
    weights_of,
)


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


@dataclass
class Sample:
    image: Tensor
    label: Tensor


X, Y = torch.arange(10.0).reshape(5, 2), torch.arange(5)


@pytest.mark.parametrize(
    ("batch", "first"),
    [
        (X, lambda part: part),
        ([X, Y], lambda part: part[0]),
        (Pair(X, Y), lambda part: part.x),
        (OrderedDict(x=X, y=Y, names=list("abcde"), scale=2.0, none=None), lambda part: part["x"]),
        ({"deep": {"x": X}, "y": (Y,)}, lambda part: part["deep"]["x"]),
        (Sample(X, Y), lambda part: part.image),
    ],
)
def test_parts_keep_their_form(batch: Any, first: Any) -> None:
    parts = split_batch(batch, 3)
    assert all(type(part) is type(batch) for part in parts)
    assert [len(first(part)) for part in parts] == [2, 2, 1]
    assert torch.equal(torch.cat([first(part) for part in parts]), X)


def test_what_is_no_sample_goes_to_every_part() -> None:
    parts = split_batch({"x": X, "names": list("abcde"), "scale": 2.0, "scalar": torch.tensor(3.0)}, 2)
    of_parts = [(part["names"], part["scale"], float(part["scalar"])) for part in parts]
    assert of_parts == [(["a", "b", "c"], 2.0, 3.0), (["d", "e"], 2.0, 3.0)]


def test_what_cannot_be_cut_is_named() -> None:
    with pytest.raises(ValueError, match=r"batch\['mask'\] has the shape \(2, 2\), .* has 5 samples: .*as a buffer"):
        split_batch({"x": X, "mask": torch.ones(2, 2)}, 2)
    with pytest.raises(ValueError, match=r"batch\[1\] is a object, which cannot be cut into parts: use"):
        split_batch([X, object()], 2)
    assert split_batch([X, object()], 1)[0][0] is X


def test_no_more_parts_than_samples() -> None:
    found = [num_micro_batches_of(batch, number) for batch, number in (([X], 4), ([X], 9), ("text", 4))]
    assert found == [4, 5, 1]


def test_weights() -> None:
    parts = split_batch([X, Y], 3)
    assert weights_of(parts, "mean") == pytest.approx([0.4, 0.4, 0.2])
    assert weights_of(parts, "sum") == [1.0, 1.0, 1.0]
    assert weights_of(parts, lambda part: float(part[1].sum())) == pytest.approx([0.1, 0.5, 0.4])
    for weight in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"loss_reduction returned {weight} for a micro-batch.*0 or more"):
            weights_of(parts, lambda part: weight)  # noqa: B023


def test_a_packed_sequence_is_cloned() -> None:
    """A named tuple was made again from one tuple of its fields, which PackedSequence does not take."""
    packed = pack_sequence([X[:2], X], enforce_sorted=False)
    copy = cloned(packed)
    assert type(copy) is PackedSequence
    assert all(torch.equal(mine, other) for mine, other in zip(copy, packed, strict=True))
    assert copy.data.data_ptr() != packed.data.data_ptr()


def test_an_object_is_cloned_with_what_it_derives() -> None:
    """A batch on which the step works in place is computed twice, as a copy."""
    derived = Derived(X.clone())
    derived.doubled.add_(1)
    copy = cloned(derived)
    copy.x.mul_(0.5)
    assert torch.equal(derived.x, X)
    assert torch.equal(copy.doubled, 2 * X + 1)


def test_kinds_and_checksums() -> None:
    assert signature_of([X, Y]) == signature_of([X + 1, Y]) != signature_of([X[:4], Y[:4]])
    assert checksum_of([X, Y]) == checksum_of([X.clone(), Y])
    assert len({checksum_of(b) for b in ([X, Y], [Y, X], [X + 1, Y], [X.reshape(2, 5), Y], [X.flip(0), Y])}) == 5
    large = torch.zeros(1 << 20)
    changed = large.clone()
    changed[::3] = 1
    assert checksum_of(large) != checksum_of(changed)


@dataclass(frozen=True, slots=True)
class Derived:
    x: Tensor
    doubled: Tensor = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "doubled", 2 * self.x)


@pytest.mark.parametrize("batch", [Sample(X, Pair(X, Y)), Pair(X, Y), UserDict(x=X), Derived(X)])
def test_first_parts_are_copies(batch: Any) -> None:
    """A batch's part looked as large in memory as the batch, to what counts what autograd keeps."""
    for wanted, samples in ((1, 5), (2, 3), (100, 1)):
        part = first_part(batch, wanted)
        assert type(part) is type(batch)
        for tensor, whole in zip(tensors_in(part), tensors_in(batch), strict=True):
            assert torch.equal(tensor, whole[:samples])
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
            assert tensor.data_ptr() != whole.data_ptr()


def test_what_an_object_derives_of_its_samples_is_cut_and_not_derived_again() -> None:
    derived = Derived(X)
    derived.doubled.add_(1)
    assert torch.equal(torch.cat([part.doubled for part in split_batch(derived, 2)]), 2 * X + 1)


def test_a_micro_batch_that_counts_for_nothing_may_be_nan() -> None:
    losses = [torch.tensor(2.0), torch.tensor(math.nan), torch.tensor(4.0)]
    assert float(combined_loss(losses, [0.75, 0.0, 0.25])) == 2.5
    assert math.isnan(combined_loss(losses, [0.5, 0.25, 0.25]))


def test_what_does_not_add_up_is_said_with_the_fix() -> None:
    parts = [torch.zeros(2), torch.zeros(1), torch.zeros(1)]

    def said(*losses: float, reduction: Any = "mean") -> str:
        return disagreement(losses, parts, reduction, 1e-8)

    summed = said(7.0, 1.0, 2.0, 4.0)
    assert "is 7 as a whole, and 2 in 3 micro-batches under loss_reduction='mean'" in summed
    assert "relative difference 0.71, rounding explains 1e-08" in summed
    assert "With loss_reduction='sum' both agree" in summed
    assert "With loss_reduction='mean' both agree" in said(2.0, 1.0, 2.0, 4.0, reduction="sum")
    neither = said(3.0, 1.0, 2.0, 4.0)
    assert "targets that are not ignored" in neither
    assert "num_micro_batches=1" in neither
    assert said(2.0, 1.0, math.nan, 4.0)
    for losses in [(2.0, 1.0, 2.0, 4.0), (0.0, 0.0, 0.0, 0.0), (1e-9, 1.0, -1.0, -1.0)]:  # parts may cancel
        assert not said(*losses)
    assert not said(2.0, 2.0, math.nan, math.nan, reduction=lambda part: len(part) - 1)
