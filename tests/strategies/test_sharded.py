"""FairScale's sharded states: what ``ddp_sharded`` does beyond the contract of every strategy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, Callback, EMAWeightAveraging, StochasticWeightAveraging
from torch import Tensor, nn

from lightning_multigpu.callbacks import RunReport
from tests.report.shape import assert_follows_schema
from tests.strategies import test_changing_parameters as changes
from tests.strategies.tasks import (
    Case,
    Classifier,
    assert_same_weights,
    make_strategy,
    make_trainer,
    state,
    train_loader,
)
from tests.strategies.test_parameter_server import Frozen, ReadsGradients, ScalesWeights, TwoOptimizers
from tests.world import World, rank

CASE = Case(optimizer="adamw", max_epochs=2)


def fit(module: L.LightningModule, ranks: int, case: Case = CASE, **options: Any) -> L.Trainer:
    """Trains on the ranks; on one device without a strategy."""
    strategy = make_strategy("ddp_sharded", **case.strategy) if ranks > 1 else "auto"
    trainer = make_trainer(case, strategy, ranks, **options)
    trainer.fit(module, train_loader(case, trainer))
    return trainer


class OtherOptimizer(Classifier):
    """Trains with an optimizer of a class that the contract does not have."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


class Counting(torch.optim.SGD):
    """A user's optimizer: a constructor of its own, values in its groups that change, and an attribute."""

    def __init__(self, parameters: Any, *, strength: float) -> None:
        super().__init__(parameters, lr=strength)
        self.num_steps = 0

    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        for group in self.param_groups:
            group["seen"] = group.get("seen", 0) + 1
            group["lr"] = 0.2 / self.num_steps
        return super().step(closure)


def adagrad(parameters: Any) -> Any:
    return torch.optim.Adagrad(parameters, lr=0.1)


def counting(parameters: Any) -> Any:
    return Counting(parameters, strength=0.2)


def named(parameters: Any) -> Any:
    return torch.optim.NAdam([(f"p{number}", parameter) for number, parameter in enumerate(parameters)], lr=0.02)


def after_an_empty_group(parameters: Any) -> Any:
    return torch.optim.AdamW([{"params": []}, {"params": parameters, "weight_decay": 0.3}], lr=0.02, amsgrad=True)


class Skips(Classifier):
    """Two of its layers each compute a part of the samples, which a rank may have none of; a third is never used."""

    def __init__(self) -> None:
        super().__init__("adamw")
        torch.manual_seed(3)
        self.others = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        samples = [layer(x) for layer in self.others]
        uses_first = x[:, :1] > 1.0
        if bool(uses_first.any()):
            x = x + uses_first * samples[0]
        if not bool(uses_first.all()):
            x = x + ~uses_first * samples[1]
        return super().forward(x)


KINDS = {
    "Adagrad, whose states are there from the beginning": lambda: OtherOptimizer(adagrad),
    "a user's optimizer": lambda: OtherOptimizer(counting),
    "named parameters": lambda: OtherOptimizer(named),
    "an empty group": lambda: OtherOptimizer(after_an_empty_group),
    "hooks that read gradients": ReadsGradients,
    "manual optimization of two optimizers": TwoOptimizers,
    "weights that a callback changes": lambda: Classifier("adamw"),
    "a backbone that is unfrozen": Frozen,
    "stochastic weight averaging": lambda: Classifier("adamw"),
    "an average of weights": lambda: Classifier("adamw"),
}


def trained(kind: str, ranks: int, **options: Any) -> dict[str, Any]:
    callbacks: dict[str, Callback] = {
        "weights that a callback changes": ScalesWeights(),
        "a backbone that is unfrozen": BackboneFinetuning(1, lambda epoch: 1.0, backbone_initial_lr=0.05),
        "stochastic weight averaging": StochasticWeightAveraging(0.01, swa_epoch_start=1, annealing_epochs=1),
        "an average of weights": EMAWeightAveraging(decay=0.7),
    }
    module = KINDS[kind]()
    case = Case(max_epochs=3, strategy=options)
    trainer = fit(module, ranks, case, callbacks=[callbacks[kind]] if kind in callbacks else [])
    [group, *_] = trainer.optimizers[0].param_groups
    return {
        "weights": state(module),
        "norms": getattr(module, "norms", []),
        "steps": trainer.global_step,
        "seen": (group.get("seen"), group.get("lr"), type(trainer.optimizers[0]).__name__),
    }


