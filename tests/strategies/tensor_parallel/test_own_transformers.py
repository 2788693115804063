"""Language models as a course writes them are split, unmodified, and train as on one device."""

# ruff: noqa: N803, N806 - names as in courses

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.strategies.tasks import Case, assert_same_weights, make_strategy, make_trainer, state
from tests.strategies.tensor_parallel.test_tensor_split import LENGTH, VOCABULARY, Noting, text
from tests.world import World

WIDTH, HEADS = 24, 4


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of (batch, length, heads, of a head) each."""
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Fused(nn.Module):
    """One projection of queries, keys and values, and a width that the input says."""

    def __init__(self, D: int, h: int) -> None:
        super().__init__()
        self.h = h
        self.qkv, self.proj = nn.Linear(D, 3 * D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.h, D // self.h).unbind(2)
        return self.proj(attend(q, k, v).reshape(B, T, D))  # type: ignore[no-any-return]


class Normed(Fused):
    """Norm and dropout stand before the width is read."""

    def __init__(self, width: int, h: int) -> None:
        super().__init__(width, h)
        self.norm, self.dropout = nn.LayerNorm(width), nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.dropout(self.norm(x)))


class FusedBySections(nn.Module):
    """As nanoGPT's: sections as wide as an attribute, and heads whose width the input says."""

    def __init__(self, n_embd: int, n_head: int) -> None:
        super().__init__()
        self.c_attn, self.c_proj = nn.Linear(n_embd, 3 * n_embd), nn.Linear(n_embd, n_embd)
        self.n_head, self.n_embd = n_head, n_embd

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.size()
        q, k, v = (each.view(B, T, self.n_head, C // self.n_head) for each in self.c_attn(x).split(self.n_embd, dim=2))
        return self.c_proj(attend(q, k, v).contiguous().view(B, T, C))  # type: ignore[no-any-return]


class FusedWithHeadDim(nn.Module):
    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.heads_of_layer, self.head_dim = num_heads, dim // num_heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        B, T, _ = x.shape
        q, k, v = self.qkv(x).view(B, T, 3, self.heads_of_layer, self.head_dim).unbind(2)
        return self.out(attend(q, k, v).flatten(2))  # type: ignore[no-any-return]


class OnlyHeadDim(nn.Module):
    """The shape of the projection says how many heads there are."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // num_heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)) for each in self.qkv(x).chunk(3, dim=-1))
        return self.out(attend(q, k, v).flatten(2))  # type: ignore[no-any-return]


class Unnamed(nn.Module):
    """Nothing says how many heads there are."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (HEADS, -1)) for each in self.qkv(x).chunk(3, dim=-1))
        return self.out(attend(q, k, v).flatten(2))  # type: ignore[no-any-return]


class Measuring(Fused):
    """Takes the width from the weight."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.h, self.qkv.in_features // self.h)).unbind(2)
        return self.proj(attend(q, k, v).flatten(2))  # type: ignore[no-any-return]


class Separate(nn.Module):
    """Three projections, and scores by hand."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v = (nn.Linear(d_model, d_model) for _ in range(3))
        self.proj = nn.Linear(d_model, d_model)
        self.register_buffer("mask", torch.tril(torch.ones(LENGTH, LENGTH)).bool())

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        q, k, v = (
            layer(x).view(B, T, self.heads, D // self.heads).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        scores = q @ k.transpose(-2, -1) / (D // self.heads) ** 0.5
        scores = scores.masked_fill(~self.mask[:T, :T], float("-inf"))
        y = (F.softmax(scores, dim=-1) @ v).transpose(1, 2).contiguous().view(B, T, D)
        return self.proj(y)  # type: ignore[no-any-return]


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc, self.gelu, self.proj = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.gelu(self.fc(x)))  # type: ignore[no-any-return]


def sequential(width: int) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))


class Block(nn.Module):
    def __init__(self, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.ln1, self.attn, self.ln2, self.mlp = nn.LayerNorm(WIDTH), attention, nn.LayerNorm(WIDTH), mlp

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln1(x))
        return x + self.mlp(self.ln2(x))  # type: ignore[no-any-return]


class Flat(nn.Module):
    """All layers of a block are its own attributes."""

    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(self.ln1(x)).chunk(3, dim=-1)
        q, k, v = (each.view(B, T, self.n_heads, C // self.n_heads) for each in (q, k, v))
        x = x + self.proj(attend(q, k, v).reshape(B, T, C))
        return x + self.fc2(F.gelu(self.fc1(self.ln2(x))))  # type: ignore[no-any-return]


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "fused, h": lambda: Block(Fused(WIDTH, HEADS), sequential(WIDTH)),
    "fused, h, attributes": lambda: Block(Fused(WIDTH, HEADS), MLP(WIDTH)),
    "nanoGPT": lambda: Block(FusedBySections(WIDTH, HEADS), MLP(WIDTH)),
    "norm within": lambda: Block(Normed(WIDTH, HEADS), sequential(WIDTH)),
    "head_dim": lambda: Block(FusedWithHeadDim(WIDTH, HEADS), sequential(WIDTH)),
    "only head_dim": lambda: Block(OnlyHeadDim(WIDTH, HEADS), sequential(WIDTH)),
    "separate": lambda: Block(Separate(WIDTH, HEADS), sequential(WIDTH)),
    "flat": lambda: Flat(WIDTH, HEADS),
    "measuring": lambda: Block(Measuring(WIDTH, HEADS), sequential(WIDTH)),
    "two heads and one": lambda: Block(Fused(WIDTH, 3), sequential(WIDTH)),
}


WHOLE: dict[str, Callable[[], nn.Module]] = {
    "unnamed": lambda: Block(Unnamed(WIDTH), sequential(WIDTH)),
    "alone": lambda: Block(Unnamed(WIDTH), nn.Linear(WIDTH, WIDTH)),
}


class GPT(L.LightningModule):
    def __init__(self, block: str, *, tied: bool = False, depth: int = 2) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([(BLOCKS | WHOLE)[block]() for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, idx: Tensor) -> Tensor:
        x = self.tokens(idx) + self.positions(torch.arange(idx.shape[1], device=idx.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        (tokens,) = batch
        return F.cross_entropy(self(tokens[:, :-1]).reshape(-1, VOCABULARY), tokens[:, 1:].reshape(-1))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def train(block: str, ranks: int, *, tied: bool = False, depth: int = 2, **options: Any) -> dict[str, Any]:
    module, noting = GPT(block, tied=tied, depth=depth), Noting()
    strategy = "auto" if ranks == 1 else make_strategy("tensor_split" if ranks == 2 else "hybrid", **options)
    trainer = make_trainer(
        Case(max_epochs=1),
        strategy,
        ranks,
        callbacks=[] if ranks == 4 else [noting],
        use_distributed_sampler=False,
    )
    trainer.fit(module, text())
    return {"weights": state(module), "split": noting.split, "plan": noting.plan}


@functools.cache
def on_one_device(block: str, tied: bool = False) -> dict[str, Any]:
    return train(block, 1, tied=tied)


@pytest.mark.parametrize(("block", "tied"), [*((block, False) for block in BLOCKS), ("nanoGPT", True)])
def test_trains_as_on_one_device(world2: World, block: str, tied: bool) -> None:
    for result in world2.run(train, block, 2, tied=tied):
        assert result["split"] == {"vocabulary": 1, "attention": 2, "first, second": 2}
        assert_same_weights(result, on_one_device(block, tied))
        plan = result["plan"]
        assert plan.ranks[1].parameters_bytes < 0.55 * plan.one_device.parameters_bytes


@pytest.mark.parametrize("block", ["nanoGPT", "flat"])
def test_a_pipeline_of_split_layers_trains_as_on_one_device(world4: World, block: str) -> None:
    """On another stage than its own, a layer that reads the shape of its input gets a placeholder."""
    sizes = {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}
    for result in world4.run(train, block, 4, **sizes):
        assert_same_weights(result, on_one_device(block))


def test_activations_are_split_along_the_sequence(world2: World) -> None:
    for result in world2.run(train, "separate", 2, sequence_split=True):
        assert result["split"] == {"vocabulary": 1, "attention": 2, "first, second": 2}
        assert result["plan"].notes == ["activations between the blocks of blocks are split along dimension 1"]
        assert_same_weights(result, on_one_device("separate"))


def test_a_whole_attention_is_told_what_to_change(world2: World) -> None:
    block = "unnamed"
    words = "no attribute of blocks.*.attn counts the heads: store their number in __init__, as self.num_heads"
    for result in world2.run(train, block, 2):
        assert result["split"] == {"vocabulary": 1, "first, second": 2}
        (row,) = result["plan"].whole
        assert (row.shape, row.num_blocks) == ("attention", 2)
        assert words in row.reason
        assert_same_weights(result, on_one_device(block, False))


def test_a_module_of_which_little_is_split_is_refused(world2: World) -> None:
    """It trained on: each rank held 98 per cent of the parameters."""
    words = r"less than a tenth.*stay whole: blocks\.\*\.attn\.qkv, .*blocks\.\*\.attn counts the heads.*ring_ddp"
    world2.run_raising(ValueError, words, train, "alone", 2, depth=4)
