"""PowerSGD: which parameters become factors, who owns them, and what the power iteration makes of them."""

from __future__ import annotations

import hashlib

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_multigpu.communication.compression import CompressedAllReduce, GradientPiece
from lightning_multigpu.communication.compression.powersgd import (
    Owners,
    PowerSGD,
    WarmStarts,
    add_product,
    first_factor,
    orthonormalise,
)
from lightning_multigpu.communication.ring import RingAllReduce
from tests.communication.shared import own_errors
from tests.world import World, init_group

PIECES = tuple(
    GradientPiece(str(i), shape) for i, shape in enumerate([(30, 20), (20,), (20, 30), (20,), (60, 10), (3, 3)])
)


@pytest.mark.parametrize(
    ("piece", "expected"),
    [
        (GradientPiece("matrix", (10, 30)), (10, 30)),
        (GradientPiece("convolution", (16, 4, 3, 3)), (16, 36)),
        (GradientPiece("as large as its factors", (4, 4)), None),
        (GradientPiece("vector", (1000,)), None),
        (GradientPiece("number", ()), None),
        (GradientPiece("empty", (0, 4)), None),
        (GradientPiece("part", (10, 30), 0, 299), None),
    ],
)
def test_what_becomes_factors(piece: GradientPiece, expected: tuple[int, int] | None) -> None:
    assert PowerSGD(rank=2).factors(piece) == expected


def test_first_factors_depend_on_the_name_and_repeat() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = first_factor("layer.weight", 3, 50)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(first, first_factor("layer.weight", 3, 50))
    assert not torch.equal(first, first_factor("other.weight", 3, 50))
    # The same in every process, which the hash of a string is not.
    digest = hashlib.sha256((first * 1000).round().to(torch.int32).numpy().tobytes()).hexdigest()
    assert digest.startswith("6c21aa767ed0")


@pytest.mark.parametrize("rank", [1, 3])
def test_columns_become_orthonormal_and_span_what_they_spanned(rank: int) -> None:
    factor = torch.randn(40, rank)
    given = factor.clone()
    orthonormalise(factor)
    torch.testing.assert_close(factor.t() @ factor, torch.eye(rank), rtol=0, atol=1e-5)
    torch.testing.assert_close(factor @ (factor.t() @ given), given, rtol=1e-4, atol=1e-5)


def test_columns_of_zeros_and_columns_that_are_not_finite() -> None:
    factor = torch.zeros(10, 2)
    orthonormalise(factor)
    torch.testing.assert_close(factor.t() @ factor, torch.eye(2))
    factor[3, 0] = float("inf")
    orthonormalise(factor)
    assert factor.isnan().all()


