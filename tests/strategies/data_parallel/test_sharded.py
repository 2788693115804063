"""FairScale's sharded states: what ``ddp_sharded`` does beyond the contract of every strategy."""

import logging
from collections.abc import Collection
from contextlib import nullcontext
from functools import cache, partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.trainer.states import TrainerStatus
from torch import Tensor, nn

from lightning_multigpu.callbacks import RunReport
from lightning_multigpu.engine.optimizer_state import held_states
from lightning_multigpu.strategies import sharded
from tests.modules import ReadsGradients, TwoOptimizers
from tests.report.examples import assert_follows_schema
from tests.strategies.pipeline.test_configure_model import peak_bytes_of
from tests.strategies.tasks import (
    Case,
    Classifier,
    assert_same_weights,
    assert_trains_alike,
    fit_module,
    make_trainer,
    state,
)
from tests.world import World, rank

CASE = Case(optimizer="adamw", max_epochs=2)


def fit(module: L.LightningModule, ranks: int, case: Case = CASE, **options: Any) -> L.Trainer:
    return fit_module(module, "ddp_sharded" if ranks > 1 else None, ranks, case, **options)


class OtherOptimizer(Classifier):
    def __init__(self, make: Any, **options: Any) -> None:
        super().__init__()
        self.make, self.options = make, options

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters(), **self.options)


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


class ThreePasses(Classifier):
    """Manual optimization with three backward passes a step, of which the second is not averaged at once."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer: Any = self.optimizers()
        blocked = getattr(self.trainer.strategy, "block_backward_sync", nullcontext)
        self.manual_backward(self.loss_of(batch, detached=False))
        with blocked():
            self.manual_backward(self.loss_of(batch, detached=True))
        self.manual_backward(self.loss_of(batch, detached=True))
        optimizer.step()
        optimizer.zero_grad()

    def loss_of(self, batch: Any, *, detached: bool) -> Tensor:
        x, y = batch
        hidden = self.layers[:2](x)
        return nn.functional.cross_entropy(self.layers[2:](hidden.detach() if detached else hidden), y)


class AddsUp(Classifier):
    """Gradients of all steps add up, since nobody sets them to zero."""

    def optimizer_zero_grad(self, *args: Any) -> None: ...

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class ReadsClipped(ReadsGradients):
    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        self.norms.append(self.norm())


ADAGRAD = "Adagrad, whose states are there from the beginning"
READS, BY_HAND = "hooks that read gradients", "manual optimization of two optimizers"
KINDS = {
    "three backward passes a step": ThreePasses,
    "gradients that add up": AddsUp,
    ADAGRAD: partial(OtherOptimizer, torch.optim.Adagrad, lr=0.1),
    "a user's optimizer": partial(OtherOptimizer, Counting, strength=0.2),
    "named parameters": partial(OtherOptimizer, named),
    "an empty group": partial(OtherOptimizer, after_an_empty_group),
    READS: ReadsGradients,
    "a hook that reads clipped gradients": ReadsClipped,
    BY_HAND: TwoOptimizers,
}


class Looks(Callback):
    """Notes the numbers of the parameters whose states the rank holds."""

    def on_train_start(self, trainer: L.Trainer, *args: Any) -> None:
        own = held_states(trainer.optimizers[0])
        self.held = {number for number, p in enumerate(trainer.lightning_module.parameters()) if p in own}


def trained(kinds: Collection[str], strategy: str | None, ranks: int) -> dict[str, Any]:
    found = {}
    for kind in kinds:
        module, looks = KINDS[kind](), Looks()
        options = {"find_unused_parameters": True} if strategy == "ring_ddp" else {}
        case = Case(num_samples=32, max_epochs=2, strategy=options)
        trainer = fit_module(module, strategy, ranks, case, callbacks=[looks])
        [group, *_] = trainer.optimizers[0].param_groups
        values = (trainer.global_step, group.get("seen"), group.get("lr"), type(trainer.optimizers[0]).__name__)
        found[kind] = {"weights": state(module), "norms": getattr(module, "norms", []), "values": values}
        found[kind] |= {"held": looks.held}
    return found


trained_on_one_device = cache(lambda: trained(KINDS, None, 1))


@pytest.mark.parametrize("strategy", ["ddp_sharded", "ring_ddp", "cpu_ps", "sync_ps"])
def test_unmodified_modules(world2: World, strategy: str) -> None:
    is_sharded, reference = strategy == "ddp_sharded", trained_on_one_device()
    results = world2.run(trained, [*KINDS] if is_sharded else [READS, BY_HAND], strategy, 2)
    if is_sharded:
        first, second = (result[ADAGRAD]["held"] for result in results)
        assert not first & second
        assert first | second == {0, 1, 2, 3}
    for result in results:
        for kind, found in result.items():
            assert_same_weights(found, reference[kind])
            assert found["norms"] == pytest.approx(reference[kind]["norms"]), kind
            assert found["values"] == reference[kind]["values"], kind


@pytest.mark.parametrize("bucket_cap_mb", [0.0, 0.0005])
def test_ranks_may_use_different_parameters(world2: World, bucket_cap_mb: float) -> None:
    """FairScale added up gradients of different parameters, and gave those that nobody uses a gradient of zero."""
    options = {"find_unused_parameters": True, "bucket_cap_mb": bucket_cap_mb}
    assert_trains_alike(world2, Skips, "ddp_sharded", Case(max_epochs=2, strategy=options))


class Layers(L.LightningModule):
    """Eight layers of one size, which 2 and 4 ranks can share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layers(batch[0].repeat(1, 11)[:, :64]).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class InTurns(Classifier):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.pair = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        numbers = [0, 1] if torch.distributed.is_initialized() and rank() == 0 else [1, 0]
        made = {number: self.pair[number](x) for number in numbers}
        return super().forward(x + made[0] - 0.5 * made[1])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_ranks_may_come_to_parameters_in_another_order(world2: World, accumulate: int) -> None:
    """FairScale added up the gradients of different layers, and nothing said so."""
    case = Case(max_epochs=1, trainer={"accumulate_grad_batches": accumulate}, strategy={"bucket_cap_mb": 0.0})
    assert_trains_alike(world2, InTurns, "ddp_sharded", case)


