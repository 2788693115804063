"""Language models as a course writes them are split, unmodified, and train as on one device."""

# ruff: noqa: N803, N806 - names as in courses

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.strategies.tasks import assert_same_weights
from tests.strategies.tensor_parallel import test_tensor_split
from tests.strategies.tensor_parallel.test_tensor_split import HEADS, LENGTH, MODELS, Language
from tests.world import World

WIDTH = 24  # of which three heads may be made


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
    "nanoGPT": lambda: Block(FusedBySections(WIDTH, HEADS), MLP(WIDTH)),
    "head_dim": lambda: Block(FusedWithHeadDim(WIDTH, HEADS), sequential(WIDTH)),
    "only head_dim": lambda: Block(OnlyHeadDim(WIDTH, HEADS), sequential(WIDTH)),
    "separate": lambda: Block(Separate(WIDTH, HEADS), sequential(WIDTH)),
    "flat": lambda: Flat(WIDTH, HEADS),
    "two heads and one": lambda: Block(Fused(WIDTH, 3), sequential(WIDTH)),
}


WHOLE: dict[str, Callable[[], nn.Module]] = {
    "unnamed": lambda: Block(Unnamed(WIDTH), sequential(WIDTH)),
    "alone": lambda: Block(Unnamed(WIDTH), nn.Linear(WIDTH, WIDTH)),
}


def train(block: str, ranks: int, *, tied: bool = False, depth: int = 2) -> dict[str, Any]:
    def model() -> nn.Module:
        return Language(*((BLOCKS | WHOLE)[block]() for _ in range(depth)), tied=tied)

    with mock.patch.dict(MODELS, {block: model}), mock.patch.object(test_tensor_split, "WIDTH", WIDTH):
        return test_tensor_split.train(block, ranks)


@functools.cache
def on_one_device(block: str, tied: bool = False) -> dict[str, Any]:
    return train(block, 1, tied=tied)


@pytest.mark.parametrize(("block", "tied"), [*((block, False) for block in BLOCKS), ("nanoGPT", True)])
def test_trains_as_on_one_device(world2: World, block: str, tied: bool) -> None:
    reference, results = on_one_device(block, tied), world2.run(train, block, 2, tied=tied)
    for result in results:
        assert result["split"] == {"vocabulary": 1, "attention": 2, "first, second": 2}
        assert_same_weights(result, reference)
        assert result["held"] == result["state"]
    assert sum(result["held"] for result in results) < 1.1 * reference["held"]


def test_a_whole_attention_is_told_what_to_change(world2: World) -> None:
    words = "no attribute of model.blocks.*.attn counts the heads: store their number in __init__, as self.num_heads"
    for result in world2.run(train, "unnamed", 2):
        assert result["split"] == {"vocabulary": 1, "first, second": 2}
        (row,) = result["plan"].whole
        assert (row.shape, row.num_blocks) == ("attention", 2)
        assert words in row.reason
        assert_same_weights(result, on_one_device("unnamed"))


def test_a_module_of_which_little_is_split_is_refused(world2: World) -> None:
    """It trained on: each rank held 98 per cent of the parameters."""
    words = r"less than a tenth.*stay whole: model\.blocks\.\*\.attn\.qkv, .*\.attn counts the heads.*ring_ddp"
    world2.run_raising(ValueError, words, train, "alone", 2, depth=4)
