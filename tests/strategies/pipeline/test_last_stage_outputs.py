"""What steps keep and return on the last stage is where hooks of other stages look for it, as on one device."""

import copy
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_multigpu import PipelineStrategy
from lightning_multigpu.engine.errors import PipelineError
from lightning_multigpu.engine.placeholder import Placeholder
from lightning_multigpu.strategies.pipeline.last_stage_outputs import LastStageOutputs, packed, unpacked
from tests.strategies.pipeline.fitted import fitted
from tests.strategies.tasks import Case, Classifier, data_ranks, eval_loader, fit_module, make_trainer
from tests.world import World


class Collecting(Classifier):
    """Keeps outputs for the end of the epoch as modules do since ``validation_epoch_end`` is gone."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        self.by_loader: dict[int, list[Tensor]] = {0: [], 1: []}
        self.alias = self.by_loader
        self.best = float("inf")
        self.latest: Any = None
        self.newest: deque[int] = deque(maxlen=3)
        self.at_batch_ends: list[float] = []
        self.found: dict[str, Any] = {}

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        x, y = batch
        logits = self(x)
        loss = torch.nn.functional.cross_entropy(logits, y)
        self.losses.append(loss)
        self.by_loader[dataloader_idx].append(logits[:, 0])
        self.best = min(self.best, float(loss))
        self.latest = loss
        self.newest.append(batch_idx)
        return {"loss": loss, "first": logits[:, :1]}

    def on_validation_batch_end(self, outputs: Any, *args: Any) -> None:
        self.at_batch_ends.append(float(outputs["first"].sum()))

    def on_validation_epoch_end(self) -> None:
        self.log("collected", torch.stack(self.losses).mean(), sync_dist=True)
        kept = ("losses", "by_loader", "alias", "best", "latest", "newest", "at_batch_ends")
        self.found = {name: copy.deepcopy(vars(self)[name]) for name in kept}
        self.losses.clear()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return {"loss": loss, "targets": batch[1], "twice": 2 * loss.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert torch.equal(outputs["targets"], batch[1])
        torch.testing.assert_close(outputs["twice"], 2 * outputs["loss"])  # a list of the micro-batches' values once

    def on_train_epoch_end(self) -> None:
        self.log("mean of seen", sum(loss for loss, _ in self.seen) / len(self.seen))


def collect(strategy: Any, ranks: int) -> dict[str, Any]:
    module = Collecting()
    loaders = [eval_loader(), eval_loader(8)]
    trainer = fit_module(module, strategy, ranks, Case(max_epochs=2), None, loaders, num_sanity_val_steps=1)
    return {**module.found, "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()}}


def test_hooks_of_all_stages_find_what_they_would_on_one_device(world2: World) -> None:
    expected = collect(None, 1)
    assert sum(map(len, expected["by_loader"][1])) > 8
    for found in world2.run(collect, PipelineStrategy(schedule="zero_bubble"), 2):
        assert found["newest"].maxlen == 3
        torch.testing.assert_close(found.pop("metrics"), expected["metrics"], rtol=1e-6, atol=0)
        torch.testing.assert_close(found, {name: expected[name] for name in found}, rtol=1e-9, atol=1e-12)


class Asking(Classifier):
    """Its steps talk to the other ranks, as steps do that a rank runs for a batch of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.answers: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        strategy = self.trainer.strategy
        before = strategy.broadcast(batch_idx if data_ranks(self.trainer) == 1 else self.trainer.global_rank)
        strategy.barrier()
        loss = torch.nn.functional.cross_entropy(self(batch[0]), batch[1])
        gathered = self.all_gather(loss)
        self.answers.append((before, gathered.tolist(), strategy.reduce_boolean_decision(True)))

    def on_validation_epoch_end(self) -> None:
        self.answers.append(self.all_gather(torch.tensor(float(self.trainer.global_rank))).tolist())