class TwoTypes(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.first.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[1:](self.first(x.double()).float())  # type: ignore[no-any-return]


def test_parameters_of_two_types(world2: World) -> None:
    case = Case(max_epochs=1, precision="32-true", trainer={"gradient_clip_val": 0.3})
    assert_trains_alike(world2, TwoTypes, "ddp_sharded", case, rtol=1e-5)


class Saves(Layers):
    """Saves after its second batch, and notes the bytes that it took meanwhile."""

    def __init__(self, path: str) -> None:
        torch.manual_seed(7)
        super().__init__()
        self.path = path

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.peak_bytes = peak_bytes_of(lambda: self.trainer.save_checkpoint(self.path))


class SavesWithAHook(Saves):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Something that may look at the values of the checkpoint."""


def saved(cls: type[Saves], path: str, ranks: int = 2) -> int:
    module = cls(path)
    fit(module, ranks, Case(max_epochs=1))
    return module.peak_bytes


def resumed(path: str) -> set[int]:
    looks = Looks()
    fit(Layers(), 2, Case(max_epochs=2), callbacks=[looks], ckpt_path=path)
    return looks.held


def test_states_of_other_ranks_are_written_one_by_one(world2: World, tmp_path: Path) -> None:
    """What they are is compared with one device in test_checkpoints.py."""
    streamed, gathered, one = (str(tmp_path / name) for name in ("streamed", "gathered", "one"))
    streamed_bytes = world2.run(saved, Saves, streamed)
    gathered_bytes = world2.run(saved, SavesWithAHook, gathered)[0]
    saved(Saves, one, ranks=1)
    largest_bytes = 8 * 64 * 64
    assert gathered_bytes > 7 * largest_bytes, "two states of each of four layers are another rank's"
    assert max(streamed_bytes) < 2 * largest_bytes
    assert Path(streamed).read_bytes() == Path(gathered).read_bytes()
    first, second = world2.run(resumed, one)
    assert not first & second
    assert first | second == {*range(16)}


class OneLayer(Classifier):
    """Trains a single parameter; with two ranks one owns nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.second.weight.requires_grad_(True)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adagrad([self.second.weight], lr=0.1)


def test_a_rank_may_own_nothing(world2: World) -> None:
    scaler = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=8.0))
    case = Case(max_epochs=1, trainer={"gradient_clip_val": 0.1})
    options: dict[str, Any] = {"precision": None, "plugins": [scaler]}
    assert_trains_alike(world2, OneLayer, "ddp_sharded", case, rtol=3e-2, atol=3e-3, **options)


def report_of(ranks: int, directory: str) -> dict[str, Any]:
    callback = RunReport(print_table=rank() == 0)
    case = Case(max_epochs=1, precision="32-true", strategy={"bucket_cap_mb": 0.001})
    fit(Layers(), ranks, case, callbacks=[callback], default_root_dir=directory)
    assert callback.report is not None
    return callback.report


def dealt(parameters: list[Tensor], ranks: int) -> list[int]:
    """Elements of each rank by OSS's rule: a parameter goes to the rank that has the fewest."""
    sizes = [0] * ranks
    for parameter in parameters:
        sizes[sizes.index(min(sizes))] += parameter.numel()
    return sizes


