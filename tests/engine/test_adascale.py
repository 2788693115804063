"""The gain of a step, from the gradients of its batches, without processes."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor, nn

from lightning_multigpu.engine.data_parallel.adascale import AdaScale
from lightning_multigpu.engine.data_parallel.agreement import Announcement, LossReduction, Share, shares_of

THETA = 0.5


def gain_of(gradients: list[Tensor]) -> tuple[float, float]:
    """Variance and squared norm of Johnson et al., appendix B.3, from the gradient of each batch."""
    size = len(gradients)
    own, mean = sum(float(g.square().sum()) for g in gradients), float((sum(gradients) / size).square().sum())  # type: ignore[union-attr]
    variance = (own - size * mean) / (size - 1)
    return variance, mean - variance / size


def test_groups_have_gains_of_their_own_from_when_they_are_trained() -> None:
    """One rank accumulates three batches a step; a second group comes with the second step."""
    torch.manual_seed(1)
    first, second = nn.Linear(3, 2, dtype=torch.float64), nn.Linear(3, 2, dtype=torch.float64)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    scale = AdaScale(optimizer, lambda sums: sums, rank=0, num_ranks=1, counts=lambda p: True, smoothing=THETA)
    seen: list[list[tuple[float, float]]] = []
    for step in range(3):
        if step == 1:
            optimizer.add_param_group({"params": [*second.parameters()], "lr": 0.2})
        parts: list[list[Tensor]] = [[] for _ in optimizer.param_groups]
        optimizer.zero_grad()
        for _ in range(3):
            layers = (first, second)[: len(parts)]
            before = [[0 if p.grad is None else p.grad.clone() for p in layer.parameters()] for layer in layers]
            loss = sum(layer(torch.randn(4, 3, dtype=torch.float64)).square().mean() for layer in layers)
            scale.begin_backward([Share(1.0, 4.0)])
            (loss * 2.0**step / 3).backward()  # type: ignore[union-attr]
            scale.end_backward()
            for layer, old, of_group in zip(layers, before, parts, strict=True):
                new = [p.grad - o for p, o in zip(layer.parameters(), old, strict=True) if p.grad is not None]
                of_group.append(torch.cat([each.flatten() for each in new]) * 3 / 2.0**step)
        scale.measure(accumulate=3, loss_scale=2.0**step)
        seen.append([gain_of(of_group) for of_group in parts])
        weights = [p.detach().clone() for p in first.parameters()]
        expected = []
        for index in range(len(parts)):
            values = [found[index] for found in seen if len(found) > index]
            factors = [THETA ** (len(values) - 1 - number) for number in range(len(values))]
            variance, true = (
                sum(f * v[which] for f, v in zip(factors, values, strict=True)) / sum(factors) for which in (0, 1)
            )
            expected.append((variance + true) / (variance / 3 + true))
        optimizer.step()
        for parameter, old_value in zip(first.parameters(), weights, strict=True):
            assert parameter.grad is not None
            moved = old_value - 0.1 * expected[0] * parameter.grad
            torch.testing.assert_close(parameter.detach(), moved, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(scale._gains, expected, rtol=1e-9, atol=0.0)
        assert 1 < scale.gain < 3
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.2]
    scale.close()
    assert not any(p._backward_hooks for layer in (first, second) for p in layer.parameters())


def measured(sizes: list[list[int]], gradients: list[list[Tensor]], loss_reduction: LossReduction) -> AdaScale:
    """AdaScale of one of several ranks, after a step with batches of these sizes and mean gradients.

    Args:
        sizes: samples of each accumulated batch, on each rank.
        gradients: likewise, each of shape (2,).
    """
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    num_ranks = len(sizes[0])
    sums, averaged = torch.zeros(2, 1, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)

    def add(own: Tensor) -> Tensor:
        return sums.add_(own)

    for rank in range(num_ranks):  # the last one gets the sums of all
        optimizer, last = torch.optim.SGD([parameter], lr=1.0), rank == num_ranks - 1
        scale = AdaScale(
            optimizer,
            add,
            rank=rank,
            num_ranks=num_ranks,
            counts=[lambda _: False, lambda _: True][last],
            smoothing=0.0,
        )
        for of_ranks, vectors in zip(sizes, gradients, strict=True):
            weights = [min(n, 1.0) if loss_reduction == "sum" else float(n) for n in of_ranks]
            shares = shares_of(Announcement(tuple(of_ranks), tuple(weights), 0), loss_reduction)
            heard = vectors[rank] * shares[rank].factor / len(sizes)
            scale.begin_backward(shares)
            (parameter * heard).sum().backward()
            scale.end_backward()
            averaged += heard / num_ranks
        parameter.grad = averaged.clone()
        scale.measure(accumulate=len(sizes), loss_scale=1.0)
        scale.close()
    return scale


@pytest.mark.parametrize(
    ("sizes", "loss_reduction", "of_one", "worth"),  # of_one: variance of the gradient of a batch, for 1 of a sample
    [
        ([[1, 2]], "mean", 1 / 1.5, 2),
        ([[1, 3]], "sum", 1 / 2, 2),
        ([[2, 1], [1, 1]], "sum", 1 / 1.25, 4),
        ([[2, 1], [1, 1]], "mean", (1 / 1.5 + 1) / 2, 4),  # the accumulated batches weigh the same
        ([[1, 2], [1, 0]], "mean", (1 / 1.5 + 1) / 2, 2.5),  # (2 / 3 + 1) / 2 over (1 / 3 + 1) / 4
        ([[2, 0]], "mean", 1 / 2, 1),
    ],
)
def test_estimates_are_unbiased_with_batches_of_any_sizes(
    sizes: list[list[int]], loss_reduction: LossReduction, of_one: float, worth: float
) -> None:
    """Their mean over all batches that can be drawn, if samples have one of two gradients.

    The norms of batches were averaged as if these had one size and one weight: the estimates were those of neither.
    """
    likely = torch.tensor([[3.0, 1.0], [2.0, 1.5]], dtype=torch.float64)
    found = []
    for drawn in product(likely, repeat=sum(map(sum, sizes))):
        left = [*drawn]
        gradients = [
            [torch.stack([left.pop() for _ in range(n)] or [likely[0]]).mean(dim=0) for n in of_ranks]
            for of_ranks in sizes
        ]
        scale = measured(sizes, gradients, loss_reduction)
        variance, true, weight = scale._averages[0].tolist()
        found.append([variance, true])
        if worth == 1:
            assert (weight, scale.gain) == (0.0, 1.0), "one batch says nothing of the variance"
        else:
            gain = (variance * of_one + true) / (variance * of_one / worth + true)
            assert scale.gain == pytest.approx(gain, rel=1e-9)
    if worth > 1:
        expected = likely.mean(dim=0)
        exact = [float((likely - expected).square().sum(dim=1).mean()), float(expected.square().sum())]
        assert torch.tensor(found).mean(dim=0).tolist() == pytest.approx(exact, abs=1e-5)  # no variance is below 1e-6
