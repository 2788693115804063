"""validate, test and predict over ranks: every sample once, values those of one device, decisions equal everywhere."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging

from lightning_multigpu.registry import StrategyRow
from tests.strategies.tasks import (
    Case,
    Classifier,
    assert_trains_alike,
    data_ranks,
    eval_loader,
    fit_module,
    make_strategy,
    make_trainer,
    rows_of_each_class,
    rows_with_a_whole_model,
)
from tests.world import World

rows = pytest.mark.parametrize("row", rows_of_each_class(), ids=lambda row: row.name)


def evaluate(strategy_name: str | None, ranks: int, num_samples: int) -> dict[str, Any]:
    strategy = "auto" if strategy_name is None else make_strategy(strategy_name)
    module = Classifier()
    trainer = make_trainer(Case(), strategy, ranks)
    loader = eval_loader(num_samples, batch_size=8 // data_ranks(trainer))
    (validated,) = trainer.validate(module, loader, verbose=False)
    (tested,) = trainer.test(module, loader, verbose=False)
    predicted = trainer.predict(module, loader)
    assert predicted is not None
    return {
        "metrics": {**validated, **tested},
        "data rank": getattr(trainer.strategy, "data_parallel_rank", 0),
        "tested": [x for batch in module.seen_targets for x in batch],
        "predicted": [float(x) for batch in predicted for x in batch],
    }


evaluate_on_one_device = functools.cache(functools.partial(evaluate, None, 1))

# Batches of 8, the last one whole, of 5, of 1, or the only one. How they are dealt out is the same for all strategies
# with batches of a rank's own (engine/test_batch_distribution.py); the others have no batch that one rank lacks.
NUM_SAMPLES = {"ring_ddp": [24, 21, 17, 2], **{r.name: [21, 17, 2] for r in rows_with_a_whole_model()[1:]}}
EVALUATED = [(row, num) for row in rows_of_each_class() for num in NUM_SAMPLES.get(row.name, [21, 2])]


@pytest.mark.parametrize(("row", "num_samples"), EVALUATED, ids=lambda value: getattr(value, "name", value))
def test_every_sample_once_and_values_of_one_device(row: StrategyRow, num_samples: int, world2: World) -> None:
    reference = evaluate_on_one_device(num_samples)
    ranks = world2.run(evaluate, row.name, 2, num_samples)
    for result in ranks:
        assert result["metrics"] == pytest.approx(reference["metrics"], rel=1e-6)
    predicted = {result["data rank"]: result["predicted"] for result in ranks}
    assert all(result["predicted"] == predicted[result["data rank"]] for result in ranks)
    assert sorted(x for of_one in predicted.values() for x in of_one) == sorted(reference["predicted"])
    by_data_rank = {result["data rank"]: result["tested"] for result in ranks}
    assert all(result["tested"] == by_data_rank[result["data rank"]] for result in ranks), (
        "all stages have what one saw"
    )
    assert sorted(x for tested in by_data_rank.values() for x in tested) == sorted(reference["tested"])
    assert reference["metrics"]["val_samples"] == num_samples


class _Diverging(Classifier):
    """Each rank has values of its own for a metric that is not reduced; decisions must be taken together anyway."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("own", float(self.trainer.global_rank) - self.trainer.current_epoch * 0.1)
        # Rank 0's first value is its best; the other rank gets better with every epoch.
        self.log("split", float(self.trainer.current_epoch) * (1 if self.trainer.global_rank == 0 else -1))


def decisions(strategy_name: str, directory: str) -> dict[str, Any]:
    stop = EarlyStopping("split", patience=1, mode="min")
    best = ModelCheckpoint(directory, filename="{epoch}", monitor="val_loss", save_top_k=2, save_last=True)
    case = Case(max_epochs=4, trainer={"enable_checkpointing": True})
    trainer = fit_module(_Diverging(), strategy_name, 2, case, None, eval_loader(), callbacks=[stop, best])
    return {
        "stopped_epoch": stop.stopped_epoch,
        "epochs": trainer.current_epoch,
        "best_path": best.best_model_path,
        "best_score": float(best.best_model_score) if best.best_model_score is not None else None,
        "kept": sorted(best.best_k_models),
    }


@pytest.mark.filterwarnings("ignore:It is recommended to use `self.log")  # the test is about that
@rows
def test_ranks_decide_together(row: StrategyRow, world2: World, tmp_path: Any) -> None:
    first, second = world2.run(decisions, row.name, str(tmp_path))
    assert first == second
    assert first["epochs"] == 2, "rank 0 wants to stop after two epochs, and one rank is enough"
    assert first["best_path"]


@pytest.mark.parametrize(
    "row",
    [row for row in rows_of_each_class() if row in rows_with_a_whole_model() or row.name == "dp"],
    ids=lambda row: row.name,
)
def test_stochastic_weight_averaging(row: StrategyRow, world2: World) -> None:
    assert_trains_alike(world2, Classifier, row.name, callbacks=[StochasticWeightAveraging(0.05, swa_epoch_start=1)])


def limited(strategy_name: str, options: dict[str, Any]) -> tuple[int, int]:
    module = Classifier()
    trainer = fit_module(module, strategy_name, 2, Case(), None, eval_loader(), **options)
    return len(module.learning_rates), trainer.global_step


LIMITS: dict[str, tuple[dict[str, Any], int]] = {
    "limits of reloaded loaders": (
        {"limit_train_batches": 3, "limit_val_batches": 1, "max_epochs": 2, "reload_dataloaders_every_n_epochs": 1},
        6,
    ),
    "max time": ({"max_time": "00:00:00:00"}, 0),
}
# Families differ in how loaders are limited; the loops are Lightning's.
LIMITED = [
    (row, name)
    for row in rows_of_each_class()
    for name in LIMITS
    if name == "limits of reloaded loaders" or row.name in ("ring_ddp", "sync_ps", "gpipe", "tensor_split")
]


@pytest.mark.parametrize(("row", "name"), LIMITED, ids=lambda value: getattr(value, "name", value))
def test_the_trainers_limits(row: StrategyRow, name: str, world2: World) -> None:
    options, batches = LIMITS[name]
    for seen, steps in world2.run(limited, row.name, options):
        assert (seen, steps) == (batches, batches)
