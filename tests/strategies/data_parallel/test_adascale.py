"""AdaScale: gains are FairScale's, the same on all ranks, and scale the step that they belong to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import GradientAccumulationScheduler, LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from lightning_multigpu import RingDDPStrategy, TensorSplitStrategy
from tests.rank import init_group
from tests.strategies.tasks import Case, Classifier, make_strategy, make_trainer, state, train_loader
from tests.world import World, rank

NAMES = ["ring_ddp", "ddp_sharded"]


class Noting(L.Callback):
    """Gains as logged, learning rates as others see them, and weights."""

    def __init__(self) -> None:
        self.gains: list[float] = []
        self.steps: list[float] = []
        self.rates: list[list[float]] = []
        self.batches: list[Any] = []

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.batches.append(batch)

    def _note_rates(self, trainer: L.Trainer) -> None:
        self.rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._note_rates(trainer)
        if "adascale/gain" in trainer.callback_metrics:
            self.gains.append(float(trainer.callback_metrics["adascale/gain"]))
            self.steps.append(float(trainer.callback_metrics["adascale/steps"]))


class NotingBefore(Noting):
    """Has ``ddp_sharded`` show all gradients on every rank."""

    def on_before_optimizer_step(self, trainer: L.Trainer, *args: Any) -> None:
        self._note_rates(trainer)


def train(
    name: str,
    case: Case,
    adascale: Any = True,
    fit: dict[str, Any] | None = None,
    kind: type[Noting] = Noting,
    module: type[Classifier] = Classifier,
    **options: Any,
) -> Any:
    noting, trained = kind(), module(case.optimizer)
    trainer = make_trainer(case, make_strategy(name, adascale=adascale), 2, callbacks=[noting], **options)
    trainer.fit(trained, train_loader(case, 2), **(fit or {}))
    if fit is None and trainer.default_root_dir != str(Path.cwd()):
        trainer.save_checkpoint(Path(trainer.default_root_dir) / "saved.ckpt")
    return {"weights": state(trained), **vars(noting)}


def by_fairscale(case: Case, batches: list[Any], accumulate: int, smoothing: float | None) -> dict[str, Any]:
    """FairScale's AdaScale around torch's DDP, as its documentation has it."""
    from fairscale.optim import AdaScale

    init_group()
    module = Classifier(case.optimizer).double()
    torch.set_default_dtype(torch.float64)
    try:
        made = module.configure_optimizers()
        optimizer = AdaScale(
            made["optimizer"] if isinstance(made, dict) else made,
            num_gradients_to_accumulate=accumulate,
            smoothing=smoothing,  # type: ignore[arg-type]
        )
        layers = DistributedDataParallel(module.layers)
        gains: list[float] = []
        for epoch in range(case.max_epochs):
            for number, (x, y) in enumerate(batches[rank()][8 * epoch : 8 * (epoch + 1)]):
                steps = (number + 1) % accumulate == 0
                layers.require_backward_grad_sync = steps
                loss = nn.functional.cross_entropy(layers(x.double()), y) / accumulate
                loss.backward()
                if steps:
                    gains.append(float(optimizer.gain()))
                    optimizer.step()
                    module.zero_grad()
                    if isinstance(made, dict):
                        made["lr_scheduler"]["scheduler"].step()
    finally:
        torch.set_default_dtype(torch.float32)
    return {"gains": gains, "weights": state(module)}


@pytest.mark.parametrize(
    ("name", "optimizer", "accumulate", "smoothing"),
    [
        ("ring_ddp", "sgd", 1, None),
        ("ring_ddp", "groups", 2, 0.5),
        ("ddp_sharded", "groups", 1, 0.9),
        ("ddp_sharded", "sgd", 2, None),
    ],
)
def test_gains_and_weights_are_those_of_fairscale(
    name: str, optimizer: str, accumulate: int, smoothing: float | None, world2: World
) -> None:
    """Over FairScale's ShardedDataParallel its gains were 1.54 on one rank and 1.45 on the other."""
    case = Case(optimizer, num_samples=64, max_epochs=3, trainer={"accumulate_grad_batches": accumulate})
    adascale = True if smoothing is None else {"smoothing": smoothing}
    results = world2.run(train, name, case, adascale)
    expected = world2.run(by_fairscale, case, [result["batches"] for result in results], accumulate, smoothing)[0]
    assert len(expected["gains"]) == 24 // accumulate
    for result in results:
        gains = result["gains"] if accumulate == 1 else result["gains"][::accumulate]
        assert gains == pytest.approx(expected["gains"], rel=1e-6)
        assert len({round(gain, 6) for gain in gains}) > 5, "they change from step to step"
        assert result["gains"] == results[0]["gains"], "they are the same bits"
        for key, value in expected["weights"].items():
            torch.testing.assert_close(result["weights"][key], value, rtol=1e-6, atol=1e-9)


