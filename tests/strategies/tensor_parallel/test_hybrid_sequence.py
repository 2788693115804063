"""Stages of a pipeline whose tensor groups split activations along the sequence train as one device."""

from __future__ import annotations

import functools
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_multigpu.engine.placeholder import Placeholder
from lightning_multigpu.engine.tensor_split.parts import local
from lightning_multigpu.planning.split_plan import SplitPlan
from tests.strategies.tasks import Case, assert_same_weights, make_trainer, state
from tests.strategies.tensor_parallel.language import VOCABULARY, Attention, Block, Gated, Language
from tests.strategies.tensor_parallel.test_hybrid import Dealt, hybrid, sizes
from tests.world import World


def sequences(*, nested: bool) -> nn.Module:
    """Four blocks; where they are nested, two and two of them are lists of their own."""
    blocks = (Block(Attention(), Gated(fused=True)) for _ in range(4))
    lists = (nn.Sequential(next(blocks), next(blocks)) for _ in range(2))
    return Language(*(lists if nested else blocks))


class Uneven(Dealt):
    """Trains on sequences that two ranks cannot halve."""

    length = 5

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validated", self.loss(batch), sync_dist=True)

    def val_dataloader(self) -> Any:
        tokens = torch.randint(VOCABULARY, (4, 3), generator=torch.Generator().manual_seed(2))
        return DataLoader(TensorDataset(tokens), batch_size=2)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def train(ranks: int, *, nested: bool = False, **options: Any) -> dict[str, Any]:
    task, plans, lengths = Uneven(partial(sequences, nested=nested)), list[SplitPlan](), list[int]()
    third: Any = task.model.blocks[-2]  # type: ignore[index]

    def note(layer: nn.Module, args: Any) -> None:
        if layer.training and task.global_step and not isinstance(args[0], Placeholder):  # of another stage's layer
            lengths.append(local(args[0]).shape[1])

    third.register_forward_pre_hook(note)
    strategy = hybrid(**options) if ranks > 1 else "auto"
    trainer = make_trainer(
        Case(max_epochs=1), strategy, ranks, gradient_clip_val=0.5, accumulate_grad_batches=2, limit_val_batches=None
    )
    if ranks > 1:
        trainer.callbacks.append(LambdaCallback(on_train_end=lambda *_: plans.append(strategy.split_plan())))  # type: ignore[attr-defined]
    trainer.fit(task)
    return {
        "weights": state(task),
        "validated": float(trainer.callback_metrics["validated"]),
        "lengths": set(lengths),
        "notes": plans[0].notes if plans else [],
        "sent": {each.operation for block in plans[0].blocks for each in block.traffic} if plans else set(),
    }


LAYOUTS: dict[str, dict[str, Any]] = {
    "data": sizes(2, 1, 2),
    "zero bubble": {"pipeline": {"schedule": "zero_bubble"}},
    "by time, computed again": {"pipeline": {"balance": "time", "activation_checkpointing": True}},
}


@functools.cache
def on_one_device() -> dict[str, Any]:
    return train(1)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_trains_as_one_device(world4: World, layout: str) -> None:
    """Ranks of a stage send their tokens to the ranks of the next stage that have the same ones."""
    reference = on_one_device()
    results = world4.run(train, 4, tensor={"sequence_split": True}, **LAYOUTS[layout])
    assert set.union(*(result["lengths"] for result in results)) == {2, 3}
    for number, result in enumerate(results):
        assert result["lengths"] <= {(3, 2)[number % 2]}
        assert "activations between the blocks of model.blocks are split along dimension 1" in result["notes"]
        assert {"all_gather", "reduce_scatter"} <= result["sent"]
        assert_same_weights(result, reference, atol=1e-8)  # the bias of keys has no gradient but rounding
        assert result["validated"] == pytest.approx(reference["validated"], rel=1e-9)


def test_lists_beside_the_layers_of_the_pipeline(world4: World) -> None:
    """The outer list would split activations before the first stage, and gather them behind the last one."""
    reference = train(1, nested=True)
    options = {"tensor": {"sequence_split": True}, "pipeline": {"module": "model.blocks.0"}}
    for result in world4.run(train, 4, nested=True, **options):
        outer, *inner = result["notes"]
        assert "model.blocks stay whole (the layers of the pipeline, model.blocks.0, are inside of one of its" in outer
        assert [note.split()[5] for note in inner] == ["model.blocks.0", "model.blocks.1"]
        assert_same_weights(result, reference, atol=1e-8)  # the bias of keys has no gradient but rounding
