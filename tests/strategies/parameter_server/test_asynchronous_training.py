"""Asynchronous training through the Trainer: who decides, and that each sample is trained on once."""

import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback, EarlyStopping, LambdaCallback, LearningRateFinder, ModelCheckpoint
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
        total = int(self.trainer.estimated_stepping_batches)  # after more steps the rate is below 0
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / total)
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
    module: Seen | None = None,
    data: Any = loader,
    options: dict[str, Any] | None = None,
    ckpt_path: str | None = None,
    **overrides: Any,
) -> dict[str, Any]:
    module, case = module or Seen(), Case(max_epochs=EPOCHS, strategy=options or {})
    trainer = fit_module(module, "async_ps", 2, case, data, eval_loader(), ckpt_path=ckpt_path, **overrides)
    return {
        "samples": module.samples,
        "weights": state(module),
        "validated": module.versions,
        "updates": module.updates,
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


@pytest.mark.parametrize(
    ("module", "data", "options"),
    [
        (Seen(slow_rank=1), loader, {}),
        (Seen(slow_rank=0), partial(loader, num_workers=1), {"max_staleness": 1}),
        # Rank 0 had ended the epoch before the slow rank 1 gave its second batch back.
        (EndsEarly(slow_rank=1), loader, {}),
    ],
    ids=["1-no workers", "0-a loader's worker, a bound of staleness", "ends early"],
)
def test_each_sample_is_trained_on_once_an_epoch(
    world2: World, module: Seen, data: Any, options: dict[str, Any]
) -> None:
    results = world2.run(fit, module, data, options)
    assert trained_on(results) == dict.fromkeys(range(EPOCHS), EVERY)
    assert sum(result["steps"] for result in results) == EPOCHS * NUM_BATCHES
    first, second = results
    assert first["weights"]["layers.0.weight"].equal(second["weights"]["layers.0.weight"]), "both end with all updates"
    assert all(n >= NUM_BATCHES * (epoch + 1) for epoch, n in enumerate(first["updates"])), "rank 0 has waited"
    if not options:
        assert len(first["samples"]) > len(second["samples"])


class Accumulates(Seen):
    """It tells for how many batches the gradients are in no update yet when the server is told of a batch."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.accumulated, self.when_told = 0, Counter[int]()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.accumulated += 1
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        if self.accumulated == 2 or self.trainer.is_last_batch:
            optimizer: Any = self.optimizers()
            optimizer.step()
            optimizer.zero_grad()
            self.accumulated = 0
        return loss


def accumulates() -> dict[str, Any]:
    module, trained = Accumulates(), Servers.trained

    def told(servers: Servers, epoch: int, number: int) -> None:
        module.when_told[module.accumulated] += 1
        trained(servers, epoch, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Servers, "trained", told)
        found = fit(module, max_epochs=1)
    return {**found, "told": module.when_told}


def test_a_batch_counts_as_trained_when_the_servers_have_its_gradients(world2: World) -> None:
    """A worker that was lost between took the gradients with it, and nobody trained on the batch again."""
    results = world2.run(accumulates)
    assert sum((result["told"] for result in results), Counter()) == {0: NUM_BATCHES}
    assert trained_on(results) == {0: EVERY}


def test_all_ranks_end_with_what_rank_0_has(world2: World) -> None:
    """Rank 0 ended with averaged weights, and the others with those of the servers and buffers of their own."""
    # EMAWeightAveraging keeps float32, and would round the weights of another precision when it swaps them.
    options: dict[str, Any] = {"max_epochs": 2, "precision": "32-true"}
    first, second = world2.run(
        lambda: fit(Buffered(), options={"num_servers": 2}, callbacks=[moving_average(decay=0.8)], **options)
    )
    torch.testing.assert_close(first["weights"], second["weights"], rtol=0, atol=0)
    assert first["weights"]["beside.weight"].eq(3.0).all()


def test_rank_0_validates_saves_and_decides(world2: World, tmp_path: Path) -> None:
    first, second = world2.run(decides, str(tmp_path))
    assert first["epochs"] == 2, "the second value is no better than the first"
    assert second["epochs"] < 50
    assert len(first["validated"]) == 1 + 2, "the sanity check, and two epochs"
    assert second["validated"] == []
    assert first["best"] == second["best"]
    of_first, of_second = (
        {k: v for k, v in each["metrics"].items() if k.startswith("val")} for each in (first, second)
    )
    assert of_first == of_second
    assert first["metrics"]["val_samples"] == 21
    assert first["callbacks"] == second["callbacks"]
    assert (first["limit"], second["limit"]) == (1.0, 1.0)
    saved = torch.load(first["best"], weights_only=False)
    validated = first["validated"][1 + saved["epoch"]]  # which epoch is better depends on who came first
    assert saved["state_dict"]["layers.0.weight"].equal(validated), "the weights that were validated"


def decides(directory: str) -> dict[str, Any]:
    stop = EarlyStopping("val_loss", patience=1, min_delta=100.0)
    keeps = ModelCheckpoint(directory, monitor="val_loss", save_top_k=1)
    options = {"enable_checkpointing": True, "num_sanity_val_steps": 1, "max_epochs": 50}
    return fit(callbacks=[stop, keeps], **options)


# Options, and the validations of two epochs.
VALIDATIONS: list[tuple[dict[str, Any], int]] = [
    ({"val_check_interval": NUM_BATCHES}, 2),
    ({"reload_dataloaders_every_n_epochs": 1}, 2),
    ({"val_check_interval": 0.5, "use_distributed_sampler": False}, 4),
    *[({"val_check_interval": "00:00:10:00"}, 0)] * (not IS_LIGHTNING_2_5),
]


@pytest.mark.filterwarnings("ignore:each worker trains on all batches of its loader")
def test_rank_0_validates_as_often_as_is_asked(world2: World) -> None:
    """A number of batches was one of rank 0's own, of which an epoch may have too few; a time raised AttributeError."""
    found = world2.run(lambda: [len(fit(max_epochs=2, **options)["validated"]) for options, _ in VALIDATIONS])
    assert found == [[number for _, number in VALIDATIONS], [0] * len(VALIDATIONS)]


def test_max_steps_counts_the_steps_of_manual_optimization(world2: World) -> None:
    """It counted batches: a module that steps every second time ended at half of the steps."""
    found = world2.run(fit, Accumulates(), max_epochs=-1, max_steps=7)
    assert sum(result["steps"] for result in found) in (7, 8), "the other rank may complete a step at the end"


def saves(path: str, when: Callable[[Any], bool]) -> Callback:
    """It saves after the batches for which the function of the epoch's loop says so."""
    return LambdaCallback(
        on_train_batch_end=lambda trainer, *_: (
            trainer.save_checkpoint(path) if when(trainer.fit_loop.epoch_loop) else None
        )
    )


def after_the_sixth(loop: Any) -> bool:
    return bool(loop.batch_idx == 5)


def goes_on(path: str, epochs: int) -> dict[str, Any]:
    return fit(Seen("adamw", schedule=True), ckpt_path=path, max_epochs=epochs)


def test_a_checkpoint_is_one_of_one_device_and_training_goes_on_from_it(world2: World, tmp_path: Path) -> None:
    options: dict[str, Any] = {"callbacks": [ModelCheckpoint(tmp_path, save_last=True)], "enable_checkpointing": True}
    first, _ = world2.run(fit, Seen("adamw", schedule=True), max_epochs=2, **options)
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


def test_an_epoch_goes_on_where_one_device_has_saved_it(world2: World, tmp_path: Path) -> None:
    """All of the epoch was trained on again."""
    path = str(tmp_path / "one.ckpt")
    callbacks = [saves(path, after_the_sixth)]
    fit_module(Classifier("adamw"), None, 1, Case(max_epochs=1), loader(), callbacks=callbacks)
    found = trained_on(world2.run(fit, Seen("adamw"), ckpt_path=path, max_epochs=1))[0]
    assert (max(found.values()), found.total()) == (1, SAMPLES - 6 * BATCH)


def test_the_next_epoch_follows_a_checkpoint_of_the_last_batch(world2: World, tmp_path: Path) -> None:
    """Rank 0 had not trained on all batches of the epoch itself: the next one began where rank 0 had come to."""
    path = str(tmp_path / "last.ckpt")
    callbacks = [saves(path, lambda loop: loop.batch_progress.is_last_batch)]
    world2.run(fit, Seen("adamw", slow_rank=0, schedule=True), callbacks=callbacks, max_epochs=1)
    assert trained_on(world2.run(goes_on, path, 2)) == {1: EVERY}


def test_schedules_and_max_steps_count_the_updates_of_all(world2: World) -> None:
    """N ranks trained on N times limit_train_batches; with min_steps a run of max_steps never ended."""
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
    ({"max_steps": 17, "max_epochs": -1, "data": partial(loader, num_workers=1)}, 17, 50 + 16),
    ({"max_steps": 17, "max_epochs": -1, "min_steps": 15, "min_epochs": 6}, 17, 50 + 16),
]


