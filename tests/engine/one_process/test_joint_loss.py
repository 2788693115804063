"""The sum of the replicas' gradients."""

from __future__ import annotations

import torch

from lightning_multigpu.engine.one_process.joint_loss import summed


def test_gradients_that_share_memory_are_not_changed_in_place() -> None:
    """autograd gives ``p`` and ``q`` of ``p + q`` the same gradient, and that of a sum is one number, expanded."""
    parameters = [torch.zeros(3) for _ in range(4)]
    shared, expanded, own = torch.ones(3), torch.ones(1).expand(3), torch.ones(3)
    found = [[shared, shared, expanded, own], [torch.full((3,), float(n)) for n in (1, 2, 3, 4)]]
    sums = summed(found, parameters)
    assert [each.tolist() for each in sums if each is not None] == [[n + 1.0] * 3 for n in (1, 2, 3, 4)]


def test_parameters_that_only_some_replicas_use() -> None:
    gradient = torch.ones(2)
    sums = summed([[None, None], [gradient, None]], [torch.zeros(2)] * 2)
    assert sums[0] is gradient
    assert sums[1] is None
