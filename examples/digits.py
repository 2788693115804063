"""A small CNN learns to read handwritten digits, across processes.

::

    python examples/digits.py                     two processes, gradients averaged around a ring
    python examples/digits.py --strategy auto --devices 1 --batch-size 64
                                                  one device, the same global batch
    python examples/digits.py --num-nodes 2       on each of two machines, see docs/machines.md
    python examples/digits.py --resume runs/digits
                                                  after Ctrl-C or a failure, or with more --max-epochs

``DigitsCNN`` and ``DigitsData`` are ordinary Lightning classes: nothing in them knows how many processes there are.
"""

from __future__ import annotations

import argparse

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, random_split
from torchmetrics.classification import MulticlassAccuracy

from lightning_multigpu import find_last_checkpoint  # importing the pack makes its strategies known to Lightning
from lightning_multigpu.callbacks import ProfilerReport
from lightning_multigpu.report.text import text

NUM_CLASSES = 10
Batch = list[Tensor]
"""Images of shape (batch, 1, 8, 8), values 0 to 1, and labels of shape (batch,)."""


class DigitsCNN(L.LightningModule):
    """Two convolutions and two linear layers: images of shape (batch, 1, 8, 8) to logits of shape (batch, 10).

    Args:
        channels: of the first convolution; the second has twice as many.
        learning_rate: of Adam.
    """

    def __init__(self, channels: int = 16, learning_rate: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.learning_rate = learning_rate
        self.layers = nn.Sequential(
            nn.Conv2d(1, channels, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(channels, 2 * channels, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(2 * channels * 4 * 4, 64),
            nn.ReLU(),
            nn.Linear(64, NUM_CLASSES),
        )
        self.val_accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")
        self.test_accuracy = MulticlassAccuracy(NUM_CLASSES, average="micro")

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = F.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        images, labels = batch
        logits = self(images)
        self.val_accuracy(logits, labels)
        self.log("val_loss", F.cross_entropy(logits, labels), sync_dist=True)
        self.log("val_accuracy", self.val_accuracy, prog_bar=True)

    def test_step(self, batch: Batch, batch_idx: int) -> None:
        images, labels = batch
        self.test_accuracy(self(images), labels)
        self.log("test_accuracy", self.test_accuracy)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        images, _ = batch
        classes: Tensor = self(images).argmax(dim=-1)
        return classes

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


class DigitsData(L.LightningDataModule):
    """The 1,797 handwritten digits that come with scikit-learn: 1,257 to train on, 270 to validate, 270 to test.

    Args:
        batch_size: images in each process's batch; the global batch is that times the number of processes.
    """

    def __init__(self, batch_size: int = 32) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        digits = load_digits()
        images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # pixels are 0 to 16
        dataset = TensorDataset(images, torch.tensor(digits.target))
        # The split must be the same in every process, and in the next run.
        same = torch.Generator().manual_seed(0)
        self.train_set, self.val_set, self.test_set = random_split(dataset, [1257, 270, 270], generator=same)

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.val_set, batch_size=self.batch_size)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.test_set, batch_size=self.batch_size)

    def predict_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self.test_dataloader()


def main() -> None:
    options = parse_options()
    L.seed_everything(options.seed)
    report = ProfilerReport(print_table=False)  # shown below, when the accuracy is known too
    trainer = L.Trainer(
        strategy=options.strategy,
        accelerator=choose_accelerator(options.accelerator, options.devices),
        devices=options.devices,
        num_nodes=options.num_nodes,
        max_epochs=options.max_epochs,
        logger=CSVLogger("runs", name="digits"),
        log_every_n_steps=10,
        callbacks=[report, ModelCheckpoint(filename="last", save_on_exception=True)],
    )
    model, data = DigitsCNN(), DigitsData(batch_size=options.batch_size)
    trainer.fit(model, data, ckpt_path=options.resume and find_last_checkpoint(options.resume))
    [metrics] = trainer.test(model, data, verbose=False)
    if trainer.is_global_zero:
        print(f"test accuracy: {metrics['test_accuracy']:.4f}")
        assert report.report is not None
        print(text(report.report))
        print(f"written to {report.path}")
        print(f"where the time of a step went: {report.page_path}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train and test a CNN on handwritten digits.")
    add = parser.add_argument
    add("--strategy", default="ring_ddp", help="what Trainer(strategy=...) takes; default: %(default)s")
    add("--accelerator", default="auto", help="cpu or gpu; default: gpu if there are enough of them, else cpu")
    add("--devices", type=int, default=2, help="processes on each machine; default: %(default)s")
    add("--num-nodes", type=int, default=1, help="machines; default: %(default)s")
    add("--max-epochs", type=int, default=15, help="default: %(default)s")
    add("--batch-size", type=int, default=32, help="images in each process's batch; default: %(default)s")
    add("--resume", metavar="RUN", help="go on from the newest checkpoint of an earlier run: runs/digits/version_0")
    add("--seed", type=int, default=0, help="the seed of weights and shuffling; default: %(default)s")
    return parser.parse_args()


def choose_accelerator(accelerator: str, devices: int) -> str:
    """Turns "auto" into "gpu" where every process of this machine gets one, else into "cpu"."""
    if accelerator != "auto":
        return accelerator
    return "gpu" if torch.cuda.device_count() >= devices else "cpu"


if __name__ == "__main__":
    main()
