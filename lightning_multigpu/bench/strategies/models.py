"""Models of a bench, and data that takes no time to load: the same batch again and again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

T = TypeVar("T")


@dataclass(frozen=True)
class Subject:
    """What a bench trains.

    Args:
        name: of the model, for people.
        model: makes the LightningModule.
        batch_size: samples of each rank, or of each device under ``dp``, for models with an ``example_batch``; 0 where
            a loader decides.
        data: makes its LightningDataModule; None where the model brings its data.
        precision: of the Trainer; None for its default.
        accumulate: batches of an optimizer step.
    """

    name: str
    model: Callable[[], LightningModule]
    batch_size: int = 0
    data: Callable[[], LightningDataModule] | None = None
    precision: Any = None
    accumulate: int = 1


class BenchMLP(LightningModule):
    """Six Linear(1024, 1024) with ReLU and Linear(1024, 10): 6.3 M parameters; SGD.

    Inputs (batch, 1024), classes (batch,).
    """

    default_batch_size = 64

    def __init__(self, width: int = 1024, num_layers: int = 6) -> None:
        super().__init__()
        self.width = width
        layers = [layer for _ in range(num_layers) for layer in (nn.Linear(width, width), nn.ReLU())]
        self.layers = nn.Sequential(*layers, nn.Linear(width, 10))

    def example_batch(self, batch_size: int) -> tuple[Tensor, Tensor]:
        return torch.randn(batch_size, self.width), torch.randint(10, (batch_size,))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, classes = batch
        return F.cross_entropy(self.layers(inputs), classes)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class BenchGPT(LightningModule):
    """A GPT over bytes, 8 blocks of width 256 and 4 heads: 6.5 M parameters; SGD.

    Bytes (batch, 65); the target of each position is the next byte.
    """

    default_batch_size = 4

    def __init__(self, width: int = 256, num_layers: int = 8, num_heads: int = 4, context: int = 64) -> None:
        super().__init__()
        self.context = context
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(context, width)
        block = nn.TransformerEncoderLayer(
            width, num_heads, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(block, num_layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 256)

    def example_batch(self, batch_size: int) -> Tensor:
        return torch.randint(256, (batch_size, self.context + 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        text, length = batch, self.context
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=text.device)
        features = self.bytes(text[:, :-1]) + self.positions(torch.arange(length, device=text.device))
        logits = self.head(self.blocks(features, mask=mask, is_causal=True))
        return F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class SameBatch(Dataset[Any]):
    """``length`` samples; every batch of them is the same one, so that loading takes no time."""

    def __init__(self, batch: Any, length: int) -> None:
        self._batch = batch
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitems__(self, indices: list[int]) -> Any:
        return self._batch


def repeated(batch: Any, batch_size: int, num_batches: int, num_ranks: int) -> DataLoader[Any]:
    """A loader that gives every one of ``num_ranks`` ranks ``num_batches`` times ``batch``."""
    data = SameBatch(batch, batch_size * num_batches * num_ranks)
    return DataLoader(data, batch_size=batch_size, collate_fn=_as_it_is)


def _as_it_is(batch: Any) -> Any:
    return batch


def made(base: type[T], settings: Any, where: str) -> T:
    """An object of a subclass of ``base``, as Lightning's command line makes it from a configuration file.

    Raises:
        ValueError: it cannot be made; ``where`` is the place of the settings.
    """
    parser = ArgumentParser(exit_on_error=False)
    parser.add_subclass_arguments(base, "it", fail_untyped=False)
    try:
        found: T = parser.instantiate(parser.parse_object({"it": settings})).it
    except Exception as error:  # of the user's class, or of the parser
        shown = settings if isinstance(settings, str) else settings.get("class_path")
        raise ValueError(f"{where}={shown} cannot be made: {type(error).__name__}: {error}") from error
    return found
