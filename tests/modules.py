"""Modules, a callback and a stream that the tests of several strategies train with."""

from collections.abc import Iterator, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset

from tests.strategies.tasks import NUM_CLASSES, NUM_FEATURES, Classifier, dataset


class Normalised(Classifier):
    """Begins with BatchNorm; notes the running mean before each training step and before validation."""

    def __init__(self, *, momentum: float | None = 0.1) -> None:
        super().__init__()
        self.normalise = nn.BatchNorm1d(NUM_FEATURES, momentum=momentum)
        self.means: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.normalise(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.means.append(self.normalise.running_mean.clone())  # type: ignore[union-attr]
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_start(self) -> None:
        self.means.append(self.normalise.running_mean.clone())  # type: ignore[union-attr]


class ReadsGradients(Classifier):
    """Its hooks read gradients, and it clips by itself."""

    def __init__(self) -> None:
        super().__init__("adamw")
        self.norms: list[float] = []

    def norm(self) -> float:
        gradients = [p.grad for p in self.parameters() if p.grad is not None]
        return float(torch.linalg.vector_norm(torch.cat([gradient.reshape(-1) for gradient in gradients])))

    def on_after_backward(self) -> None:
        self.norms.append(self.norm())

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.1 / (self.norm() + 1.0))
        self.norms.append(self.norm())


class TwoOptimizers(L.LightningModule):
    """Manual optimization of a pair that trains in turns, with accumulated gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        torch.manual_seed(4)
        self.first, self.second = nn.Linear(NUM_FEATURES, 5), nn.Linear(5, NUM_CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            self.toggle_optimizer(optimizer)
            self.manual_backward(nn.functional.cross_entropy(self.second(torch.tanh(self.first(x))), y) / 2)
            if batch_idx % 2:
                self.clip_gradients(optimizer, 0.2, "norm")
                optimizer.step()
                optimizer.zero_grad()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(self.first.parameters(), lr=0.1), torch.optim.SGD(self.second.parameters(), lr=0.3)]


class Stream(IterableDataset[Any]):
    """Samples without a length, as they come from a network: those that the user has given to this rank."""

    def __init__(self, indices: Sequence[int], num_samples: int = 64) -> None:
        self.indices, self.num_samples = indices, num_samples

    def __iter__(self) -> Iterator[Any]:
        data = dataset(self.num_samples)
        return (data[index] for index in self.indices)
