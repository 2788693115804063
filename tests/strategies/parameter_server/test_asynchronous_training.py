"""Asynchronous training through the Trainer: who decides, and that each sample is trained on once."""

from __future__ import annotations

import time
from collections import Counter
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
    Timer,
)
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_multigpu.engine.parameter_server.servers import Servers
from tests.modules import Stream, TwoOptimizers
from tests.strategies.tasks import (
    IS_LIGHTNING_2_5,
    NUM_CLASSES,
    Case,
    Classifier,
    assert_trains_alike,
    dataset,
    eval_loader,
    fit_module,
    make_trainer,
    moving_average,
    state,
)
from tests.world import World, rank

SAMPLES, BATCH, EPOCHS = 50, 4, 3
NUM_BATCHES = 13  # the last one has two samples
pytestmark = pytest.mark.filterwarnings("ignore:It is recommended to use `self.log")


class Seen(Classifier):
    """It keeps which samples it has trained on, and when it was validated."""

    def __init__(self, optimizer: str = "sgd", *, slow_rank: int | None = None, schedule: bool = False) -> None:
        super().__init__(optimizer)
        self.samples: list[tuple[int, float]] = []
        self.versions: list[Tensor] = []
        self.updates: list[int] = []
        self.slow_rank, self.schedule = slow_rank, schedule

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        time.sleep(0.05 if self.global_rank == self.slow_rank else 0.0)
        self.samples += [(self.current_epoch, value) for value in batch[0][:, 0].tolist()]
        assert not dist.is_initialized(), "Lightning would have ranks meet in every batch"
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_end(self) -> None:
        self.versions.append(self.first.weight.detach().clone())
        training = getattr(self.trainer.strategy, "_asynchronous", None)
        self.updates.append(0 if training is None else training.version)

    def configure_optimizers(self) -> Any:
        optimizer: Any = super().configure_optimizers()
        if not self.schedule:
            return optimizer
        total = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Buffered(Seen):
    """Its buffers count a rank's own batches, and a hook of rank 0 changes a layer that no optimizer has."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(NUM_CLASSES)
        self.beside = nn.Linear(2, 2).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.norm(batch[0][:, :NUM_CLASSES])
        return super().training_step(batch, batch_idx)

    def on_train_end(self) -> None:
        if self.global_rank == 0:
            self.beside.weight.detach().fill_(3.0)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.layers.parameters(), lr=0.2, momentum=0.9)


def loader(**options: Any) -> DataLoader[Any]:
    return DataLoader(dataset(SAMPLES), batch_size=BATCH, shuffle=True, **options)


def fit(
    module: Classifier | None = None,
    loading: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    ckpt_path: str | None = None,
    **overrides: Any,
) -> dict[str, Any]:
    module, case = module or Seen(), Case(max_epochs=EPOCHS, strategy=options or {})
    data = loader(**(loading or {})), eval_loader()
    trainer = fit_module(module, "async_ps", 2, case, *data, ckpt_path=ckpt_path, **overrides)
    return {
        "rank": trainer.global_rank,
        "samples": getattr(module, "samples", []),
        "weights": state(module),
        "validated": getattr(module, "versions", []),
        "updates": getattr(module, "updates", []),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "steps": trainer.global_step,
        "epochs": trainer.current_epoch,
        "rate": trainer.optimizers[0].param_groups[0]["lr"] if trainer.optimizers else None,
        "best": getattr(trainer.checkpoint_callback, "best_model_path", None),
        "callbacks": [type(callback).__name__ for callback in trainer.callbacks],  # type: ignore[attr-defined]
        "limit": trainer.limit_val_batches,
        "planned": trainer.estimated_stepping_batches,
    }


def trained_on(results: list[dict[str, Any]]) -> dict[int, Counter[float]]:
    found: dict[int, Counter[float]] = {}
    for epoch, sample in (entry for result in results for entry in result["samples"]):
        found.setdefault(epoch, Counter())[sample] += 1
    return found


EVERY = Counter(dataset(SAMPLES).tensors[0][:, 0].tolist())


class EndsEarly(Seen):
    """Rank 1 ends each epoch when it gets its second batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.global_rank == 1 and batch_idx == 1 else None


def slow(rank_: int, *arguments: Any) -> dict[str, Any]:
    return fit(Seen(slow_rank=rank_), *arguments)


