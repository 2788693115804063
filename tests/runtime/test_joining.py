"""Ranks that cannot train together say so as soon as they meet, on every one of them and with the same message."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_multigpu import RingDDPStrategy
from lightning_multigpu.communication.rendezvous import RendezvousError
from tests.strategies.tasks import Case, Classifier, make_trainer, train_loader
from tests.world import World, rank


class OwnModel(L.LightningModule):
    """As wide as it is told to be."""

    def __init__(self, width: int, *, in_setup: bool) -> None:
        super().__init__()
        self.width = width
        self.layer: nn.Module | None = None if in_setup else nn.Linear(width, 1)

    def configure_model(self) -> None:
        if self.layer is None:
            self.layer = nn.Linear(self.width, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self.layer is not None
        loss: Tensor = self.layer(torch.ones(2, self.width)).mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit_and_fail(module: L.LightningModule, **options: Any) -> str:
    """The message of the error that this rank gets."""
    case = Case(num_samples=16, precision="32-true")
    trainer = make_trainer(case, RingDDPStrategy(join_timeout_s=30, failure_timeout_s=10, **options), 2)
    with pytest.raises(RuntimeError) as caught:
        trainer.fit(module, train_loader(case, 2))
    return f"{type(caught.value).__name__}: {caught.value}"


def assert_said_everywhere(messages: list[str], text: str) -> None:
    for message in messages:
        assert message.startswith(RendezvousError.__name__)
        assert text in message


def test_different_options(world2: World) -> None:
    def run() -> str:
        return fit_and_fail(Classifier(), uneven_inputs="join" if rank() == 1 else "stop")

    assert_said_everywhere(world2.run(run), "option uneven_inputs: 'stop' on rank 0; 'join' on rank 1")


def test_different_strategies(world2: World) -> None:
    def run() -> str:
        class Other(RingDDPStrategy):
            pass

        trainer = make_trainer(Case(), (Other if rank() == 1 else RingDDPStrategy)(join_timeout_s=30), 2)
        with pytest.raises(RuntimeError) as caught:
            trainer.fit(Classifier(), train_loader(Case(), 2))
        return f"{type(caught.value).__name__}: {caught.value}"

    messages = world2.run(run)
    assert_said_everywhere(messages, "strategy: RingDDPStrategy on rank 0; ")
    assert "Other on rank 1" in messages[0]


@pytest.mark.parametrize("in_setup", [False, True])
def test_different_models(world2: World, in_setup: bool) -> None:
    def run() -> str:
        return fit_and_fail(OwnModel(3 + rank(), in_setup=in_setup))

    assert_said_everywhere(
        world2.run(run), "tensor 0: layer.weight float32 (1, 3) on rank 0; layer.weight float32 (1, 4) on rank 1"
    )


def test_a_run_after_one_that_could_not_join(world2: World) -> None:
    def run() -> int:
        fit_and_fail(Classifier(), bucket_cap_mb=1 + rank())
        case = Case(num_samples=16)
        trainer = make_trainer(case, RingDDPStrategy(join_timeout_s=60), 2)
        trainer.fit(Classifier(), train_loader(case, 2))
        return trainer.global_step

    first, second = world2.run(run, timeout_s=150)
    assert first == second > 0
