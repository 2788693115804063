"""A small GPT learns English, byte by byte, across processes.

::

    python examples/language_model.py                          Python's own documentation, two processes
    python examples/language_model.py --text my_book.txt       any text
    python examples/language_model.py --num-layers 6 --width 384 --num-heads 6 --context 256 --max-epochs 10

``ByteGPT`` and ``TextData`` are ordinary Lightning classes: nothing in them knows how many processes there are.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from pydoc_data.topics import topics

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_multigpu import find_last_checkpoint
from lightning_multigpu.callbacks import RunReport, ThroughputMonitor
from lightning_multigpu.report import run_table

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

    @torch.inference_mode()
    def write(self, prompt: str, num_bytes: int, *, temperature: float = 0.8, seed: int = 0) -> str:
        """The prompt and ``num_bytes`` sampled bytes after it, as text."""
        generator = torch.Generator(self.device).manual_seed(seed)
        text = torch.tensor([list(prompt.encode())], device=self.device)
        for _ in range(num_bytes):
            logits = self(text[:, -self.context :])[:, -1] / temperature
            text = torch.cat([text, torch.multinomial(logits.softmax(-1), 1, generator=generator)], dim=1)
        return bytes(text[0].tolist()).decode(errors="replace")


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


def count_tokens(batch: Batch) -> int:
    """Bytes that are predicted in a batch: all but the first of each window."""
    [text] = batch
    return text.shape[0] * (text.shape[1] - 1)


def main() -> None:
    options = parse_options()
    L.seed_everything(options.seed)
    model = ByteGPT(options.width, options.num_layers, options.num_heads, options.context)
    data = TextData(options.text, options.context, options.batch_size)
    report = RunReport(print_table=False)  # shown below, after the sample
    trainer = L.Trainer(
        strategy=options.strategy,
        accelerator=choose_accelerator(options.accelerator, options.devices),
        devices=options.devices,
        num_nodes=options.num_nodes,
        max_epochs=options.max_epochs,
        max_steps=options.max_steps,
        logger=CSVLogger("runs", name="language_model"),
        log_every_n_steps=10,
        callbacks=[
            ThroughputMonitor(tokens_fn=count_tokens),
            report,
            ModelCheckpoint(filename="last", save_on_exception=True),
        ],
    )
    trainer.fit(model, data, ckpt_path=options.resume and find_last_checkpoint(options.resume))
    [metrics] = trainer.validate(model, data, verbose=False)
    if trainer.is_global_zero:
        print(f"validation: {metrics['val_bits_per_byte']:.3f} bits per byte")
        print(f"a sample:\n{model.write(options.prompt, num_bytes=300)}")
        assert report.report is not None
        run_table.show(report.report)
        print(f"written to {report.path}")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train a byte-level GPT on a text and let it write some.")
    add = parser.add_argument
    add("--text", type=Path, help="the file to learn from; default: Python's own documentation")
    add("--prompt", default="The ", help="what the sample begins with; default: %(default)r")
    add("--width", type=int, default=128, help="features of every byte; default: %(default)s")
    add("--num-layers", type=int, default=3, help="default: %(default)s")
    add("--num-heads", type=int, default=4, help="default: %(default)s")
    add("--context", type=int, default=128, help="bytes that the model looks back; default: %(default)s")
    add("--batch-size", type=int, default=8, help="windows in each process's batch; default: %(default)s")
    add("--max-epochs", type=int, default=3, help="default: %(default)s")
    add("--max-steps", type=int, default=-1, help="stop earlier, after that many optimizer steps")
    add("--strategy", default="ring_ddp", help="what Trainer(strategy=...) takes; default: %(default)s")
    add("--accelerator", default="auto", help="cpu or gpu; default: gpu if there are enough of them, else cpu")
    add("--devices", type=int, default=2, help="processes on each machine; default: %(default)s")
    add("--num-nodes", type=int, default=1, help="machines; default: %(default)s")
    add(
        "--resume",
        metavar="RUN",
        help="go on from the newest checkpoint of an earlier run: runs/language_model/version_0",
    )
    add("--seed", type=int, default=0, help="the seed of weights and shuffling; default: %(default)s")
    return parser.parse_args()


def choose_accelerator(accelerator: str, devices: int) -> str:
    """Turns "auto" into "gpu" where every process of this machine gets one, else into "cpu"."""
    if accelerator != "auto":
        return accelerator
    return "gpu" if torch.cuda.device_count() >= devices else "cpu"


if __name__ == "__main__":
    main()