@pytest.mark.parametrize(
    ("slow_rank", "loading", "options"),
    [(1, {}, {}), (0, {"num_workers": 1}, {"max_staleness": 1})],
    ids=["1-no workers", "0-a loader's worker, a bound of staleness"],
)
def test_each_sample_is_trained_on_once_an_epoch(
    world2: World, slow_rank: int, loading: dict[str, Any], options: dict[str, Any]
) -> None:
    results = world2.run(slow, slow_rank, loading, options)
    assert trained_on(results) == dict.fromkeys(range(EPOCHS), EVERY)
    assert sum(result["steps"] for result in results) == EPOCHS * NUM_BATCHES
    first, second = results
    assert first["weights"]["layers.0.weight"].equal(second["weights"]["layers.0.weight"]), "both end with all updates"
    assert all(n >= NUM_BATCHES * (epoch + 1) for epoch, n in enumerate(first["updates"])), "rank 0 has waited"
    if not loading:
        fast, slower = results[1 - slow_rank], results[slow_rank]
        assert len(fast["samples"]) > len(slower["samples"])


def test_batches_that_a_rank_leaves_behind_are_trained_on(world2: World) -> None:
    """Rank 0 had ended the epoch before the slow rank 1 gave its second batch back."""
    results = world2.run(leaves_early)
    assert trained_on(results) == dict.fromkeys(range(2), EVERY)


def leaves_early() -> dict[str, Any]:
    return fit(EndsEarly(slow_rank=1), max_epochs=2)


class Accumulates(Seen):
    """It tells for how many batches the gradients are in no update yet when the server is told of a batch."""

    def __init__(self, *, automatic: bool) -> None:
        super().__init__()
        self.automatic_optimization = automatic
        self.accumulated, self.when_told = 0, Counter[int]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.accumulated += 1
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            self.manual_backward(loss)
            if self.accumulated == 2 or self.trainer.is_last_batch:
                optimizer: Any = self.optimizers()
                optimizer.step()
                optimizer.zero_grad()
                self.accumulated = 0
        return loss

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.accumulated = 0


def accumulates(automatic: bool) -> dict[str, Any]:
    module = Accumulates(automatic=automatic)
    trained = Servers.trained

    def told(servers: Servers, epoch: int, number: int) -> None:
        module.when_told[module.accumulated] += 1
        trained(servers, epoch, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Servers, "trained", told)
        found = fit(module, max_epochs=1, accumulate_grad_batches=2 if automatic else 1)
        return {**found, "told": module.when_told}


@pytest.mark.parametrize("automatic", [True, False])
def test_a_batch_counts_as_trained_when_the_servers_have_its_gradients(world2: World, automatic: bool) -> None:
    """A worker that was lost between took the gradients with it, and nobody trained on the batch again."""
    results = world2.run(accumulates, automatic)
    assert sum((result["told"] for result in results), Counter()) == {0: 7 if automatic else NUM_BATCHES}
    assert trained_on(results) == {0: EVERY}


def test_all_ranks_end_with_what_rank_0_has(world2: World) -> None:
    """Rank 0 ended with averaged weights, and the others with those of the servers and buffers of their own."""
    for first, second in zip(*world2.run(averages), strict=True):
        assert first["weights"].keys() == second["weights"].keys()
        for name, value in first["weights"].items():
            torch.testing.assert_close(second["weights"][name], value, rtol=0, atol=0, msg=name)
        assert first["weights"]["beside.weight"].eq(3.0).all()


def averages() -> list[dict[str, Any]]:
    average = moving_average(decay=0.8)
    # EMAWeightAveraging keeps float32, and would round the weights of another precision when it swaps them.
    module, later = Buffered(), Buffered()
    later.norm = nn.Identity()  # type: ignore[assignment]  # SWA makes a further epoch for BatchNorm
    if isinstance(average, StochasticWeightAveraging):
        module.norm = nn.Identity()  # type: ignore[assignment]
    results = [fit(module, None, {"num_servers": 2}, callbacks=[average], max_epochs=2, precision="32-true")]
    return [*results, fit(later, callbacks=[StochasticWeightAveraging(0.05, swa_epoch_start=1)])]


