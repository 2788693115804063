"""A small GPT learns English, byte by byte, across processes.

::

    lightning-multigpu fit --config configs/tensor_split.yaml                              Python's own documentation
    lightning-multigpu fit --config configs/tensor_split.yaml --data.text my_book.txt      any text
    lightning-multigpu fit --config configs/tensor_split.yaml --model.num_layers 6 --model.width 384

``ByteGPT`` and ``TextData`` are ordinary Lightning classes: nothing in them knows how many processes there are.
"""

from __future__ import annotations

import math
from pathlib import Path
from pydoc_data.topics import topics

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

NUM_BYTES = 256
Batch = list[Tensor]
"""One tensor of bytes, of shape (batch, context + 1)."""


class Attention(nn.Module):
    """Causal self-attention with several heads: (batch, length, width) to the same shape."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        # (batch, length, 3 width) -> 3 x (batch, heads, length, width of a head)
        heads = self.queries_keys_values(x).unflatten(-1, (3, self.num_heads, -1))
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        mixed: Tensor = self.output(attended.transpose(1, 2).flatten(-2))
        return mixed


class Block(nn.Module):
    """Attention, then a two-layer network at every position, each added to what comes in."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(width, num_heads))
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(x)
        mixed: Tensor = x + self.feed_forward(x)
        return mixed


class ByteGPT(L.LightningModule):
    """Bytes of shape (batch, length <= context) to logits of the byte after each, of shape (batch, length, 256).

    Args:
        width: features of every byte; a multiple of ``num_heads``.
        num_layers: blocks.
        num_heads: of each block's attention.
        context: how many bytes the model looks back at most.
        learning_rate: of AdamW.

    Raises:
        ValueError: ``num_heads`` does not divide ``width``.
    """

    def __init__(
        self, width: int = 128, num_layers: int = 3, num_heads: int = 4, context: int = 128, learning_rate: float = 3e-3
    ) -> None:
        super().__init__()
        if width % num_heads:
            raise ValueError(f"width={width} is not a multiple of num_heads={num_heads}; change one of them")
        self.save_hyperparameters()
        self.context = context
        self.learning_rate = learning_rate
        self.bytes = nn.Embedding(NUM_BYTES, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_layers)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, NUM_BYTES))

    def forward(self, text: Tensor) -> Tensor:
        positions = torch.arange(text.shape[1], device=text.device)
        logits: Tensor = self.head(self.blocks(self.bytes(text) + self.positions(positions)))
        return logits

    def loss(self, batch: Batch) -> Tensor:
        """Mean cross-entropy in nats per byte; every byte but the first of a window is predicted."""
        [text] = batch
        text = text.long()
        return F.cross_entropy(self(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        loss = self.loss(batch)
        self.log("val_loss", loss, sync_dist=True)
        self.log("val_bits_per_byte", loss / math.log(2), sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


class TextData(L.LightningDataModule):
    """A text in windows of ``context + 1`` bytes; the last tenth of them is for validation.

    Args:
        text: a file; by default the documentation that comes with Python, 466 kB of English in Python 3.11.
        context: bytes that the model sees.
        batch_size: windows in each process's batch; the global batch is that times the number of processes.

    Raises:
        ValueError: in ``setup``, the text is too short.
    """

    def __init__(self, text: Path | None = None, context: int = 128, batch_size: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.text = text
        self.context = context
        self.batch_size = batch_size

    def setup(self, stage: str) -> None:
        text = python_documentation() if self.text is None else self.text.read_bytes()
        shortest = 10 * self.context + 1
        if len(text) < shortest:
            raise ValueError(
                f"text={self.text} has {len(text)} bytes; {shortest} are needed for context={self.context}. Pass a "
                "longer text or a smaller context"
            )
        # Neighbouring windows share one byte: the last target of one is the first input of the next.
        windows = torch.frombuffer(bytearray(text), dtype=torch.uint8).unfold(0, self.context + 1, self.context)
        num_val = len(windows) // 10
        self.train_set, self.val_set = TensorDataset(windows[:-num_val]), TensorDataset(windows[-num_val:])

    def train_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.train_set, batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, ...]]:
        return DataLoader(self.val_set, batch_size=self.batch_size)


def python_documentation() -> bytes:
    """What ``help()`` knows about the language; in the order of the keys, the same in every process and every run."""
    return "\n".join(topics[key] for key in sorted(topics)).encode()