def by_hand(case: Case, batches: list[list[Any]]) -> list[float]:
    """The gain of each step of plain SGD on one device, from the mean gradients of all batches of all ranks.

    Args:
        case: with two accumulated batches a step.
        batches: of each rank.
    """
    module = Classifier().double()
    parameters, gains = [*module.layers.parameters()], []
    for number in range(0, len(batches[0]), 2):
        found: list[tuple[Tensor, float, int]] = []
        for of_ranks in list(zip(*batches, strict=True))[number : number + 2]:
            total = sum(len(y) for _, y in of_ranks)
            for x, y in of_ranks:
                loss = nn.functional.cross_entropy(module.layers(x.double()), y)
                gradient = torch.cat([each.flatten() for each in torch.autograd.grad(loss, parameters)])
                found.append((gradient, len(y) / total / 2, len(y)))
        average = sum(weight * gradient for gradient, weight, _ in found)
        one, all_ = (sum(weight**power / size for _, weight, size in found) for power in (1, 2))
        mean = sum(weight * gradient.square().sum() for gradient, weight, _ in found)
        sample = (mean - average.square().sum()) / (one - all_)
        true = max(0.0, float(mean - sample * one))
        gains.append(float((sample * one + true) / (sample * all_ + true)))
        moved = [gains[-1] * 0.2 * each for each in average.split([p.numel() for p in parameters])]
        with torch.no_grad():
            for parameter, step in zip(parameters, moved, strict=True):
                parameter -= step.view_as(parameter)
    return gains


class PlainSGD(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2)