class Dated(EarlyStopping):
    """Its state has a value that does not travel to other ranks: the run failed at its end."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "day": date(2026, 1, 1)}


@pytest.mark.filterwarnings("ignore:other ranks keep the callback as it was")
def test_rank_0_validates_saves_and_decides(world2: World, tmp_path: Path) -> None:
    first, second = world2.run(decides, str(tmp_path))
    assert first["epochs"] == 2, "the second value is no better than the first"
    assert second["epochs"] < 50
    assert len(first["validated"]) == 1 + 2, "the sanity check, and two epochs"
    assert second["validated"] == []
    assert first["best"] == second["best"]
    assert Path(first["best"]).is_file()
    assert {name: value for name, value in first["metrics"].items() if name.startswith("val")} == {
        name: value for name, value in second["metrics"].items() if name.startswith("val")
    }
    assert first["metrics"]["val_samples"] == 21
    assert first["callbacks"] == second["callbacks"]
    assert (first["limit"], second["limit"]) == (1.0, 1.0)
    saved = torch.load(first["best"], weights_only=False)
    validated = first["validated"][1 + saved["epoch"]]  # which epoch is better depends on who came first
    assert saved["state_dict"]["layers.0.weight"].equal(validated), "the weights that were validated"


def decides(directory: str) -> dict[str, Any]:
    stop = Dated("val_loss", patience=1, min_delta=100.0)
    keeps = ModelCheckpoint(directory, monitor="val_loss", save_top_k=1)
    options = {"enable_checkpointing": True, "num_sanity_val_steps": 1, "max_epochs": 50, "min_steps": 20}
    return fit(callbacks=[stop, keeps], **options)


# Options, and the validations of two epochs.
VALIDATIONS: list[tuple[dict[str, Any], int]] = [
    ({"val_check_interval": NUM_BATCHES}, 2),
    ({"reload_dataloaders_every_n_epochs": 1}, 2),
    ({"val_check_interval": 0.5, "use_distributed_sampler": False}, 4),
    *[({"val_check_interval": "00:00:10:00"}, 0)] * (not IS_LIGHTNING_2_5),
]


def validates() -> list[int]:
    return [len(fit(max_epochs=2, **options)["validated"]) for options, _ in VALIDATIONS]


@pytest.mark.filterwarnings("ignore:each worker trains on all batches of its loader")
def test_rank_0_validates_as_often_as_is_asked(world2: World) -> None:
    """A number of batches was one of rank 0's own, of which an epoch may have too few; a time raised AttributeError."""
    assert world2.run(validates) == [[number for _, number in VALIDATIONS], [0] * len(VALIDATIONS)]


def times() -> tuple[int, float]:
    timer = Timer(timedelta(seconds=600 if rank() == 0 else 0))
    result = fit(Seen(slow_rank=0), callbacks=[timer], max_epochs=1)
    return result["steps"], timer.time_elapsed()


def test_the_timer_of_rank_0_decides(world2: World) -> None:
    """Each rank ended at a time of its own."""
    (_, elapsed_s), (steps, other_s) = world2.run(times)
    assert steps > 1
    assert other_s == elapsed_s


def test_max_steps_counts_the_steps_of_manual_optimization(world2: World) -> None:
    """It counted batches: a module that steps every second time ended at half of the steps."""
    steps = world2.run(manually, max_steps=7)
    assert sum(steps) in (7, 8), "the other rank may complete a step at the end"


def manually(**options: Any) -> int:
    return int(fit(Accumulates(automatic=False), max_epochs=-1, **options)["steps"])


def saves(directory: str) -> dict[str, Any]:
    keeps = ModelCheckpoint(directory, save_last=True)
    return fit(Seen("adamw", schedule=True), callbacks=[keeps], enable_checkpointing=True, max_epochs=2)


def goes_on(path: str, epochs: int) -> dict[str, Any]:
    return fit(Seen("adamw", schedule=True), ckpt_path=path, max_epochs=epochs)


def test_a_checkpoint_is_one_of_one_device_and_training_goes_on_from_it(world2: World, tmp_path: Path) -> None:
    first, _ = world2.run(saves, str(tmp_path))
    path = str(tmp_path / "last.ckpt")
    saved = torch.load(path, weights_only=False)
    assert saved["state_dict"]["layers.0.weight"].equal(first["weights"]["layers.0.weight"])
    state_of_optimizer = saved["optimizer_states"][0]["state"]
    assert [int(entry["step"]) for entry in state_of_optimizer.values()] == [2 * NUM_BATCHES] * 4
    module = Seen("adamw")
    fit_module(module, None, 1, Case(max_epochs=3), loader(), ckpt_path=path)
    assert trained_on([{"samples": module.samples}]) == {2: EVERY}
    results = world2.run(goes_on, path, 3)
    assert trained_on(results) == {2: EVERY}
    assert min(result["rate"] for result in results) == pytest.approx(0.0, abs=1e-9), "the schedule counts all updates"


