"""Modules and loaders that are refused with the name, the limit and the fix, under every name alike."""

import warnings
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler, SubsetRandomSampler

from tests.engine.test_batch_distribution import DrawnWhenMade
from tests.strategies.tasks import Case, Classifier, dataset, eval_loader, fit_module, make_strategy, make_trainer
from tests.world import World, rank


class Lazy(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0] = nn.LazyLinear(16)


class Sparse(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("graph", torch.eye(6, dtype=torch.float64).to_sparse())


# torch's errors came after the start of the ranks, or in the middle of the setup, and named no layer.
LAZY = r"layers\.0 \(LazyLinear\) is lazy, .* run one batch through it in __init__ or configure_model"


def test_a_layer_that_does_not_travel(world2: World) -> None:
    world2.run_raising(ValueError, LAZY, lambda: fit_module(Lazy(), "ring_ddp", 2))


def test_replicas_of_dp_may_have_sparse_buffers_and_no_lazy_layers() -> None:
    fit_module(Sparse(), "dp", 2)
    with pytest.raises(ValueError, match=LAZY):
        fit_module(Lazy(), "dp", 2)


class Own(BatchSampler):
    """Made as torch's is."""


DATA = dataset(16)
IN_ORDER = SequentialSampler(DATA)


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        (
            BatchSampler(SubsetRandomSampler(range(8)), 4, False),
            r"batch_sampler=BatchSampler.*pass batch_size=4, drop_last=False and the sampler to",
        ),
        (
            Own(SubsetRandomSampler(range(8)), 4, False),
            r"all samples in the place of the SubsetRandomSampler of Own: .*=False",
        ),
    ],
    ids=["torch's own", "sampler of some samples"],
)
def test_a_batch_sampler_that_lightning_does_not_keep(batches: BatchSampler, words: str, world2: World) -> None:
    """Batches of one sample, and an epoch of all samples instead of eight."""
    data = DataLoader(DATA, batch_sampler=batches)
    world2.run_raising(ValueError, words, fit_module, Classifier(), "ring_ddp", 2, Case(), data)


class OwnIterator(Classifier):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        return super().training_step(*next(dataloader_iter)[:2])


@pytest.mark.parametrize("options", [{"name": "tensor_split"}, {"name": "ring_ddp", "verify_steps": 1}])
def test_a_step_that_takes_batches_by_itself(options: dict[str, Any]) -> None:
    """Trials took batches that then were never trained: 71 steps for 80."""
    trainer = make_trainer(Case(), make_strategy(**options), 2)
    with pytest.raises(ValueError, match=r"takes dataloader_iter, .* on trial, which needs the batch: take batch"):
        trainer.fit(OwnIterator(), eval_loader(8))


def validate_drawn() -> list[str]:
    data = dataset(17)
    loader: DataLoader[Any] = DataLoader(data, batch_sampler=DrawnWhenMade(SequentialSampler(data), 4, False))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        make_trainer(Case(), make_strategy("ring_ddp"), 2).validate(Classifier(), loader, verbose=False)
    return [str(each.message) for each in told if "samples twice" in str(each.message)]


def test_batches_that_were_drawn_before_ranks_share_them(world2: World) -> None:
    """Lightning's padding stayed in, and its warning was suppressed."""
    first, second = world2.run(validate_drawn)
    [line] = first
    assert line.startswith("DrawnWhenMade draws from its sampler when it is made, or keeps it out of its attributes: ")
    assert "up to 1 of 17 samples twice" in line
    assert not second, "rank 0 says it"


def fit_accumulating(by_epoch: bool) -> None:
    batches = 1 + rank()
    options = {"callbacks": [GradientAccumulationScheduler({1: batches})]} if by_epoch else {}
    fit_module(Classifier(), "ring_ddp", 2, Case(), accumulate_grad_batches=1 if by_epoch else batches, **options)


@pytest.mark.parametrize(
    ("by_epoch", "words"),
    [
        (False, "accumulate_grad_batches: 1 on rank 0; 2 on rank 1"),
        (True, r"GradientAccumulationScheduler: \{0: 1, 1: 1\} on rank 0; \{0: 1, 1: 2\} on rank 1"),
    ],
)
def test_ranks_that_accumulate_differently(by_epoch: bool, words: str, world2: World) -> None:
    world2.run_raising(RuntimeError, f"are not set up alike: {words}", fit_accumulating, by_epoch)
