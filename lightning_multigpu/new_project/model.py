"""A model that learns to write: what the next byte of a text is.

It is an ordinary LightningModule: nothing in it knows how many processes train it.
"""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F

NUM_BYTES = 256


class NextByte(L.LightningModule):
    """Bytes of shape (batch, context) to logits of the byte after them, of shape (batch, 256).

    Args:
        context: bytes that the model sees; that of the data.
        width: features of the hidden layers.
        learning_rate: of Adam.
    """

    def __init__(self, context: int = 32, width: int = 512, learning_rate: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        # A pipeline splits this container by its layers.
        self.layers = nn.Sequential(
            nn.Embedding(NUM_BYTES, 16),
            nn.Flatten(),
            nn.Linear(16 * context, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, NUM_BYTES),
        )

    def forward(self, text: Tensor) -> Tensor:
        logits: Tensor = self.layers(text)
        return logits

    def loss(self, batch: list[Tensor]) -> Tensor:
        """Mean cross-entropy, in nats, of the last byte of each window of shape (batch, context + 1)."""
        windows = batch[0].long()
        return F.cross_entropy(self(windows[:, :-1]), windows[:, -1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True, sync_dist=True)  # sync_dist: the mean over all ranks

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("test_loss", self.loss(batch), sync_dist=True)

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """The most likely last byte of each window, of shape (batch,)."""
        logits: Tensor = self(batch[0].long()[:, :-1])
        return logits.argmax(dim=1)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)
