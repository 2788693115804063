"""Clipping by the norm of what all ranks own, and steps that all of them skip, worked out by hand."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.nn.utils import clip_grad_norm_

from lightning_multigpu.placement.norms import CommonOverflow, ReduceSum, clip_by_norm, scale_to_norm, sum_of_squares
from tests.threads import Threads

INF = float("inf")
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def on_ranks(num: int, function: Callable[[int, ReduceSum], Any]) -> list[Any]:
    ranks = Threads(num)
    return ranks.run(lambda rank: function(rank, lambda own: torch.stack(ranks.gather(rank, own.clone())).sum(0)))


def with_gradient(*values: float, dtype: torch.dtype = torch.float64) -> Parameter:
    parameter = Parameter(torch.zeros(len(values), dtype=dtype))
    parameter.grad = torch.tensor(values, dtype=dtype)
    return parameter


def clip(max_norm: float, *ranks: tuple[list[Parameter], list[Parameter]]) -> list[list[list[float]]]:
    """Clips on each rank, which owns the first parameters and holds them and the second ones; their gradients then."""
    held = [[*owned, *others] for owned, others in ranks]
    on_ranks(len(ranks), lambda rank, reduce_sum: clip_by_norm(ranks[rank][0], held[rank], max_norm, reduce_sum))
    return [[p.grad.tolist() for p in parameters if p.grad is not None] for parameters in held]


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_count_on_each_rank_and_a_replicated_gradient_once(dtype: torch.dtype) -> None:
    """The norm is (2² + 4² + 4²)**0.5 = 6: each rank scales its part, and its copy of what rank 0 owns, by 3 / 6."""
    part, other_part, replicated, copy = (with_gradient(value, dtype=dtype) for value in (2.0, 4.0, 4.0, 4.0))
    first, second = clip(3.0, ([part, replicated], []), ([other_part], [copy]))
    assert first == [[pytest.approx(1.0, rel=1e-6)], [pytest.approx(2.0, rel=1e-6)]]
    assert second == [[pytest.approx(2.0, rel=1e-6)], [pytest.approx(2.0, rel=1e-6)]]


def test_a_rank_without_gradients_of_its_own_takes_part() -> None:
    of_first, copy = with_gradient(3.0, 4.0), with_gradient(3.0, 4.0)
    clipped = clip(1.0, ([of_first], []), ([], []), ([Parameter(torch.zeros(2))], []), ([], [copy]))
    assert clipped == [[[pytest.approx(0.6), pytest.approx(0.8)]], [], [], [[pytest.approx(0.6), pytest.approx(0.8)]]]


def test_norms_of_16_bits_are_computed_in_float32() -> None:
    """The norm, 80,000, is more than a float16 can be, and the factor of bfloat16 would have 8 bits."""
    assert clip(2.0, ([with_gradient(*[4e4] * 3, dtype=torch.float16)], []), ([with_gradient(4e4)], [])) == [
        [[1.0] * 3],
        [[pytest.approx(1.0)]],
    ]
    assert sum_of_squares([torch.ones(300, dtype=torch.bfloat16)]).item() == pytest.approx(300)


@pytest.mark.parametrize("bad", [INF, float("nan")])
def test_inf_and_nan_are_what_they_are_on_one_device(bad: float) -> None:
    whole = with_gradient(3.0, bad)
    clip_grad_norm_([whole], 1.0)
    first, second = clip(1.0, ([with_gradient(3.0)], []), ([with_gradient(bad)], []))
    assert whole.grad is not None
    torch.testing.assert_close(torch.tensor([*first[0], *second[0]]), whole.grad.float(), equal_nan=True)


def test_a_sum_that_others_have_made() -> None:
    """As a server does, which gets the sum of all servers as a number; complex gradients have real norms."""
    gradients = [torch.tensor([3.0 + 4.0j]), torch.tensor([5.0])]
    assert float(sum_of_squares(gradients)) == pytest.approx(50)
    scale_to_norm(gradients, 1.0, 100.0)
    assert gradients[0].item() == pytest.approx(0.3 + 0.4j)
    assert gradients[1].item() == pytest.approx(0.5)
    scale_to_norm([], 1.0, 100.0)


def test_a_sparse_gradient_counts_the_sums_of_its_rows() -> None:
    gradient = torch.sparse_coo_tensor([[0, 2, 0]], [[1.0], [4.0], [2.0]], (3, 1), check_invariants=True)
    assert sum_of_squares([gradient, torch.ones(1)]).item() == pytest.approx(26)


@pytest.mark.parametrize("is_fused", [False, True], ids=["torch", "fused"])
@pytest.mark.parametrize("overflowing", [(), (1,), (0, 1)], ids=str)
def test_all_ranks_skip_a_step_in_which_one_overflows(overflowing: tuple[int, ...], is_fused: bool) -> None:
    """Fused optimizers look for inf in their step, each rank by itself, and took 2 ranks with inf for none.

    A third rank has no gradient.
    """

    def step(rank: int, reduce_sum: ReduceSum) -> tuple[list[float], float]:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        common = CommonOverflow(scaler, reduce_sum)
        parameter = Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([parameter], lr=1.0, fused=is_fused)
        scaler.scale(torch.zeros(()))
        if rank < 2:
            parameter.grad = torch.tensor([2.0, INF if rank in overflowing else 4.0])
        if not is_fused:  # as Lightning
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        common.end()
        assert "_unscale_grads_" not in vars(scaler)
        return parameter.tolist(), scaler.get_scale()

    steps = on_ranks(3, step)
    assert [scale for _, scale in steps] == [2.0 if overflowing else 4.0] * 3
    assert [weights for weights, _ in steps] == [[1.0, 1.0] if overflowing else [0.5, 0.0]] * 2 + [[1.0, 1.0]]
