"""Losses that depend on no parameter, or on none of the layers: a batch that is left out."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.strategies.tasks import Case, Classifier, assert_trains_alike
from tests.world import World


class LeavesOut(Classifier):
    """Leaves a batch out, or trains its head alone with it."""

    def __init__(self, *, with_head: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.head = nn.Linear(3, 3)
        self.with_head = with_head

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        if batch_idx == 1 and not self.with_head:
            return torch.zeros((), dtype=logits.dtype, requires_grad=True)
        logits = self.head(logits.detach() if batch_idx == 1 else logits)
        return nn.functional.cross_entropy(logits, batch[1])


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("pipeline_1f1b", {}),
        ("pipeline_zero_bubble", {}),
        ("hybrid", {"pipeline_parallel_size": 2, "tensor_parallel_size": 1}),
    ],
)
def test_a_batch_that_is_left_out(strategy: str, options: dict[str, Any], world2: World) -> None:
    """Stages before the last one stepped with gradients of zero, and momentum moved their weights."""
    for with_head, accumulate in ((False, 1), (False, 2), (True, 1)):
        case = Case(num_samples=32, max_epochs=1, trainer={"accumulate_grad_batches": accumulate}, strategy=options)
        assert_trains_alike(world2, partial(LeavesOut, with_head=with_head), strategy, case)