class SavesSixth(Callback):
    """It saves after the sixth batch of a rank."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_idx == 5:
            trainer.save_checkpoint(self.path)


def test_an_epoch_goes_on_where_one_device_has_saved_it(world2: World, tmp_path: Path) -> None:
    """All of the epoch was trained on again."""
    path = str(tmp_path / "one.ckpt")
    fit_module(Classifier("adamw"), None, 1, Case(max_epochs=1), loader(), callbacks=[SavesSixth(path)])
    results = world2.run(fit, Seen("adamw"), None, None, path, max_epochs=1)
    found = trained_on(results)[0]
    assert max(found.values()) == 1
    assert found.total() == SAMPLES - 6 * BATCH


def saves_while_it_accumulates(path: str) -> None:
    fit(Seen("adamw", slow_rank=1), callbacks=[SavesSixth(path)], max_epochs=1, accumulate_grad_batches=4)


def accumulates_again(path: str) -> dict[str, Any]:
    return fit(Seen("adamw"), ckpt_path=path, max_epochs=2, accumulate_grad_batches=4)


def test_a_run_that_was_saved_between_two_steps_makes_as_many_updates_as_planned(world2: World, tmp_path: Path) -> None:
    """The first update after it was made of two batches, and a further one of the two that were left of the four."""
    path = tmp_path / "between.ckpt"
    world2.run(saves_while_it_accumulates, str(path))
    saved = torch.load(path, weights_only=False)
    first = saved["parameter_server"]["first_batch"] // 4
    results = world2.run(accumulates_again, str(path))
    made = sum(result["steps"] for result in results) - 2 * saved["global_step"]
    assert made == 4 - first + 4
    found = trained_on(results)
    assert max(found[0].values()) == 1
    assert found[0].total() == SAMPLES - first * 4 * BATCH, "the batches of an update that was not made come again"
    assert found[1] == EVERY


def saves_at_the_end_of_an_epoch(path: str) -> None:
    class Saves(Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
            if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
                trainer.save_checkpoint(path)

    fit(Seen("adamw", slow_rank=0, schedule=True), callbacks=[Saves()], max_epochs=1)


def test_the_next_epoch_follows_a_checkpoint_of_the_last_batch(world2: World, tmp_path: Path) -> None:
    """Rank 0 had not trained on all batches of the epoch itself: the next one began where rank 0 had come to."""
    path = str(tmp_path / "last.ckpt")
    world2.run(saves_at_the_end_of_an_epoch, path)
    assert trained_on(world2.run(goes_on, path, 2)) == {1: EVERY}


def test_schedules_and_max_steps_count_the_updates_of_all(world2: World) -> None:
    """N ranks trained on N times limit_train_batches, and made more steps where they accumulated gradients.

    With min_steps a run of max_steps never ended, since a rank's own steps are fewer.
    """
    for (options, steps, samples), results in zip(SCHEDULED, zip(*world2.run(scheduled), strict=True), strict=True):
        assert [result["planned"] for result in results] == [steps] * 2
        assert sum(result["steps"] for result in results) == steps
        found = trained_on(results)
        assert max(count for of_epoch in found.values() for count in of_epoch.values()) == 1
        assert sum(of_epoch.total() for of_epoch in found.values()) == samples
        epochs = [result["epochs"] for result in results]
        assert max(epochs) == len(found)
        if "max_steps" not in options:  # another rank may make all of the last epoch's few steps
            assert min(epochs) == len(found)
        rates = [result["rate"] for result in results]
        assert min(rates) == pytest.approx(0.0, abs=1e-9)
        if "max_steps" not in options:
            assert rates[0] == min(rates), "rank 0 saves a scheduler that has stepped for the last updates of others"


# Options, updates that they make, samples.
SCHEDULED: list[tuple[dict[str, Any], int, int]] = [
    ({"limit_train_batches": 5}, 3 * 5, 3 * 20),
    ({"limit_train_batches": 0.6, "accumulate_grad_batches": 2}, 3 * 4, 3 * 28),
    ({"max_steps": 17, "max_epochs": -1, "loading": {"num_workers": 1}}, 17, 50 + 16),
    ({"max_steps": 8, "max_epochs": -1, "accumulate_grad_batches": 2}, 8, 50 + 8),
    ({"max_steps": 17, "max_epochs": -1, "min_steps": 15, "min_epochs": 6}, 17, 50 + 16),
]


def scheduled() -> list[dict[str, Any]]:
    return [fit(Seen(schedule=True), **options) for options, *_ in SCHEDULED]


class OneCycle(Seen):
    """Its schedule raises an error when it is stepped more often than it was made for."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2)
        scheduler = one_cycle(optimizer, int(self.trainer.estimated_stepping_batches))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def one_cycle(optimizer: torch.optim.Optimizer, total: int) -> torch.optim.lr_scheduler.OneCycleLR:
    return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total, cycle_momentum=False)


