"""The text that the model learns from: the documentation that comes with every Python, or a file of yours."""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset


class TextData(L.LightningDataModule):
    """A text in windows of ``context + 1`` bytes, eight bytes apart.

    The last tenth of them is for validation, the tenth before it for the test and for predictions.

    Args:
        text: a file; by default Python's documentation, 466 kB of English in Python 3.11.
        context: bytes that the model sees.
        batch_size: windows in each rank's batch, or in that of a pipeline; GlobalBatchSize in config.yaml sets it.

    Raises:
        ValueError: in ``setup``, the text is too short.
    """

    def __init__(self, text: Path | None = None, context: int = 32, batch_size: int = 128) -> None:
        super().__init__()
        self.text = text
        self.context = context
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        text = python_documentation() if self.text is None else self.text.read_bytes()
        shortest = self.context + 100
        if len(text) < shortest:
            raise ValueError(f"text={self.text} has {len(text)} bytes; pass a text of {shortest} or more")
        windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, self.context + 1, 8)
        num_val = len(windows) // 10
        self.train_set = TensorDataset(windows[: -2 * num_val])
        self.test_set = TensorDataset(windows[-2 * num_val : -num_val])
        self.val_set = TensorDataset(windows[-num_val:])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.val_set, batch_size=self.batch_size)

    def test_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.test_set, batch_size=self.batch_size)

    def predict_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return self.test_dataloader()


def python_documentation() -> bytes:
    """What ``help()`` knows about the language; in the order of the keys, the same in every process and every run."""
    return "\n".join(topics[key] for key in sorted(topics)).encode()