def test_memory_of_gradients_and_states_is_that_of_the_parameters_that_a_rank_owns(
    world4: World, tmp_path: Path
) -> None:
    ranks = 4
    report = world4.run(report_of, ranks, str(tmp_path))[0]
    assert_follows_schema(report)
    purposes = {"gradients to their owners", "new parameters from their owners"}
    assert report["communication_ms"].keys() >= purposes
    parameters = list(Layers().parameters())
    size_bytes = 4 * sum(parameter.numel() for parameter in parameters)
    for each, numel in zip(report["memory"], dealt(parameters, ranks), strict=True):
        assert each["parameters_bytes"] == size_bytes
        assert each["optimizer_bytes"] == pytest.approx(8 * numel, rel=0.01)  # and 4 bytes a parameter
        assert each["optimizer_bytes"] == pytest.approx(2 * size_bytes / ranks, rel=0.05)
        assert each["gradients_bytes"] == 4 * numel


SIZE_BYTES = 4 * (16 * 6 + 16 + 3 * 16 + 3)


def traffic(bucket_cap_mb: float) -> tuple[list[Any], int]:
    case = Case(max_epochs=1, precision="32-true", strategy={"bucket_cap_mb": bucket_cap_mb})
    strategy: Any = fit(Classifier(), 2, case).strategy
    strategy.meter.flush()
    of_steps = [
        [t for name in ("reduce_scatter", "all_gather") for t in step.of(name, "shards")]
        for step in strategy.meter.steps
    ]
    found = [(sum(t.sent_bytes for t in step), [(t.operation, t.count) for t in step]) for step in of_steps]
    return found, len(logging.getLogger().handlers)


@pytest.mark.parametrize(("bucket_cap_mb", "num_messages"), [(0.0, 4), (1.0, 1)])
def test_the_meter_counts_what_travels(bucket_cap_mb: float, num_messages: int, world2: World) -> None:
    """Each rank sends the others' gradients, and its own new parameters: S in all."""
    for found, handlers in world2.run(traffic, bucket_cap_mb):
        assert found == [(SIZE_BYTES, [("reduce_scatter", num_messages), ("all_gather", num_messages)])] * 7
        assert handlers == 0, "FairScale's messages have configured the root logger"


class SharesALayer(TwoOptimizers):
    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self, self.first)]


class TwoPasses(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        super().training_step(batch, batch_idx).backward()  # type: ignore[no-untyped-call]
        return super().training_step(batch, batch_idx)


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "LBFGS": (partial(OtherOptimizer, torch.optim.LBFGS), ValueError, "LBFGS evaluates the loss several times"),
    "a parameter of two optimizers": (SharesALayer, ValueError, r"optimizer 1 \(SGD\) and optimizer 0 both have a"),
    "a parameter without a gradient": (
        lambda: Classifier(unused=True),
        RuntimeError,
        r"does not depend on unused\.\w+, unused\.\w+, .*find_unused_parameters=True",
    ),
    "two backward passes": (TwoPasses, RuntimeError, "twice, after its gradient was sent: backward is called twice"),
    "a fused optimizer that scales": (
        partial(OtherOptimizer, torch.optim.SGD, lr=0.1, fused=True),
        ValueError,
        "looks for inf and nan within its own step, on each rank alone; pass fused=False",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_sharded_is_refused(world2: World, name: str) -> None:
    make, error, words = REFUSED[name]
    scaler = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    options: dict[str, Any] = {"precision": None, "plugins": [scaler]} if "scales" in name else {}
    case = Case(max_epochs=1, precision="32-true", strategy={"bucket_cap_mb": 0.0})
    world2.run_raising(error, words, lambda: fit(make(), 2, case, **options))


def test_without_fairscale_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharded, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"needs FairScale: pip install .* fairscale==0.4.13"):
        make_trainer(CASE, "ddp_sharded", 2)


def saved_after_the_run(path: str, *callbacks: Callback) -> None:
    trainer = fit(Classifier("adamw"), 2, Case(optimizer="adamw", max_epochs=1), callbacks=list(callbacks))
    trainer.save_checkpoint(path)


def test_a_checkpoint_that_is_saved_after_the_run(world2: World, tmp_path: Path) -> None:
    world2.run(saved_after_the_run, str(tmp_path / "after.ckpt"))
    states = torch.load(tmp_path / "after.ckpt", weights_only=True)["optimizer_states"][0]["state"]
    assert list(states) == [0, 1, 2, 3]
    interrupts = LambdaCallback(
        on_train_end=lambda trainer, _: setattr(trainer.state, "status", TrainerStatus.INTERRUPTED)
    )
    words = "after the run, which was interrupted, and each rank has its part"
    world2.run_raising(RuntimeError, words, saved_after_the_run, str(tmp_path / "parts.ckpt"), interrupts)
