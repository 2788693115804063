"""Sizes of tensors, and tensors that are worked on as flat ones."""

import pytest
import torch
import torch.distributed as dist

from lightning_multigpu.communication.compression import make_compressor
from lightning_multigpu.communication.compression.all_reduce import CompressedAllReduce
from lightning_multigpu.communication.ring import RingAllReduce
from lightning_multigpu.communication.tensors import alike, apply_flat, check_reducible, same_bytes, size_bytes
from tests.communication.shared import shared_memory
from tests.world import World, init_group


def test_a_sparse_tensor_has_the_size_of_its_indices_and_values() -> None:
    assert size_bytes(torch.zeros(3, 2)) == 24
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, 2]]), torch.ones(2, 4), (100, 4), check_invariants=True)
    assert size_bytes(sparse) == 2 * 8 + 8 * 4


def test_the_bytes_of_tensors_are_compared() -> None:
    """A checksum of each took more than twice the time; not a number is equal to itself here."""
    nan = torch.tensor([1.0, float("nan"), 0.0])
    assert same_bytes(nan, nan.clone())
    assert not same_bytes(nan, -nan)
    assert not same_bytes(nan, nan[:2])


def test_groups_are_of_one_dtype_and_full_ones_are_closed() -> None:
    tensors = [torch.zeros(4), torch.zeros(1, dtype=torch.float64), torch.zeros(4), torch.zeros(4)]
    first, second, third, fourth = tensors
    groups = [[id(tensor) for tensor in group] for group in alike(tensors, full_bytes=32)]
    assert groups == [[id(first), id(third)], [id(second)], [id(fourth)]]
    assert [len(group) for group in alike(tensors)] == [3, 1]
    assert list(alike([])) == []


def test_the_result_of_a_flat_tensor_is_copied_back_into_the_shapes() -> None:
    matrix, number = torch.ones(2, 3).t(), torch.full((), 2.0)
    apply_flat(lambda flat: flat.mul_(10), [matrix, number])
    assert torch.equal(matrix, torch.full((3, 2), 10.0))
    assert number == 20.0


@pytest.mark.parametrize(
    ("tensor", "average", "words"),
    [
        (torch.ones(4, 4).t()[1:], False, "it takes contiguous tensors"),
        (torch.ones(4, dtype=torch.int32), True, "the average of torch.int32 values"),
        (torch.ones(3).to_sparse(), False, "it takes dense CPU tensors, not torch.sparse_coo"),
        (torch.ones(3, device="meta"), False, "not torch.strided on meta"),
    ],
)
def test_what_cannot_be_reduced_is_named(tensor: torch.Tensor, average: bool, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_reducible(tensor, "it", average=average)


def _refused() -> None:
    init_group()
    group, strided = dist.new_group(backend="gloo"), torch.ones(4, 4).t()[1:]
    ring, compressed = RingAllReduce(group), CompressedAllReduce(group, make_compressor("int8"))
    with shared_memory() as shared:
        for call, words in (
            (lambda: ring(strided), "the ring takes contiguous"),
            (lambda: shared(strided), "shared memory takes contiguous"),
            (lambda: compressed(strided, "a"), "compression takes contiguous"),
            (lambda: compressed(torch.ones(12, dtype=torch.int32), "a"), "not torch.int32"),
        ):
            with pytest.raises(ValueError, match=words):
                call()


def test_every_all_reduce_refuses_what_it_cannot_reduce(world2: World) -> None:
    world2.run(_refused)
