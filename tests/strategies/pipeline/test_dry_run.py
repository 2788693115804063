"""Computing the first batch twice, to see that its losses add up, changes nothing that is trained or seen."""

import random
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torchmetrics
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_multigpu import PipelineStrategy
from lightning_multigpu.strategies.pipeline import proof
from lightning_multigpu.strategies.pipeline.proof import Proof
from lightning_multigpu.strategies.steps.dry_run import without_trace
from tests.callbacks.training import RecordingLogger
from tests.strategies.pipeline.fitted import fitted
from tests.strategies.tasks import Case, Classifier, assert_trains_alike, make_trainer, train_loader
from tests.world import World


class Traced(Classifier):
    """Its step leaves as many traces as a step can; what is in front of the layers runs on every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.dropout = nn.Dropout(0.3)
        self.train_accuracy = torchmetrics.classification.MulticlassAccuracy(3, average="micro")
        self.collected: list[float] = []
        self.steps = 0
        self.draws: list[float] = []
        self.modes: set[bool] = set()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.steps += 1
        self.collected.append(float(x.sum()))
        self.modes.add(self.layers[0].training)
        x.mul_(0.5)  # the loader's own batch
        np.random.rand()
        if not self.layers[0].training:
            self.log("in_evaluation_mode", 1.0)
        self.logger.log_metrics({"direct": float(len(y))})  # type: ignore[union-attr]
        self.trainer.should_stop = False
        logits = self.layers(self.dropout(self.norm(x)))
        self.train_accuracy(logits, y)
        loss = nn.functional.cross_entropy(logits, y)
        if self.current_epoch == 1 and batch_idx == 1:  # in the middle of an accumulation the check comes again
            loss = loss + 0.1 * logits.square().mean()
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("train_accuracy", self.train_accuracy, on_step=False, on_epoch=True)
        return loss

    def on_train_end(self) -> None:
        self.recorded = self.trainer.strategy.stage_record()

    def on_train_batch_end(self, *args: Any) -> None:
        self.draws += [float(torch.rand(())), random.random(), float(np.random.rand())]


def trace(verify_steps: int, schedule: Any) -> dict[str, Any]:
    case = Case(max_epochs=2, num_samples=20, trainer={"accumulate_grad_batches": 2})
    module, logger = Traced(), RecordingLogger()
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    strategy = PipelineStrategy(num_micro_batches=2, schedule=schedule, verify_steps=verify_steps)
    trainer = make_trainer(case, strategy, 2, logger=logger, num_sanity_val_steps=0, log_every_n_steps=1)
    strategy.record_stages()
    trainer.fit(module, train_loader(case, 1), train_loader(case, 1))
    strategy.meter.flush()
    return {
        "state": {name: value.tolist() for name, value in module.state_dict().items()},
        "steps": module.steps,
        "collected": module.collected,
        "modes": module.modes,
        "draws": module.draws,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "logged": [{name: v for name, v in metrics.items() if name != "epoch"} for _, metrics in logger.rows],
        "recorded": [step.num_micro_batches for step in module.recorded.steps],
        "sent": [(t.operation, t.group, t.size_bytes) for step in strategy.meter.steps for t in step.operations],
    }


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_the_checks_of_a_batch_leave_no_trace(schedule: str, world2: World) -> None:
    """Neither that of the first batch, nor that of one whose loss has a new term, after gradients of an earlier."""
    checked, unchecked = world2.run(trace, 2, schedule), world2.run(trace, 0, schedule)
    for mine, other in zip(checked, unchecked, strict=True):
        for what, value in other.items():
            assert mine[what] == value, what
    stages = 1 if schedule == "1f1b" else 2
    assert checked[0]["steps"] == 12 * stages, "twice three batches in two micro-batches each"
    assert checked[0]["modes"] == {True}


def weigh(lack: str) -> tuple[int, int]:
    """Whether this rank has computed steps on the whole module, and the bytes of its values when training has ended."""
    whole: list[Tensor] = []
    own = Proof._compute

    def noted(self: Proof) -> str:
        whole.extend(
            p for p in self._module.parameters() if not any(p is h.tensor for h in self._model.ownership.holdings)
        )
        return own(self)

    lacks = mock.patch.object(proof, "lack_of_memory", return_value=lack)
    with lacks, mock.patch.object(Proof, "_compute", noted):
        fitted(Classifier)
    return len(whole), sum(tensor.untyped_storage().nbytes() for tensor in whole)


def test_the_whole_module_of_a_proof_is_freed_at_once(world2: World) -> None:
    """Cycles kept it until Python's garbage collector ran: on a GPU, a whole model beside a stage, for many steps."""
    (last, last_bytes), other = world2.run(weigh, "")
    assert (last > 0, last_bytes, other) == (True, 0, (0, 0))
    assert world2.run(weigh, "it would take 2 GB of 1 GB") == [(0, 0), (0, 0)]
    assert "those of one device is not proved: it would take 2 GB of 1 GB." in world2.output(0)


class Reentrant(Classifier):
    """Its step computes what is behind the layers again in backward, in the way that forbids torch.autograd.grad."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch

        def head(logits: Tensor) -> Tensor:
            return nn.functional.cross_entropy(logits.tanh().sin(), y)

        return checkpoint(head, self.layers(x), use_reentrant=True)  # type: ignore[no-any-return,no-untyped-call]


def test_a_step_that_recomputes_with_reentrant_checkpoints_trains(world2: World) -> None:
    case = Case(max_epochs=1, strategy={"num_micro_batches": 4})
    assert_trains_alike(world2, Reentrant, "pipeline_interleaved", case)


class TwoHeads(Classifier):
    """Its last layers give a pair, but only in training, as models with auxiliary classifiers do."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.layers(x)
        outputs = (logits, logits) if self.training else logits[0, 0]
        first, second = outputs
        return nn.functional.cross_entropy(first, y) + 0.3 * nn.functional.cross_entropy(second, y)


def test_a_step_that_works_in_training_mode_only_trains(world2: World) -> None:
    assert [result["steps"] for result in world2.run(fitted, TwoHeads)] == [7, 7]


def draw_and_fail() -> None:
    torch.rand(1), random.random()
    raise RuntimeError("a step fails")


def test_a_dry_run_that_raises_an_error_leaves_random_states_as_they_were() -> None:
    """A trial of split layers that failed on one rank left it with other random numbers in the first step."""
    module = Classifier()
    module.trainer = make_trainer(Case(), "auto", 1)
    before = torch.get_rng_state(), random.getstate()
    with pytest.raises(RuntimeError, match="a step fails"), without_trace(module):
        draw_and_fail()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]