def end_of_cycle(total: int) -> float:
    """The rate after all steps of the schedule."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.2)
    schedule = one_cycle(optimizer, total)
    for _ in range(total):
        optimizer.step()
        schedule.step()
    return schedule.get_last_lr()[0]


def loses_word() -> dict[str, Any]:
    """Rank 1 tells nobody of one update in the last epoch, as if it were lost after it: others make it again."""
    trained, untold = Servers.trained, []

    def told(servers: Servers, epoch: int, number: int) -> None:
        if rank() == 1 and epoch == 1 and not untold:
            untold.append(number)
        else:
            trained(servers, epoch, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Servers, "trained", told)
        return fit(OneCycle(slow_rank=0), max_epochs=2)


def test_a_schedule_ends_where_it_was_planned_to_also_with_an_update_more(world2: World) -> None:
    """OneCycleLR raised an error at the last step of a run that had lost a rank."""
    results = world2.run(loses_word)
    assert sum(result["steps"] for result in results) == 2 * NUM_BATCHES + 1
    assert results[0]["rate"] == pytest.approx(end_of_cycle(2 * NUM_BATCHES))


def own_batches(kind: str) -> dict[str, Any]:
    module = OneCycle()
    case = Case(max_epochs=2, trainer=OWN_BATCHES[kind][0])
    data = Stream(range(rank(), SAMPLES, 2), SAMPLES) if kind == "stream" else dataset(SAMPLES)
    trainer = fit_module(module, "async_ps", 2, case, DataLoader(data, batch_size=BATCH))
    rate = trainer.optimizers[0].param_groups[0]["lr"]
    return {"steps": trainer.global_step, "rate": rate, "samples": module.samples}


# Options, the steps of each rank, and how often a sample is trained on in an epoch.
OWN_BATCHES: dict[str, tuple[dict[str, Any], int, int]] = {
    "stream": ({"max_steps": 9, "max_epochs": -1}, 9, 1),
    "loader": ({"use_distributed_sampler": False}, 2 * NUM_BATCHES, 2),
}


@pytest.mark.filterwarnings("ignore:each worker trains on all batches of its loader")
@pytest.mark.parametrize("kind", OWN_BATCHES)
def test_schedules_count_a_ranks_own_steps_where_its_batches_are_its_own(world2: World, kind: str) -> None:
    """They counted the updates of all ranks, and ended after a part of the run."""
    results, (_, steps, times) = world2.run(own_batches, kind), OWN_BATCHES[kind]
    assert [(found["steps"], found["rate"]) for found in results] == [(steps, pytest.approx(end_of_cycle(steps)))] * 2
    assert trained_on(results)[0] == Counter({sample: times * count for sample, count in EVERY.items()})


def losses() -> tuple[float, float]:
    """Of the whole data before and after training."""
    torch.manual_seed(4)
    module = TwoOptimizers().double()
    x, y = dataset(SAMPLES).tensors

    def loss() -> float:
        with torch.no_grad():
            return float(nn.functional.cross_entropy(module.second(torch.tanh(module.first(x.double()))), y))

    before = loss()
    fit_module(module, "async_ps", 2, Case(max_epochs=4), loader())
    return before, loss()


def test_manual_optimization_of_two_optimizers(world2: World) -> None:
    for before, after in world2.run(losses):
        assert after < 0.8 * before


def pairs() -> None:
    class Pairs(Seen):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return super().training_step(batch["one"], batch_idx)

    fit_module(Pairs(), "async_ps", 2, Case(max_epochs=1), {"one": loader(), "other": loader()})


def test_several_training_loaders_are_refused(world2: World) -> None:
    world2.run_raising(ValueError, "there are several training loaders", pairs)


def twice() -> list[float]:
    """A fit, an evaluation on all ranks together, and a fit again."""
    module, values = Seen(), []
    for _ in range(2):
        trainer = fit_module(module, "async_ps", 2, Case(max_epochs=1), loader(), eval_loader())
        values.append(float(trainer.test(module, eval_loader(), verbose=False)[0]["test_loss"]))
    return values


def test_a_program_goes_on_after_the_fit(world2: World) -> None:
    first, second = world2.run(twice)
    assert first == second


def test_what_needs_ranks_in_step_is_refused() -> None:
    trainer = make_trainer(Case(), "async_ps", 2, callbacks=[LearningRateFinder()])
    with pytest.raises(ValueError, match="LearningRateFinder: it has all ranks train in step"):
        trainer.fit(Seen(), loader())


def test_no_staleness_is_synchronous(world2: World) -> None:
    case = Case(max_epochs=1, strategy={"max_staleness": 0}, trainer={"accumulate_grad_batches": 2})
    assert_trains_alike(world2, Classifier, "async_ps", case)
