"""The program of the page's section "The layers alone", on two ranks and against unsplit layers."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests import documents
from tests.engine.tensor_split.shared import assert_equal, assert_parts, tensor_group
from tests.world import World, rank

(PROGRAM,) = documents.blocks(Path(__file__).parents[3] / "docs/tensor_split.md", "python")[-1:]


def _program() -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(PROGRAM, "docs/tensor_split.md", "exec"), names)
    return names


def _whole(of_page: dict[str, Any]) -> tuple[nn.Module, Any]:
    """The same model of layers that are not split, which starts from the same seed, and its loss."""
    width, hidden, vocabulary = (of_page[name] for name in ("WIDTH", "HIDDEN", "VOCABULARY"))

    class FeedForward(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.block = nn.LayerNorm(width), FeedForward()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.block(self.norm(x))  # type: ignore[no-any-return]

    whole = nn.Module()
    whole.embedding = nn.Embedding(vocabulary, width)
    whole.blocks = nn.Sequential(FeedForward(), Normed())
    whole.head = nn.Linear(width, vocabulary, bias=False)

    def loss(tokens: Tensor) -> Tensor:
        logits = whole.head(whole.blocks(whole.embedding(tokens[:, :-1])))
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return whole, loss


def _compared() -> None:
    with tensor_group() as (group, _):
        of_page = _program()
        torch.manual_seed(0)
        split = of_page["Language"](group)
        torch.manual_seed(0)
        whole, loss_of = _whole(of_page)
        tokens = torch.randint(of_page["VOCABULARY"], (3, 9))
        losses = split(tokens), loss_of(tokens)
        for loss in losses:
            loss.backward()
        assert_equal(*losses)
        assert_parts(split, whole, group)


def test_it_computes_what_unsplit_layers_compute(world2: World) -> None:
    world2.run(_compared)


def _run() -> list[float]:
    with mock.patch.dict(os.environ, RANK=str(rank())):
        return _program()["main"]()  # type: ignore[no-any-return]


def test_it_runs(world2: World) -> None:
    first, second = world2.run(_run)
    assert first == second
    assert first[-1] < 0.5 * first[0]
