"""The global batch: it is told at the start of every fit, and GlobalBatchSize keeps it under any strategy."""

import subprocess
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch.utils.data import BatchSampler, DataLoader, Sampler, SequentialSampler

from lightning_multigpu.callbacks import GlobalBatchSize
from lightning_multigpu.engine.data_parallel.agreement import full_batch_size
from lightning_multigpu.engine.data_parallel.batch_distribution import distribute_batches
from lightning_multigpu.job.batch_feed import global_batch_text
from tests.modules import Stream
from tests.strategies.tasks import (
    Case,
    Classifier,
    assert_same_weights,
    dataset,
    fit_module,
    make_trainer,
    train_loader,
    trained_weights,
)
from tests.world import World, rank

SAMPLES = 16


class Data(L.LightningDataModule):
    """As a user writes it; one device gets the order of the sampler that Lightning injects on several."""

    def __init__(self, batch_size: int = 5) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> Any:
        assert self.trainer is not None
        case = Case(global_batch_size=self.hparams["batch_size"] * (1 if self.trainer.world_size == 1 else 2))
        return train_loader(case, 1 if self.trainer.world_size == 1 else 2)


class OwnBatches(Sampler[list[int]]):
    """Decides by itself which batches there are."""

    def __init__(self, size: int, num_batches: int = 2) -> None:
        self.size, self.num_batches = size, num_batches

    def __len__(self) -> int:
        return self.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        return (list(range(number * self.size, (number + 1) * self.size)) for number in range(self.num_batches))


def train(strategy: str | None, ranks: int) -> dict[str, Any]:
    """The same configuration: only strategy and devices change."""
    case = Case(trainer={"accumulate_grad_batches": 2, "callbacks": [GlobalBatchSize(SAMPLES)]})
    return trained_weights(Classifier, strategy, ranks, case, data=Data)


def train_all(strategies: list[str]) -> list[dict[str, Any]]:
    found = [train(name, 2) for name in strategies]
    # Loaders of different sizes, and one whose sizes nobody knows.
    case, sizes = Case(max_epochs=1), DataLoader(dataset(24), batch_size=4 if rank() else 6)
    told = pytest.warns(UserWarning, match=r"loaders have different batch sizes: \[6, 4\]")
    with nullcontext() if rank() else told:
        fit_module(Classifier(), "ring_ddp", 2, case, sizes)
    unknown = DataLoader(dataset(24), batch_sampler=OwnBatches(4))
    fit_module(Classifier(), "ring_ddp", 2, case, unknown, use_distributed_sampler=False)
    return found


def test_a_switch_of_the_strategy_keeps_the_global_batch_and_the_weights(world2: World) -> None:
    """Moved from ring_ddp to a pipeline, a job trained with half of the global batch, and nothing said so."""
    strategies = ["ring_ddp", "gpipe"]
    reference = train(None, 1)
    for found in world2.run(train_all, strategies):
        for result in found:
            assert_same_weights(result, reference)
    lines = [line.partition("Global batch: ")[2] for line in world2.output(0).splitlines() if "Global batch" in line]
    assert lines == [
        "16 samples a step (data ranks: 2 x 4; accumulate_grad_batches: 2)",
        "16 samples a step (data ranks: 1 x 8; accumulate_grad_batches: 2)",
        "10 samples a step (data ranks: 6 + 4)",
        "the loaders do not say how many samples a batch has",
    ]
    assert "Global batch" not in world2.output(1)


def test_the_line_counts_the_accumulation_of_the_epoch() -> None:
    callbacks = [GradientAccumulationScheduler({0: 3, 4: 8})]
    trainer: Any = SimpleNamespace(callbacks=callbacks, accumulate_grad_batches=1, current_epoch=1)
    expected = "Global batch: 192 samples a step (data ranks: 2 x 32; accumulate_grad_batches: 3)"
    assert global_batch_text([32, 32], trainer) == expected


def test_the_size_of_batches_is_known_or_not_and_never_guessed() -> None:
    data = dataset(8)
    ordinary = DataLoader(data, batch_size=4)
    known = {
        "ordinary": ordinary,
        "dealt": distribute_batches(train_loader(Case(global_batch_size=4), 1), num_replicas=1, rank=0, even=False)[0],
        "counted": distribute_batches(ordinary, num_replicas=2, rank=0, even=False)[0],
        "torch's batch sampler": DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 4, False)),
        "stream": DataLoader(Stream(range(8)), batch_size=4),
    }
    assert {name: full_batch_size(loader) for name, loader in known.items()} == dict.fromkeys(known, 4)
    own = DataLoader(data, batch_sampler=OwnBatches(4))
    unknown = [DataLoader(data, batch_size=None), own, distribute_batches(own, num_replicas=2, rank=0, even=False)[0]]
    assert [full_batch_size(loader) for loader in [*unknown, [torch.ones(4, 2)], {"a": ordinary}]] == [None] * 5


@pytest.mark.parametrize(
    ("size", "strategy", "options", "message"),
    [
        (17, "ring_ddp", {}, r"GlobalBatchSize\(17\): 17 samples cannot be shared by 2 data ranks x "
         "accumulate_grad_batches=1; pass a multiple of 2, such as 16 or 18"),
        (2, "ring_ddp", {"accumulate_grad_batches": 2}, "pass a multiple of 4, such as 4, or change devices"),
        (17, "gpipe", {"accumulate_grad_batches": 3}, "1 data rank x accumulate_grad_batches=3"),
        (16, "gpipe", {"callbacks": [GradientAccumulationScheduler({0: 2})]}, "leave one out"),
    ],
)  # fmt: skip
def test_what_cannot_be_shared_is_refused_before_any_rank_starts(
    size: int, strategy: str, options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", start)
    callbacks = [GlobalBatchSize(size), *options.pop("callbacks", [])]
    trainer = make_trainer(Case(), strategy, 2, callbacks=callbacks, **options)
    with pytest.raises(ValueError, match=message):
        trainer.fit(Classifier(), datamodule=Data())


@pytest.mark.parametrize("size", [0, True, 2.5])
def test_no_number_of_samples(size: Any) -> None:
    with pytest.raises(ValueError, match="pass a whole number of at least 1"):
        GlobalBatchSize(size)


@pytest.mark.parametrize("kind", ["known", "drawn"])
def test_a_loader_that_gives_another_number_is_refused_before_its_first_batch_is_trained_on(kind: str) -> None:
    options: dict[str, Any] = {"batch_size": 4} if kind == "known" else {"batch_sampler": OwnBatches(4)}
    module = Classifier()
    with pytest.raises(ValueError, match=r"has 4 samples a batch, and 8 are due, for 1 data rank.*self.batch_size"):
        fit_module(module, None, 1, Case(), DataLoader(dataset(8), **options), callbacks=[GlobalBatchSize(8)])
    assert not module.seen


def test_own_batches_of_the_right_size_train_and_the_last_may_be_smaller() -> None:
    for given in (OwnBatches(8), OwnBatches(5, 1)):
        module, loader = Classifier(), DataLoader(dataset(16), batch_sampler=given)
        fit_module(module, None, 1, Case(max_epochs=1), loader, callbacks=[GlobalBatchSize(8)])
        assert len(module.seen) == given.num_batches
