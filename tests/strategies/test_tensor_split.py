"""Layers are split over ranks, and train as on one device."""

from __future__ import annotations

from typing import Any

import pytest

from tests.strategies.tasks import Case, assert_same_weights, fit
from tests.world import World


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "groups"])
def test_trains_as_on_one_device(world2: World, optimizer: str) -> None:
    case = Case(optimizer=optimizer, trainer={"gradient_clip_val": 0.3, "accumulate_grad_batches": 2}, validate=True)
    reference: Any = fit(case, None, 1)
    for result in world2.run(fit, case, "tensor_split", 2):
        assert_same_weights(result, reference)
        assert result["metrics"] == pytest.approx(reference["metrics"], rel=1e-9)
