"""Ranks that run out of data at different times neither hang nor die, and gradients stay those of all samples."""

import warnings
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Subset

from tests.modules import Stream
from tests.strategies.tasks import Case, Classifier, assert_same_weights, dataset, fit_module, state
from tests.world import World, rank

OWN_SAMPLES = {"use_distributed_sampler": False}


def loader(indices: list[int], kind: str) -> Any:
    if kind == "sized":
        return DataLoader(Subset(dataset(64), indices), batch_size=4)
    return DataLoader(Stream(indices), batch_size=4)


def train(
    per_rank: list[list[int]], kind: str, options: dict[str, Any], epochs: int = 1, make_module: Any = Classifier
) -> dict[str, Any]:
    module = make_module()
    case = Case(max_epochs=epochs, strategy=options, trainer=OWN_SAMPLES)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = fit_module(module, "ring_ddp", 2, case, loader(per_rank[rank()], kind))
    return {
        "weights": state(module),
        "batches": [n for _, n in module.seen],
        "steps": trainer.global_step,
        "warnings": [str(w.message) for w in caught if "all ranks stop" in str(w.message) or "go on" in str(w.message)],
    }


def by_hand(steps: list[list[tuple[list[int], float]]]) -> dict[str, torch.Tensor]:
    """One device that adds up the weighted losses of the given batches in each step."""
    module = Classifier().double()
    optimizer = module.configure_optimizers()
    x, y = dataset(64).tensors
    for batches in steps:
        total = sum(weight for _, weight in batches)
        loss = sum(
            weight / total * torch.nn.functional.cross_entropy(module(x[indices].double()), y[indices])
            for indices, weight in batches
        )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[union-attr]
        optimizer.step()
    return state(module)


def assert_weights(results: list[dict[str, Any]], steps: list[list[tuple[list[int], float]]]) -> None:
    for result in results:
        assert_same_weights(result, {"weights": by_hand(steps)})


FIRST, SECOND = list(range(8)), list(range(20, 34))  # 2 full batches, and 3 full ones and one of 2 samples
EPOCH: list[list[tuple[list[int], float]]] = [[(FIRST[:4], 4), (SECOND[:4], 4)], [(FIRST[4:], 4), (SECOND[4:8], 4)]]


@pytest.mark.parametrize("kind", ["sized", "stream"])
def test_stop_ends_the_epoch_for_all(kind: str, world2: World) -> None:
    results = world2.run(train, [FIRST, SECOND], kind, {}, 2)
    assert [r["steps"] for r in results] == [4, 4]
    assert_weights(results, EPOCH * 2)
    if kind == "stream":
        of_rank_0, of_rank_1 = (result["warnings"] for result in results)
        assert len(of_rank_0) == 2, "once an epoch"
        assert "rank 0 has no more training batches" in of_rank_0[0]
        assert "uneven_inputs='join'" in of_rank_0[0]
        assert of_rank_1 == []


@pytest.mark.parametrize("kind", ["sized", "stream"])
def test_join_goes_on_with_those_that_have_data(kind: str, world2: World) -> None:
    results = world2.run(train, [FIRST, SECOND], kind, {"uneven_inputs": "join"})
    assert [r["steps"] for r in results] == [4, 4]
    assert_weights(results, [*EPOCH, [(SECOND[8:12], 4)], [(SECOND[12:], 2)]])


class SumLoss(Classifier):
    """The loss of 7 samples in all."""

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(self(batch[0]), batch[1], reduction="sum") / 7


def ones(batch: Any) -> float:
    return float((batch[1] == 1).sum()) + 1.0


def weighed(indices: list[int]) -> tuple[list[int], float]:
    return indices, ones([None, dataset(64).tensors[1][indices]])


@pytest.mark.parametrize(
    ("samples", "options", "module", "steps"),
    [
        ([FIRST[:6], SECOND[:8]], {}, Classifier, [EPOCH[0], [(FIRST[4:6], 2), (SECOND[4:8], 4)]]),
        ([FIRST[:4], SECOND[:4]], {"loss_reduction": ones}, Classifier, [[weighed(FIRST[:4]), weighed(SECOND[:4])]]),
        ([FIRST[:3], SECOND[:4]], {"loss_reduction": "sum"}, SumLoss, [[(FIRST[:3], 3), (SECOND[:4], 4)]]),
    ],
    ids=["by their samples", "by a function of the batch", "losses that are sums"],
)
def test_what_batches_count(world2: World, samples: Any, options: Any, module: Any, steps: Any) -> None:
    assert_weights(world2.run(train, samples, "sized", options, make_module=module), steps)


def test_a_rank_without_any_data(world2: World) -> None:
    assert [r["steps"] for r in world2.run(train, [[], SECOND], "stream", {})] == [0, 0]
    with pytest.raises(ValueError, match=r"rank 0 has no batch at all.*uneven_inputs='stop'"):
        world2.run(train, [[], SECOND], "stream", {"uneven_inputs": "join"})
