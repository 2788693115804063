"""A GPT as a sequence of layers, in torch alone, so that other libraries' environments can train it too."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WIDTH, NUM_LAYERS, NUM_HEADS, CONTEXT, VOCABULARY = 256, 8, 4, 64, 256


class Embedding(nn.Module):
    """Bytes (batch, 64) to features (batch, 64, 256)."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Parameter(torch.zeros(CONTEXT, WIDTH))

    def forward(self, text: Tensor) -> Tensor:
        return self.bytes(text) + self.positions  # type: ignore[no-any-return]


class Block(nn.TransformerEncoderLayer):
    """Features (batch, 64, 256) to the same."""

    def __init__(self) -> None:
        super().__init__(WIDTH, NUM_HEADS, 4 * WIDTH, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        mask = nn.Transformer.generate_square_subsequent_mask(CONTEXT, device=x.device)
        return super().forward(x, src_mask=mask, is_causal=True)


def gpt() -> nn.Sequential:
    """Ten layers of 6.5 M parameters: the embedding, 8 blocks, and the head."""
    torch.manual_seed(0)
    return nn.Sequential(Embedding(), *(Block() for _ in range(NUM_LAYERS)), nn.Linear(WIDTH, VOCABULARY))


def batch_of(size: int) -> tuple[Tensor, Tensor]:
    """Bytes (size, 64), and the bytes to be told from them (size, 64)."""
    text = torch.randint(VOCABULARY, (size, CONTEXT + 1), generator=torch.Generator().manual_seed(1))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def median_step_s(step: Callable[[], object], num_steps: int) -> float:
    """Median seconds of a step, after two that are not timed."""
    seconds = []
    for _ in range(num_steps + 2):
        start_s = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start_s)
    return statistics.median(seconds[2:])