def scheduled() -> list[dict[str, Any]]:
    return [fit(Seen(schedule=True), **options) for options, *_ in SCHEDULED]


# Options, the training data, the steps of each rank, and how often a sample is trained on in an epoch.
OWN_BATCHES: dict[str, tuple[dict[str, Any], Any, int, int]] = {
    "stream": (
        {"max_steps": 9, "max_epochs": -1},
        lambda: DataLoader(Stream(range(rank(), SAMPLES, 2), SAMPLES), batch_size=BATCH),
        9,
        1,
    ),
    "loader": ({"use_distributed_sampler": False, "max_epochs": 2}, loader, 2 * NUM_BATCHES, 2),
}


@pytest.mark.filterwarnings("ignore:each worker trains on all batches of its loader")
@pytest.mark.parametrize("kind", OWN_BATCHES)
def test_schedules_count_a_ranks_own_steps_where_its_batches_are_its_own(world2: World, kind: str) -> None:
    """They counted the updates of all ranks, and ended after a part of the run."""
    options, data, steps, times = OWN_BATCHES[kind]
    results = world2.run(fit, Seen(schedule=True), data, **options)
    assert [(found["steps"], found["rate"]) for found in results] == [(steps, pytest.approx(0.0, abs=1e-9))] * 2
    assert trained_on(results)[0] == Counter({sample: times * count for sample, count in EVERY.items()})


def test_a_program_goes_on_after_the_fit(world2: World) -> None:
    def tests() -> Any:
        trainer = fit_module(Seen(), "async_ps", 2, Case(max_epochs=1), loader(), eval_loader())
        return trainer.test(trainer.lightning_module, eval_loader(), verbose=False)

    first, second = world2.run(tests)
    assert first == second


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"callbacks": [LearningRateFinder()]}, "LearningRateFinder: with mode='async' each batch of a rank is"),
        ({"data": {"one": loader(), "other": loader()}}, "there are several training loaders"),
        ({"accumulate_grad_batches": 4}, "accumulate_grad_batches=4: with mode='async' each batch of a rank is an"),
    ],
)
def test_what_needs_ranks_in_step_is_refused(world2: World, options: dict[str, Any], words: str) -> None:
    world2.run_raising(ValueError, words, fit, **options)


@pytest.mark.parametrize(("module", "accumulate"), [(Classifier, 2), (TwoOptimizers, 1)])
def test_no_staleness_is_synchronous(world2: World, module: Any, accumulate: int) -> None:
    case = Case(max_epochs=1, strategy={"max_staleness": 0}, trainer={"accumulate_grad_batches": accumulate})
    assert_trains_alike(world2, module, "async_ps", case)
