"""Values that ranks must have in common: learning rates, and parameters that the user's code changes by itself."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.strategies.tasks import (
    Case,
    Classifier,
    assert_trains_alike,
    eval_loader,
    rows_with_a_whole_model,
    trained_weights,
)
from tests.world import World, rank

CASE = Case(max_epochs=4, num_samples=16)
pytestmark = pytest.mark.filterwarnings("ignore:It is recommended to use `self.log")


class FollowsItsOwnValue(Classifier):
    """Lowers its learning rate by a value that each rank has logged for itself."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("own_value", (1.0 + self.current_epoch) * (-1 if rank() else 1))

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "own_value"}}


class ChangesItsLearningRate(Classifier):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.optimizers().param_groups[0]["lr"] = float(outputs["loss"])  # type: ignore[union-attr]


class HooksOfOneRank(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer: Any = super().configure_optimizers()
        if self.global_rank == 0:
            optimizer.register_step_pre_hook(lambda *_: None)
        return optimizer


class LooksUp(Classifier):
    """Has an embedding that shortens its rows when they are looked up."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(7, 6, max_norm=0.5)
        nn.init.constant_(self.rows.weight, 0.4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.rows((x[:, 0].abs() * 3).long() % 7).to(x.dtype))


class ShortensRows(Classifier):
    """Looks up rows by the function, of which no module knows."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.full((7, 6), 0.4))

    def forward(self, x: Tensor) -> Tensor:
        found = nn.functional.embedding((x[:, 0].abs() * 3).long() % 7, self.rows, max_norm=0.5)
        return super().forward(x + found.to(x.dtype))


class MovesCentres(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.centre = nn.Parameter(torch.zeros(6), requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.centre.lerp_(batch[0].mean(0), 0.1)
        return super().training_step((batch[0] - self.centre, batch[1]), batch_idx)


class KeepsUnitRows(Classifier):
    """Changes a parameter alike on all ranks: in the step, and after the optimizer's."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.first.weight.div_(self.first.weight.norm(dim=1, keepdim=True))
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        with torch.no_grad():
            self.second.weight.clamp_(-0.5, 0.5)


NAMES, SERVERS = [row.name for row in rows_with_a_whole_model()], ("cpu_ps", "sync_ps")
LR = r"'lr' of parameter group 0 \(SGD\): "
IS_SHORTENED = r"self.rows = nn.Embedding\(..., max_norm=0.5\)"


@pytest.mark.parametrize(
    ("name", "kind", "words"),
    [
        *(
            (name, FollowsItsOwnValue, LR + r"0.02 on rank 0; 0.2 on rank 1\n.*ReduceLROnPlateau")
            for name in [*NAMES, "tensor_split"]
        ),
        ("ring_ddp", ChangesItsLearningRate, LR + r".* on rank 0; .* on rank 1"),
        *((name, HooksOfOneRank, r"hooks before a step of SGD: 1 on rank 0; 0 on rank 1") for name in SERVERS),
    ],
)
def test_optimizers_that_differ_are_an_error(name: str, kind: Any, words: str, world2: World) -> None:
    """ddp_sharded and the servers went on, with a learning rate of each owner, or with that of one rank."""
    world2.run_raising(RuntimeError, words, trained_weights, kind, name, 2, CASE, validation=eval_loader(8))


@pytest.mark.parametrize(("kind", "parameter"), [(ShortensRows, "rows"), (MovesCentres, "centre")])
@pytest.mark.parametrize("name", NAMES)
def test_parameters_that_a_step_changes(name: str, kind: Any, parameter: str, world2: World) -> None:
    """ddp_sharded and the servers trained other weights, in silence; ring_ddp said so at the end of the fit."""
    words = rf"{parameter}: checksum .* on rank 0; checksum .* on rank 1"
    world2.run_raising(RuntimeError, words, trained_weights, kind, name, 2, CASE)


def test_parameters_that_all_ranks_change_alike(world2: World) -> None:
    assert_trains_alike(world2, KeepsUnitRows, NAMES, CASE)


def test_embeddings_with_a_largest_norm(world2: World) -> None:
    world2.run_raising(ValueError, IS_SHORTENED, trained_weights, LooksUp, "ring_ddp", 2, CASE)
    with pytest.raises(ValueError, match=IS_SHORTENED):
        trained_weights(LooksUp, "dp", 2, CASE)
    assert_trains_alike(world2, LooksUp, ("pipeline_1f1b", "tensor_split"), CASE)