@pytest.mark.parametrize("name", NAMES)
def test_gains_with_batches_of_different_sizes(name: str, world2: World) -> None:
    """The batch of 3 samples on rank 0 counted as much as that of 2 on rank 1, and as those of 4 before."""
    case = Case(num_samples=61, trainer={"accumulate_grad_batches": 2})
    results = world2.run(train, name, case, {"smoothing": 0.0}, module=PlainSGD)
    assert sorted({len(y) for result in results for _, y in result["batches"]}) == [2, 3, 4]
    expected = by_hand(case, [result["batches"] for result in results])
    assert results[0]["gains"][::2] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_rates_are_multiplied_for_the_update_alone(name: str, world2: World) -> None:
    case = Case("groups", trainer={"accumulate_grad_batches": 2, "gradient_clip_val": 0.5})
    plain, scaled = (world2.run(train, name, case, adascale, kind=NotingBefore)[0] for adascale in (False, True))
    assert scaled["rates"] == plain["rates"]
    assert plain["gains"] == []
    assert not torch.equal(scaled["weights"]["layers.0.weight"], plain["weights"]["layers.0.weight"])
    assert all(1 <= gain <= 4 for gain in scaled["gains"])
    new = [gain for before, gain in zip([None, *scaled["gains"]], scaled["gains"], strict=False) if gain != before]
    assert scaled["steps"][-1] == pytest.approx(sum(new), rel=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_averages_go_on_where_a_checkpoint_has_left_them(name: str, world2: World, tmp_path: Path) -> None:
    case = Case("groups", max_epochs=4)
    whole, *_ = world2.run(train, name, case)
    first, *_ = world2.run(train, name, Case("groups", max_epochs=2), default_root_dir=str(tmp_path))
    ckpt = {"ckpt_path": str(tmp_path / "saved.ckpt")}
    for result in world2.run(train, name, case, fit=ckpt):
        assert [*first["gains"], *result["gains"]] == pytest.approx(whole["gains"], rel=1e-9)
        assert result["steps"][-1] == pytest.approx(whole["steps"][-1], rel=1e-6)
        for key, value in whole["weights"].items():
            torch.testing.assert_close(result["weights"][key], value, rtol=1e-9, atol=1e-11)


def overflowing(name: str) -> list[float]:
    plugin = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**24))
    return train(name, Case(), precision=None, plugins=[plugin])["gains"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", NAMES)
def test_gains_do_not_depend_on_the_scale_of_losses(name: str, world2: World) -> None:
    """Steps that overflow, the first ones, change no average."""
    first, second = world2.run(overflowing, name)
    assert first == second
    assert first[0] == 1.0
    assert all(1 <= gain <= 2 for gain in first)
    assert 1.05 < first[-1] < 1.95


class Unfreezing(Classifier):
    """A group of parameters comes in the second epoch."""

    def configure_optimizers(self) -> Any:
        self.second.requires_grad_(False)
        return torch.optim.SGD(self.first.parameters(), lr=0.05)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.second.requires_grad_(True)
            self.trainer.optimizers[0].add_param_group({"params": [*self.second.parameters()], "lr": 0.05})


def unfreeze(name: str) -> list[float]:
    noting = Noting()
    trainer = make_trainer(Case(), make_strategy(name, adascale=True), 2, callbacks=[noting])
    trainer.fit(Unfreezing(), train_loader(Case(), 2))
    return noting.gains


@pytest.mark.parametrize("name", NAMES)
def test_a_group_may_come_later(name: str, world2: World) -> None:
    first, second = world2.run(unfreeze, name)
    assert first == second
    assert all(1 <= gain <= 2 for gain in first)


class ByHand(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Newton(Classifier):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


def newton() -> None:
    make_trainer(Case(), RingDDPStrategy(adascale=True), 2).fit(Newton(), train_loader(Case(), 2))


def test_what_adascale_cannot_do_is_refused(world2: World) -> None:
    for options, words in (
        ({"adascale": 1}, "adascale=1 is neither a bool nor a mapping"),
        ({"adascale": {"smoothing": 1.0}}, "smoothing=1.0 of adascale is out of range; pass a number from 0"),
        ({"adascale": True, "average_every": 2}, "adascale=True and average_every=2: ranks step with gradients of"),
        ({"adascale": True, "model_averaging_period": 4}, "and model_averaging_period=4: ranks step"),
        ({"adascale": {}, "compression": "topk"}, "and compression='topk': a part of each gradient is left"),
        ({"adascale": True, "compression": {"name": "powersgd", "rank": 2}}, "'powersgd'.*leave one of the two out"),
    ):
        with pytest.raises(ValueError, match=words):
            RingDDPStrategy(**options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"and ddp_comm_hook=.*: the hook may leave any gradients behind"):
        RingDDPStrategy(adascale=True, ddp_comm_hook=default_hooks.fp16_compress_hook)
    RingDDPStrategy(adascale=True, compression="int8")
    with pytest.raises(TypeError, match=r"adascale= has no option 'smoothin'\. Did you mean 'smoothing'\?"):
        RingDDPStrategy(adascale={"smoothin": 0.5})
    with pytest.raises(ValueError, match="adascale=True: under tensor_split each rank has parts"):
        TensorSplitStrategy(adascale=True)
    with pytest.raises(ValueError, match=r"ByHand optimizes manually.*use automatic optimization"):
        make_trainer(Case(), RingDDPStrategy(adascale=True), 2).fit(ByHand(), train_loader(Case(), 2))
    with pytest.raises(ValueError, match=r"on one rank without accumulation.*accumulate_grad_batches=2"):
        make_trainer(Case(), RingDDPStrategy(adascale=True), 1).fit(Classifier(), train_loader(Case(), 1))
    world2.run_raising(ValueError, "LBFGS evaluates the loss several times a step; use SGD", newton)


class StopsAt(L.Callback):
    """As in the documentation: training ends when it is worth a number of steps of one rank's batch."""

    def __init__(self, steps: float) -> None:
        self.steps = steps

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        trainer.should_stop = trainer.strategy.scale_invariant_steps >= self.steps  # type: ignore[attr-defined]


class ReadsSteps(Classifier):
    """Has a schedule over the steps that training is worth, whose first rate is asked for with the optimizer."""

    def configure_optimizers(self) -> Any:
        self.steps = self.trainer.strategy.scale_invariant_steps  # type: ignore[attr-defined]
        return super().configure_optimizers()


def stop(path: Path) -> tuple[int, float, float, float]:
    strategy = make_strategy("ring_ddp", adascale=True)
    scheduler, rates = GradientAccumulationScheduler({0: 1, 1: 2}), LearningRateMonitor()
    logger = CSVLogger(str(path), name=None, version=0)
    trainer = make_trainer(Case(max_epochs=9), strategy, 2, callbacks=[StopsAt(20), scheduler, rates], logger=logger)
    trainer.fit(Classifier("groups"), train_loader(Case(), 2))
    found = trainer.global_step, strategy.scale_invariant_steps
    trainer.fit_loop.epoch_loop.max_steps = trainer.global_step + 1
    trainer.should_stop, trainer.accumulate_grad_batches = False, 1
    again = ReadsSteps()
    trainer.fit(again, train_loader(Case(), 2))
    return *found, again.steps, strategy.scale_invariant_steps


def test_training_ends_when_it_is_worth_enough_steps(world2: World, tmp_path: Path) -> None:
    first, second = world2.run(stop, tmp_path)
    assert first == second
    global_step, steps, *of_second_fit = first
    assert 20 <= steps < 24
    assert global_step < 20
    assert of_second_fit[0] == 0.0, "a second fit has new optimizers"
    assert 1 <= of_second_fit[1] <= 4, "one step, of two batches of each rank"
