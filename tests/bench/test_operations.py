"""What every collective has to give, by the definition of each, and that the check sees every mistake."""

import pytest
import torch
from torch import Tensor

from lightning_multigpu.bench.collectives.operations import BY_NAME, OPERATIONS, Buffers, Operation, pattern

CPU = torch.device("cpu")
MOVING = [operation for operation in OPERATIONS if operation.has_size]


def filled(operation: Operation, world_size: int, dtype: torch.dtype, size: int = 1200) -> list[Buffers]:
    ranks = [
        Buffers.make(operation, size, rank=rank, world_size=world_size, dtype=dtype, device=CPU)
        for rank in range(world_size)
    ]
    for buffers in ranks:
        buffers.fill()
    return ranks


def perform(name: str, inputs: list[Tensor]) -> list[Tensor | None]:
    """The collective over the ranks' inputs, as its definition says; None where nothing has to come out."""
    world_size = len(inputs)
    parts = [tensor.chunk(world_size) for tensor in inputs]
    total = torch.stack(inputs).sum(0)
    at_root = [0] + [None] * (world_size - 1)  # type: ignore[list-item]
    results: dict[str, list[Tensor | None]] = {
        "all_reduce": [total] * world_size,
        "reduce_scatter": list(total.chunk(world_size)),
        "all_gather": [torch.cat(inputs)] * world_size,
        "broadcast": [inputs[0]] * world_size,
        "reduce": [None if here is None else total for here in at_root],
        "gather": [None if here is None else torch.cat(inputs) for here in at_root],
        "scatter": list(parts[0]),
        "all_to_all": [torch.cat([row[rank] for row in parts]) for rank in range(world_size)],
        "send_recv": [inputs[rank - 1] for rank in range(world_size)],
    }
    return results[name]


@pytest.mark.parametrize("world_size", [2, 3, 8])
@pytest.mark.parametrize("operation", MOVING, ids=lambda operation: operation.name)
def test_right_results_are_right_and_a_wrong_element_is_counted(operation: Operation, world_size: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int32):
        ranks = filled(operation, world_size, dtype)
        results = perform(operation.name, [buffers.input.clone() for buffers in ranks])
        for buffers, result in zip(ranks, results, strict=True):
            if result is None:
                assert buffers.wrong() == 0, "nothing is expected of this rank"
                continue
            buffers.output.copy_(result)
            assert buffers.wrong() == 0
            buffers.output[-1] += 1
            buffers.output[0] += 1
            assert buffers.wrong() == 2


@pytest.mark.parametrize("summed", [False, True])
def test_ranks_and_chunks_do_not_look_alike(summed: bool) -> None:
    """Sizes are powers of two: with a period that divides them, a chunk in the wrong place would pass."""
    for world_size in (2, 4, 8) if summed else (2, 4, 8, 16, 64):
        tensors = [pattern(torch.empty(1 << 12), [rank], world_size, summed=summed) for rank in range(world_size)]
        for rank, tensor in enumerate(tensors):
            chunks = tensor.chunk(world_size)
            assert not any(torch.equal(chunks[0], chunk) for chunk in chunks[1:])
            assert not any(torch.equal(tensor, other) for other in tensors[:rank])


@pytest.mark.parametrize("world_size", [2, 3, 64, 100])
def test_sums_are_exact_in_bfloat16(world_size: int) -> None:
    like = torch.empty(300, dtype=torch.bfloat16)
    total = sum(pattern(like, [rank], world_size, summed=True).float() for rank in range(world_size))
    assert isinstance(total, Tensor)
    assert total.max() <= 256
    assert torch.equal(total.bfloat16(), pattern(like, range(world_size), world_size, summed=True))
    assert torch.equal(
        total[100:].bfloat16(), pattern(like[100:], range(world_size), world_size, summed=True, offset=100)
    )


def test_bus_factors_are_those_of_nccl_tests() -> None:
    part = dict.fromkeys(("reduce_scatter", "all_gather", "gather", "scatter", "all_to_all"), 0.75)
    whole = dict.fromkeys(("broadcast", "reduce", "send_recv"), 1.0)
    assert {each.name: each.bus_factor(4) for each in MOVING} == {"all_reduce": 1.5, **part, **whole}


def test_size_is_the_whole_where_ranks_hold_parts() -> None:
    for operation in MOVING:
        ranks = filled(operation, 3, torch.float32, size=1000)
        for buffers in ranks:
            assert buffers.numel == 249, "1000 bytes are 250 elements, of which 249 can be divided by 3"
            assert buffers.size_bytes == 996
            whole_or_part = {"whole": 249, "part": 83}
            assert buffers.input.numel() == whole_or_part[operation.given]
            if operation.taken != "none":
                assert buffers.output.numel() == whole_or_part[operation.taken]
    smallest = Buffers.make(BY_NAME["all_gather"], 1, rank=0, world_size=4, dtype=torch.float64, device=CPU)
    assert (smallest.numel, smallest.input.numel()) == (4, 1), "every rank has an element"
