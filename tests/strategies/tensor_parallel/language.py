"""A small language model with blocks of one's own, and the task that trains it."""

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

WIDTH, HEADS, VOCABULARY, LENGTH = 16, 4, 24, 6


class Attention(nn.Module):
    """Of one's own, as nanoGPT's: ``order`` says how queries, keys and values lie in the fused projection."""

    def __init__(self, order: str = "sections", *, normed: bool = False) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH // HEADS) if normed else nn.Identity()
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.n_head, self.n_embd = HEADS, WIDTH
        self.order, self.is_normed = order, True

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        if self.order == "sections":
            q, k, v = self.qkv(x).split(self.n_embd, dim=2)
        else:
            q, k, v = self.qkv(x).view(batch, length, self.n_head, -1).chunk(3, -1)
        q, k, v = (each.reshape(batch, length, self.n_head, -1).transpose(1, 2) for each in (q, k, v))
        q = self.norm(q) if self.is_normed else q
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)
        return self.proj(y.reshape(batch, length, self.n_embd))  # type: ignore[no-any-return]


class Gated(nn.Module):
    """The feed-forward block of Llama, and one whose gate and value are fused."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__()
        self.up = nn.ModuleList([nn.Linear(WIDTH, 40)] if fused else [nn.Linear(WIDTH, 20), nn.Linear(WIDTH, 20)])
        self.down = nn.Linear(20, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up[0](x).chunk(2, -1) if len(self.up) == 1 else (up(x) for up in self.up)
        return self.down(F.silu(gate) * value)  # type: ignore[no-any-return]


class Block(nn.Module):
    def __init__(self, attention: nn.Module, feed_forward: nn.Module) -> None:
        super().__init__()
        self.norm, self.attention, self.feed_forward = nn.LayerNorm(WIDTH), attention, feed_forward

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.feed_forward(x)  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    """Stays whole where a function of all hidden features stands between its layers."""

    def __init__(self, between: nn.Module) -> None:
        super().__init__()
        self.first, self.between, self.second = nn.Linear(WIDTH, 20), between, nn.Linear(20, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.between(self.first(x)))  # type: ignore[no-any-return]


class Language(nn.Module):
    """Embeds tokens, and predicts the next ones."""

    def __init__(self, *blocks: nn.Module, tied: bool = False) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(VOCABULARY, WIDTH), nn.Sequential(*blocks)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=not tied)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.blocks(self.embedding(input_ids)))  # type: ignore[no-any-return]


def fused() -> nn.Module:
    return Language(*(Block(Attention(), Gated(fused=True)) for _ in range(2)), tied=True)


def normed(num_blocks: int = 2) -> nn.Module:
    return Language(*(Block(Attention(normed=True), Gated(fused=True)) for _ in range(num_blocks)), tied=True)


class Task(L.LightningModule):
    """Trains a model, made from a fixed seed, to predict the next tokens; a classifier, the sum of its tokens."""

    def __init__(self, make: Callable[[], nn.Module] = fused) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = make()
        self.validated: list[float] = []
        self.noted: list[float] = []

    def loss(self, batch: list[Tensor]) -> Tensor:
        (tokens,) = batch
        if isinstance(self.model, Language):
            logits = self.model(tokens)
            return F.cross_entropy(logits[:, :-1].reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))
        labels = tokens.sum(1) % 3 if "Classification" in type(self.model).__name__ else tokens
        return self.model(input_ids=tokens, labels=labels).loss  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.validated.append(float(self.loss(batch)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def text(num_samples: int = 16) -> DataLoader[Any]:
    tokens = torch.randint(VOCABULARY, (num_samples, LENGTH), generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(tokens), batch_size=4)