def ask(ranks: int, pipelines: int) -> list[Any]:
    module = Asking()
    strategy = PipelineStrategy(data_parallel_size=pipelines)
    make_trainer(Case(), strategy, ranks).validate(module, eval_loader(8), verbose=False)
    return module.answers


def test_collectives_of_a_step_are_those_of_the_data_axis(world2: World, world4: World) -> None:
    for rank, answers in enumerate(world2.run(ask, 2, 1)):
        assert [before for before, *_ in answers[:-1]] == [0, 1]
        assert all(len(losses) == 1 and yes for _, losses, yes in answers[:-1])
        assert answers[-1] == [float(rank)]
    for rank, answers in enumerate(world4.run(ask, 4, 2)):
        assert [before for before, *_ in answers[:-1]] == [0], "the rank of the first pipeline"
        assert all(len(set(losses)) == 2 and yes for _, losses, yes in answers[:-1])
        assert answers[-1] == [float(rank % 2), float(rank % 2 + 2)], "outside of steps each stage asks its peers too"


class Saving(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.trainer.save_checkpoint("never.ckpt")
        return loss


def test_a_checkpoint_within_a_step_is_refused(world2: World) -> None:
    world2.run_raising(PipelineError, "save it in on_train_batch_end", fitted, Saving)


# Without processes


class _Group:
    """Stands for the ranks of a pipeline; keeps what the last stage gives."""

    def from_last(self, obj: Any) -> Any:
        self.given = obj
        return obj

    def finish(self) -> None:
        pass


def sent(change: Callable[[Any], object], kind: str = "train", **attributes: Any) -> dict[str, Any]:
    """The attributes that the last stage gives to the others when a step has changed its module, by their names."""
    module, group = L.LightningModule(), _Group()
    for name, value in attributes.items():
        setattr(module, name, value)
    outputs: Any = LastStageOutputs(module, group, is_last=True, at_end=lambda: None)  # type: ignore[arg-type]
    with suppress(IndexError), outputs.noting():
        change(module)
    getattr(outputs, f"on_{kind}_epoch_end")(None, module)
    return {name: unpacked(package, torch.device("cpu")) for name, package in group.given.items()}


@pytest.mark.parametrize("kind", ["train", "validation", "test", "predict"])
def test_what_is_changed_is_sent_and_nothing_else(kind: str) -> None:
    """At the end of every kind of epoch; also what an exception leaves."""

    def change(module: Any) -> None:
        module.grown.append(2)
        module.deep["a"]["b"].append(torch.zeros(()))
        module.number += 1
        module.tensor.add_(1)
        module.replaced = (2,)
        module.large.append(0)
        module.new = "new"
        module.save_hyperparameters({"lr": 1})
        module._dtype = torch.float64
        raise IndexError

    before: dict[str, Any] = {"grown": [1], "deep": {"a": {"b": []}}, "number": 1, "tensor": torch.zeros(2)}
    found = sent(change, kind, kept=[1], replaced=(1,), large=list(range(200)), **before)
    assert set(found) == {"grown", "deep", "number", "tensor", "replaced", "large", "new"}
    assert found["grown"] == [1, 2]


def test_what_cannot_be_sent_stays_with_a_warning() -> None:
    def change(module: Any) -> None:
        module.lock = threading.Lock()
        module.lost = [Placeholder(torch.ones(2), "parameter layers.0.weight")]
        module.fine = 1

    with pytest.warns(UserWarning, match=r"self\.") as warned:
        assert set(sent(change)) == {"fine"}
    told = [str(warning.message) for warning in warned]
    assert any("self.lock stays on the last stage, because it cannot be pickled" in text for text in told)
    assert any("self.lost stays" in text and "parameter layers.0.weight" in text for text in told)


def test_a_view_is_sent_without_the_memory_around_it() -> None:
    whole = torch.zeros(1_000_000)
    package = packed({"view": whole[:10].requires_grad_()}, "it")
    assert package is not None
    assert len(package) < 10_000
    found = unpacked(package, torch.device("cpu"))["view"]
    assert found.tolist() == [0.0] * 10
    assert not found.requires_grad
