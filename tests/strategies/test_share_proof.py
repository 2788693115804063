"""Losses that couple samples of ranks that share a batch are refused, if that is asked for by ``verify_steps``."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.strategies.pipeline.test_coupled_losses import CLASSES, REFUSED, MixedUp, ZeroGate
from tests.strategies.pipeline.test_kept_state import Plain
from tests.strategies.tasks import Case, dataset, make_strategy, make_trainer
from tests.world import World


class Quiet(Plain):
    """Logs, counts its batches, and has layers that work in one way in training and in another in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers.append(nn.BatchNorm1d(CLASSES))
        self.layers.append(nn.Dropout(0.5))
        self.calls = 0

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        x.mul_(0.5)
        loss = super().loss(x, y)
        self.log("loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        return loss


class ByHand(Quiet):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()  # type: ignore[union-attr]
        self.manual_backward(self.loss(*batch))
        optimizer.step()  # type: ignore[union-attr]


def train_shares(module: Callable[[], Any], strategy: str = "ring_ddp", **options: Any) -> dict[str, Any]:
    task = module()
    torch.manual_seed(4)
    trainer = make_trainer(Case(max_epochs=1), make_strategy(strategy, **options), 2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(task, DataLoader(dataset(40), batch_size=8))
    trainer.strategy.meter.flush()
    return {
        "state": {name: value.tolist() for name, value in task.state_dict().items()},
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "calls": getattr(task, "calls", 0),
        "sent": [(t.operation, t.size_bytes) for step in trainer.strategy.meter.steps for t in step.operations],
        "warned": [str(each.message) for each in caught if "verify_steps" in str(each.message)],
    }


SHARING = ["ring_ddp", "ddp_sharded"]
"""Names of strategies whose ranks share each batch, and whose gradients travel while backward runs."""


@pytest.mark.parametrize(
    ("module", "strategy"),
    [(MixedUp, "ring_ddp"), *((ZeroGate, name) for name in SHARING)],
    ids=["mixup-ring_ddp", *(f"gate-of-zeros-{name}" for name in SHARING)],
)
def test_ranks_that_share_a_coupled_batch_are_refused_if_that_is_asked_for(
    module: Any, strategy: str, world2: World
) -> None:
    world2.run_raising(ValueError, f"{REFUSED}.*all_gather", train_shares, module, strategy, verify_steps=1)


@pytest.mark.parametrize("strategy", SHARING)
def test_the_check_of_shares_leaves_no_trace(strategy: str, world2: World) -> None:
    expected = world2.run(train_shares, Quiet, strategy)
    options = {"find_unused_parameters": True} if strategy == "ring_ddp" else {}
    assert world2.run(train_shares, Quiet, strategy, verify_steps=2, **options) == expected
    assert expected[0]["calls"] == 3


def test_where_shares_cannot_be_checked_a_warning_says_so(world2: World) -> None:
    warned, _ = world2.run(train_shares, ByHand, verify_steps=1)
    assert warned["warned"] == [
        "verify_steps=1 has no effect in manual optimization, where only the step knows its losses"
    ]
