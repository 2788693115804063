"""Losses that couple the samples of a batch are refused, also where those of micro-batches agree at first."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from lightning_multigpu import PipelineStrategy
from lightning_multigpu.engine.errors import PipelineError
from tests.strategies.pipeline.test_kept_state import Plain
from tests.strategies.tasks import Case, make_trainer, train_loader
from tests.world import World

WIDTH, CLASSES = 6, 3
REFUSED = "training_step couples the samples of a batch, .*: the gradients of .* samples do not add up"


class ZeroGate(Plain):
    """Four experts, of which one has all samples until the gate, which starts at zero, has been trained."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)
        nn.init.zeros_(self.gate.weight)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.layers(x)
        shares = self.gate(x).softmax(-1)
        used = nn.functional.one_hot(shares.argmax(-1), 4).to(shares.dtype).mean(0)
        return nn.functional.cross_entropy(logits, y) + 0.1 * 4 * (used * shares.mean(0)).sum()


class MixedUp(Plain):
    """Mixes samples, with numbers of NumPy as the original code of mixup does, in training alone."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        if not self.training:
            return super().loss(x, y)
        share, order = np.random.beta(1.0, 1.0), torch.randperm(len(x))
        logits = self.layers(share * x + (1 - share) * x[order])
        return sum(
            part * nn.functional.cross_entropy(logits, target) for part, target in ((share, y), (1 - share, y[order]))
        )  # type: ignore[return-value]


class Later(Plain):
    """Another term joins within the first epoch, where nothing but the new term has the steps proved again."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.layers(x)
        loss = nn.functional.cross_entropy(logits, y)
        return loss if self.global_step < 3 else loss + 0.1 * logits.var(0).sum()


class FadesIn(Plain):
    """A term whose weight is 0 in the first epoch: no operation is new when it counts."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        logits = self.layers(x)
        return nn.functional.cross_entropy(logits, y) + 0.1 * self.current_epoch * logits.var(0).sum()


class Contrastive(Plain):
    """Agrees within half precision's tolerance of losses, which is wide, and not in its gradients."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.layers(x)
        return 100 + nn.functional.cross_entropy(z @ z.T, torch.arange(len(z)))


class Noisy(Plain):
    """Draws its own noise for each sample, in evaluation too, and has a layer that drops."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.RNN(WIDTH, WIDTH, num_layers=2, dropout=0.3, batch_first=True)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.drop(x.unsqueeze(1))[0].squeeze(1)
        return super().loss(x + 0.1 * torch.randn_like(x), y)


class Normal(Plain):
    """Spectral norm goes on from the vector of the last forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[2] = spectral_norm(self.layers[2])


class Built(Plain):
    def __init__(self) -> None:
        super().__init__()
        del self.layers

    def configure_model(self) -> None:
        if not hasattr(self, "layers"):
            self.layers = nn.Sequential(nn.Linear(WIDTH, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, CLASSES))


DATA = Case(max_epochs=2, num_samples=40, trainer={"use_distributed_sampler": False})


def train(module: Callable[[], Any], options: dict[str, Any], trainer_options: dict[str, Any]) -> int:
    ranks = trainer_options.get("devices", 2)
    trainer = make_trainer(DATA, PipelineStrategy(**{"num_micro_batches": 2, **options}), ranks, **trainer_options)
    try:
        trainer.fit(module(), train_loader(DATA, 1))
    except (ValueError, PipelineError) as error:
        raise type(error)(f"{error} | after {trainer.global_step} steps") from error
    return trainer.global_step


@pytest.mark.parametrize(
    ("module", "options", "trainer_options", "steps"),
    [
        (MixedUp, {}, {"accumulate_grad_batches": 2}, 0),
        (Later, {"schedule": "interleaved"}, {}, 3),
        (FadesIn, {}, {}, 5),
        (Contrastive, {}, {"precision": "bf16-mixed"}, 0),
    ],
    ids=["mixup", "later", "fades-in", "half-precision"],
)
def test_couplings_that_the_loss_hides_are_refused(
    module: Any, options: dict[str, Any], trainer_options: dict[str, Any], steps: int, world2: World
) -> None:
    words = REFUSED if steps == 0 else "the loss of a batch is .* as a whole, and .* in 2 micro-batches"
    world2.run_raising(ValueError, rf"{words}.* \| after {steps} steps", train, module, options, trainer_options)


def test_one_of_two_pipelines_is_enough_to_refuse(world4: World) -> None:
    world4.run_raising(ValueError, REFUSED, train, ZeroGate, {"data_parallel_size": 2}, {"devices": 4})


LINES = ("Whether the losses", "Whether the gradients", "The module keeps values", "is not proved")


@pytest.mark.parametrize(
    ("module", "options", "words"),
    [
        (MixedUp, {"verify_steps": 0}, None),
        (MixedUp, {"num_micro_batches": 1}, None),
        (Noisy, {}, "Whether the losses"),
        (Normal, {"num_micro_batches": 3}, "The module keeps values"),
        (Built, {}, None),
    ],
    ids=["accepted", "whole", "noise", "spectral-norm", "batch-norm"],
)
def test_other_losses_train(module: Any, options: dict[str, Any], words: str | None, world2: World) -> None:
    assert world2.run(train, module, options, {"max_epochs": 1}) == [5, 5]
    said = [line for line in LINES for _ in range(world2.output(0).count(line))]
    assert said == ([] if words is None else [words])
