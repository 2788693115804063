"""The gain of a step, from the gradients of its batches, without processes."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_multigpu.engine.data_parallel.adascale import AdaScale

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
    scale = AdaScale(optimizer, lambda sums: sums, num_ranks=1, counts=lambda p: True, smoothing=THETA)
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
            scale.begin_backward()
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
