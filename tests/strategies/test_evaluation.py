"""validate, test and predict over ranks: every sample once, values those of one device, decisions equal everywhere."""

import functools
from typing import Any

import pytest
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, StochasticWeightAveraging

from lightning_multigpu.registry import StrategyRow
from tests.strategies.tasks import (
    Case,
    Classifier,
    assert_same_weights,
    assert_trains_alike,
    data_ranks,
    eval_loader,
    fit_module,
    make_strategy,
    make_trainer,
    rows_of_each_class,
    rows_with_a_whole_model,
    trained_weights,
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


def evaluate_all(strategy_name: str, ranks: int, numbers: list[int]) -> list[dict[str, Any]]:
    return [evaluate(strategy_name, ranks, num_samples) for num_samples in numbers]


# Batches of 8, the last one whole, of 5, of 1, or the only one. How they are dealt out is the same for all strategies
# with batches of a rank's own (engine/test_batch_distribution.py); the others have no batch that one rank lacks.
NUM_SAMPLES = {**{row.name: [21, 17, 2] for row in rows_with_a_whole_model()}, "ring_ddp": [24, 21, 17, 2]}


@rows
def test_every_sample_once_and_values_of_one_device(row: StrategyRow, world2: World) -> None:
    numbers = NUM_SAMPLES.get(row.name, [21, 2])
    found = world2.run(evaluate_all, row.name, 2, numbers)
    for num_samples, ranks in zip(numbers, zip(*found, strict=True), strict=True):
        reference = evaluate_on_one_device(num_samples)
        assert reference["metrics"]["val_samples"] == num_samples
        for result in ranks:
            assert result["metrics"] == pytest.approx(reference["metrics"], rel=1e-6)
        for name in ("predicted", "tested"):
            by_data_rank = {result["data rank"]: result[name] for result in ranks}
            assert all(result[name] == by_data_rank[result["data rank"]] for result in ranks), "as all stages"
            assert sorted(x for seen in by_data_rank.values() for x in seen) == sorted(reference[name])


class _Diverging(Classifier):
    """Each rank has values of its own for a metric that is not reduced; decisions must be taken together anyway."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("own", float(self.trainer.global_rank) - self.trainer.current_epoch * 0.1)
        # Rank 0's first value is its best; the other rank gets better with every epoch.
        self.log("split", float(self.trainer.current_epoch) * (1 if self.trainer.global_rank == 0 else -1))


def decisions(strategy_name: str, directory: str) -> tuple[Any, ...]:
    stop = EarlyStopping("split", patience=1, mode="min")
    best = ModelCheckpoint(directory, filename="{epoch}", monitor="val_loss", save_top_k=2, save_last=True)
    case = Case(max_epochs=4, trainer={"enable_checkpointing": True})
    trainer = fit_module(_Diverging(), strategy_name, 2, case, None, eval_loader(), callbacks=[stop, best])
    score = float(best.best_model_score)  # type: ignore[arg-type]
    return trainer.current_epoch, best.best_model_path, score, stop.stopped_epoch, sorted(best.best_k_models)


@pytest.mark.filterwarnings("ignore:It is recommended to use `self.log")  # the test is about that
@pytest.mark.parametrize(  # strategies whose ranks hold whole models decide alike
    "row",
    [row for row in rows_of_each_class() if row.name == "ring_ddp" or row not in rows_with_a_whole_model()],
    ids=lambda row: row.name,
)
def test_ranks_decide_together(row: StrategyRow, world2: World, tmp_path: Any) -> None:
    first, second = world2.run(decisions, row.name, str(tmp_path))
    assert first == second
    assert first[0] == 2, "rank 0 wants to stop after two epochs, and one rank is enough"
    assert first[1]


def test_stochastic_weight_averaging(world2: World) -> None:
    averaging = StochasticWeightAveraging(0.05, swa_epoch_start=1)
    names = [row.name for row in rows_with_a_whole_model()]
    assert_trains_alike(world2, Classifier, names, callbacks=[averaging])
    alone, by_dp = (trained_weights(Classifier, *run, callbacks=[averaging]) for run in ((None, 1), ("dp", 2)))
    assert_same_weights(by_dp, alone)


# Options, and the batches and steps within them.
LIMITS: list[tuple[dict[str, Any], int]] = [
    ({"limit_train_batches": 3, "limit_val_batches": 1, "max_epochs": 2, "reload_dataloaders_every_n_epochs": 1}, 6),
    ({"max_time": "00:00:00:00"}, 0),
]


def limited(strategy_name: str) -> None:
    for options, expected in LIMITS:
        module = Classifier()
        trainer = fit_module(module, strategy_name, 2, Case(), None, eval_loader(), **options)
        assert (len(module.learning_rates), trainer.global_step) == (expected, expected), options


@rows
def test_the_trainers_limits(row: StrategyRow, world2: World) -> None:
    world2.run(limited, row.name)