@pytest.mark.parametrize("rank", [1, 4, 5, 8])
def test_products_of_factors(rank: int) -> None:
    left, right, matrix = torch.randn(12, rank), torch.randn(rank, 7), torch.randn(12, 7)
    expected = matrix - 2 * left @ right
    add_product(matrix, left, right, factor=-2.0)
    torch.testing.assert_close(matrix, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("world_size", [1, 2, 3, 8])
def test_every_parameter_has_one_owner_and_owners_send_alike(world_size: int) -> None:
    owners = Owners(PowerSGD(rank=2), world_size)
    plan = owners.plan(PIECES)
    assert [(part.start, part.stop) for part in plan.parts] == [
        (0, 600), (600, 620), (620, 1220), (1220, 1240), (1240, 1840), (1840, 1849)
    ]  # fmt: skip
    for owner in range(world_size):
        owned = [part for part in plan.parts if part.owner == owner]
        for field, numel in (("first", plan.first_numel[owner]), ("second", plan.second_numel[owner])):
            elements = [i for part in owned for i in range(getattr(part, field).start, getattr(part, field).stop)]
            assert elements == list(range(numel))
    assert sum(plan.first_numel) == 2 * (30 + 20 + 60) + 20 + 20 + 9
    assert sum(plan.second_numel) == 2 * (20 + 30 + 10)
    loads = [first + second for first, second in zip(plan.first_numel, plan.second_numel, strict=True)]
    assert max(loads) - min(loads) <= 140
    assert Owners(PowerSGD(rank=2), world_size).plan(PIECES) == plan
    sent = [plan.sent_bytes(rank) for rank in range(world_size)]
    assert sum(sent) == 4 * 2 * (world_size - 1) * sum(loads)


def test_single_matrices_take_turns_among_owners() -> None:
    owners = Owners(PowerSGD(rank=1), 3)
    assert [owners.plan((GradientPiece(name, (8, 8)),)).parts[0].owner for name in "abcdef"] == [0, 1, 2, 0, 1, 2]


def test_warm_starts_of_a_step_that_is_not_accepted_are_forgotten() -> None:
    starts = WarmStarts(rank=1)
    first = starts.get("a", 4).clone()
    starts.put("a", torch.full((1, 4), 3.0))
    starts.end_step(accept=False)
    assert torch.equal(starts.get("a", 4), first)
    starts.put("a", torch.full((1, 4), 3.0))
    starts.end_step(accept=True)
    assert torch.equal(starts.get("a", 4), torch.full((1, 4), 0.5))
    starts.put("a", torch.zeros(1, 4))
    starts.end_step(accept=True)
    assert torch.equal(starts.get("a", 4), torch.full((1, 4), 0.5)), "no direction follows from zeros"


def _reduce(rank: int, tensors: list[Tensor], *, keeps_errors: bool = True) -> list[Tensor]:
    """The averages of a matrix of this rank, given in each of several steps."""
    init_group()
    reduce = CompressedAllReduce(dist.new_group(backend="gloo"), PowerSGD(rank=rank, start_step=0))
    found = []
    for _ in range(3):
        matrix = tensors[dist.get_rank()].clone()
        pieces = (GradientPiece("matrix", tuple(matrix.shape)),)
        found.append(reduce(matrix, pieces, average=True))
        reduce.end_step()
        if not keeps_errors:
            reduce.share_errors(pieces, pieces, Tensor.zero_)
    return found


def test_a_mean_of_low_rank_is_found_at_once(world4: World) -> None:
    """Of four matrices of rank 1 the mean has rank 4: it needs all ranks' factors, in the right places."""
    tensors = [torch.outer(torch.randn(40), torch.randn(30)) for _ in range(4)]
    expected = torch.stack(tensors).mean(0)
    for first, second, _ in world4.run(_reduce, 4, tensors):
        torch.testing.assert_close(first, expected, rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(second, expected, rtol=1e-3, atol=1e-4)


def test_factors_start_where_the_last_step_ended(world2: World) -> None:
    """Of a matrix with one large and many small singular values, the large one is found by iterating."""
    base = 3 * torch.outer(torch.randn(40), torch.randn(30)) + torch.randn(40, 30)
    u, s, v = torch.linalg.svd(base)
    best = s[0] * torch.outer(u[:, 0], v[0])
    first, second, third = world2.run(_reduce, 1, [base] * 2, keeps_errors=False)[0]
    assert (first - best).norm() > 2 * (second - best).norm() > 4 * (third - best).norm()


def _warm_up(dtype: torch.dtype) -> list[tuple[bool, int, int, int, bool]]:
    """By step: is it what the ring makes of it, what is sent, what the ring sends, steps, whether errors are kept."""
    init_group()
    group = dist.new_group(backend="gloo")
    reduce, ring = CompressedAllReduce(group, PowerSGD(rank=1, start_step=2)), RingAllReduce(group)
    found = []
    for step in range(4):
        matrix = torch.randn(40, 30, generator=torch.Generator().manual_seed(10 * step + dist.get_rank())).to(dtype)
        pieces = (GradientPiece("matrix", (40, 30)),)
        expected = ring(matrix.clone(), average=True)
        sent = reduce.sent_bytes(matrix, pieces)
        reduce(matrix, pieces, average=True)
        reduce.end_step()
        keeps = bool(own_errors(reduce, pieces).any())
        found.append((torch.equal(matrix, expected), sent, ring.sent_bytes(matrix), reduce.step, keeps))
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_early_steps_are_not_compressed(world2: World, dtype: torch.dtype) -> None:
    for steps in world2.run(_warm_up, dtype):
        assert [exact for exact, *_ in steps] == [True, True, False, False]
        assert [sent == ring for _, sent, ring, *_ in steps] == [True, True, False, False]
        assert [(step, keeps) for *_, step, keeps in steps] == [(1, False), (2, False), (3, True), (4, True)]