def all_kinds(ranks: int) -> dict[str, Any]:
    return {kind: trained(kind, ranks) for kind in KINDS}


@pytest.mark.filterwarnings("ignore:The provided params to be frozen already exist", "ignore:Swapping")
def test_unmodified_modules(world2: World) -> None:
    reference = all_kinds(1)
    for result in world2.run(all_kinds, 2):
        for kind, expected in reference.items():
            assert_same_weights(result[kind], expected)
            assert result[kind]["norms"] == pytest.approx(expected["norms"]), kind
            assert (result[kind]["steps"], result[kind]["seen"]) == (expected["steps"], expected["seen"]), kind


STORIES = {
    name: story
    for name, story in changes.STORIES.items()
    if not story.strategy or story.strategy.keys() == {"find_unused_parameters"}
} | {"without buckets": changes.Story(strategy={"bucket_cap_mb": 0.0})}


def test_what_changes_during_training_trains_as_on_one_device(world2: World) -> None:
    results = world2.run(changes.attempt, STORIES, "ddp_sharded")
    problems = []
    for name, story in STORIES.items():
        both = [result[name] for result in results]
        problems += changes.problems_of(name, changes.train(story, 1), both, is_exact=True)
    assert not problems, "\n".join(problems)


def skipping(ranks: int, **options: Any) -> dict[str, Any]:
    module = Skips()
    fit(module, ranks, Case(max_epochs=2, strategy=options))
    return {"weights": state(module)}


@pytest.mark.parametrize("bucket_cap_mb", [0.0, 0.0005])
def test_ranks_may_use_different_parameters(world2: World, bucket_cap_mb: float) -> None:
    """FairScale added up gradients of different parameters, and gave those that nobody uses a gradient of zero."""
    for result in world2.run(skipping, 2, find_unused_parameters=True, bucket_cap_mb=bucket_cap_mb):
        assert_same_weights(result, skipping(1))


class Layers(L.LightningModule):
    """Eight layers of one size, which 2 and 4 ranks can share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layers(batch[0].repeat(1, 11)[:, :64]).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def report_of(strategy: str, ranks: int, directory: str, **options: Any) -> dict[str, Any]:
    callback = RunReport(print_table=rank() == 0)
    case = Case(max_epochs=1, precision="32-true")
    trainer = make_trainer(case, make_strategy(strategy, **options), ranks, callbacks=[callback],
                           default_root_dir=directory)  # fmt: skip
    trainer.fit(Layers(), train_loader(case, trainer))
    assert callback.report is not None
    return callback.report


def dealt(parameters: list[Tensor], ranks: int) -> list[int]:
    """Elements of each rank by OSS's rule: a parameter goes to the rank that has the fewest."""
    sizes = [0] * ranks
    for parameter in parameters:
        sizes[sizes.index(min(sizes))] += parameter.numel()
    return sizes


@pytest.mark.parametrize("ranks", [2, 4])
def test_memory_of_gradients_and_states_is_that_of_the_parameters_that_a_rank_owns(
    world2: World, world4: World, ranks: int, tmp_path: Path
) -> None:
    world = {2: world2, 4: world4}[ranks]
    whole = world.run(report_of, "ring_ddp", ranks, str(tmp_path))[0]["memory"]
    report = world.run(report_of, "ddp_sharded", ranks, str(tmp_path), bucket_cap_mb=0.001)[0]
    assert_follows_schema(report)
    parameters = list(Layers().parameters())
    size_bytes = 4 * sum(parameter.numel() for parameter in parameters)
    for each in whole:
        assert (each["parameters_bytes"], each["gradients_bytes"]) == (size_bytes, size_bytes)
        assert each["optimizer_bytes"] == pytest.approx(2 * size_bytes, rel=0.01)
    for each, numel in zip(report["memory"], dealt(parameters, ranks), strict=True):
        assert each["parameters_bytes"] == size_bytes
        assert each["optimizer_bytes"] == pytest.approx(8 * numel, rel=0.01)  # and 4 bytes a parameter
        assert each["optimizer_bytes"] == pytest.approx(whole[0]["optimizer_bytes"] / ranks, rel=0.05)
        # Small ones of all ranks lie in buckets of 1 kiB.
        assert 4 * numel <= each["gradients_bytes"] <= 4 * numel + ranks * 1049
