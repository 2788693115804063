"""Blocks are found in models as a course writes them, and in those of Hugging Face, as they stand."""

# ruff: noqa: N806 - names as in courses

from collections import Counter
from collections.abc import Callable
from functools import partial
from operator import attrgetter
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_multigpu.engine.step_state import preserved_state
from lightning_multigpu.engine.tensor_split.tensor_group import TensorGroup
from lightning_multigpu.engine.tensor_split.trials import TracelessStep
from lightning_multigpu.planning.split_plan import SplitPlan
from lightning_multigpu.strategies.tensor_parallel.split_layers import SplitLayers
from tests.strategies.tensor_parallel.language import (
    HEADS,
    LENGTH,
    WIDTH,
    Block,
    FeedForward,
    Language,
    Task,
    fused,
    text,
)
from tests.strategies.tensor_parallel.test_tensor_split import MODELS


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Of (batch, length, heads, of a head) each."""
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class OnlyHeadDim(nn.Module):
    """The shape of the projection says how many heads there are."""

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.head_dim = dim // num_heads
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (-1, self.head_dim)) for each in self.qkv(x).chunk(3, dim=-1))
        return self.out(attend(q, k, v).flatten(2))  # type: ignore[no-any-return]


class Separate(nn.Module):
    """Three projections, and scores by hand; an attribute counts the heads."""

    def __init__(self, d_model: int, heads: int, counted_by: str = "heads") -> None:
        super().__init__()
        self.counted_by = counted_by
        setattr(self, counted_by, heads)
        self.q, self.k, self.v = (nn.Linear(d_model, d_model) for _ in range(3))
        self.proj = nn.Linear(d_model, d_model)
        self.register_buffer("mask", torch.tril(torch.ones(LENGTH, LENGTH)).bool())

    def forward(self, x: Tensor) -> Tensor:
        B, T, D = x.shape
        heads = attrgetter(self.counted_by)(self)
        q, k, v = (layer(x).view(B, T, heads, D // heads).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = q @ k.transpose(-2, -1) / (D // heads) ** 0.5
        scores = scores.masked_fill(~self.mask[:T, :T], float("-inf"))
        y = (F.softmax(scores, dim=-1) @ v).transpose(1, 2).contiguous().view(B, T, D)
        return self.proj(y)  # type: ignore[no-any-return]


class Grouped(Separate):
    """An attribute ``h`` is the width, and the config counts the heads."""

    def __init__(self, d_model: int, heads: int) -> None:
        super().__init__(d_model, heads, "h")
        self.h, self.config = d_model, SimpleNamespace(num_attention_heads=heads)
        self.counted_by = "config.num_attention_heads"


class Flat(nn.Module):
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


def language(attention: Callable[[int, int], nn.Module]) -> nn.Module:
    return Language(*(Block(attention(WIDTH, HEADS), FeedForward(nn.GELU())) for _ in range(2)))


OWN: dict[str, Callable[[], nn.Module]] = {
    "separate": partial(language, Separate),
    "counted by a config": partial(language, Grouped),
    "flat": lambda: Language(Flat(WIDTH, HEADS), Flat(WIDTH, HEADS)),
}
OWN_FOUND = {"vocabulary": 1, "attention": 2, "first, second": 2}


def planned(model: Callable[[], nn.Module], *, plan: Any = "auto", optimizer: Any = torch.optim.SGD) -> SplitPlan:
    """The plan of the first of two ranks, which tries the split without the other one."""
    task, batch, group = Task(model), next(iter(text())), TensorGroup(None, size=2)
    group.shows_parts = False  # as the strategy reads parameters
    step = TracelessStep(
        task,
        group,
        lambda: task.training_step(batch, 0),
        traceless=partial(preserved_state, task),
        gather=lambda value: [value],
    )
    optimizers = [optimizer(task.parameters())]
    return SplitLayers(task, group, plan).decide(step, optimizers)


MODELS_AND_BLOCKS = {**MODELS, **{name: (model, OWN_FOUND) for name, model in OWN.items()}}


@pytest.mark.parametrize("name", MODELS_AND_BLOCKS)
def test_blocks_are_found(name: str) -> None:
    model, expected = MODELS_AND_BLOCKS[name]
    found: Counter[str] = Counter()
    plan = planned(model)
    for blocks in plan.blocks:
        found[blocks.shape] += blocks.num_blocks * (not blocks.reason)
    assert +found == expected
    if name == "one bad block":
        assert [each.names for each in plan.blocks if each.reason] == ["model.blocks.2.(first, second)"]


@pytest.mark.parametrize("attention", [OnlyHeadDim, partial(Separate, counted_by="nh")])
def test_a_whole_attention_is_told_what_to_change(attention: Callable[[int, int], nn.Module]) -> None:
    words = "no attribute of model.blocks.*.attention counts the heads: store their number in __init__, as self.num_h"
    plan = planned(partial(language, attention))
    *split, row = plan.blocks
    assert [(each.shape, each.reason) for each in split] == [("vocabulary", ""), ("first, second", "")]
    assert (row.shape, row.num_blocks) == ("attention", 2)
    assert words in row.reason


def without_blocks() -> nn.Module:
    model = Language(nn.LayerNorm(WIDTH))
    model.embedding.max_norm = 100.0
    return model


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (fused, {"optimizer": torch.optim.Adafactor}, "Adafactor may need whole tensors"),
        (without_blocks, {}, "has found no layer to split"),
    ],
)
def test_what_cannot_be_split_is_refused(model: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        planned(model, **options)


def test_a_mistake_of_this_package_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    """An attribute that a newer torch lacks was "no layer to split", as if it were the module's fault."""
    monkeypatch.delattr(TensorGroup, "all_reduce")
    with pytest.raises(AttributeError, match="all_reduce"):
        planned(fused)
