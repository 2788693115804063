"""Models on which no formula of the planner was chosen: convolutions with BatchNorm, and an LSTM."""

from __future__ import annotations

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader


class ConvNet(LightningModule):
    """Convolutions with BatchNorm on images (batch, 3, 32, 32), whose channels double at every second one; SGD."""

    def __init__(self, width: int = 32, num_layers: int = 6) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for number in range(num_layers):
            into = width * 2 ** (number // 2)
            convolution = nn.Conv2d(channels, into, 3, stride=1 + (number in (2, 4)), padding=1, bias=False)
            layers.append(nn.Sequential(convolution, nn.BatchNorm2d(into), nn.ReLU()))
            channels = into
        self.layers = nn.Sequential(*layers, nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten()))
        self.head = nn.Linear(channels, 10)

    def example_batch(self, batch_size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(batch_size, 3, 32, 32), torch.randint(10, (batch_size,))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, classes = batch
        return F.cross_entropy(self.head(self.layers(images)), classes)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


class Recurrent(nn.Module):
    """An LSTM that passes its outputs on, without its states."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, features: Tensor) -> Tensor:
        outputs: Tensor = self.lstm(features)[0]
        return outputs


class LanguageLSTM(LightningModule):
    """LSTMs over bytes (batch, length + 1), each of which predicts the next one; Adam."""

    def __init__(self, width: int = 256, num_layers: int = 4, length: int = 32) -> None:
        super().__init__()
        self.length = length
        self.bytes = nn.Embedding(256, width)
        self.layers = nn.Sequential(*(Recurrent(width) for _ in range(num_layers)))
        self.head = nn.Linear(width, 256)

    def example_batch(self, batch_size: int) -> Tensor:
        return torch.randint(256, (batch_size, self.length + 1))

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.example_batch(4096), batch_size=16)  # type: ignore[arg-type]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.head(self.layers(self.bytes(batch[:, :-1])))
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-3)
