"""RunReport(compare_with_one_device=True): whether the ranks were worth it, without changing what they train."""

from __future__ import annotations

import random
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_multigpu import PipelineStrategy
from lightning_multigpu.callbacks import CommunicationMonitor, RunReport
from lightning_multigpu.callbacks.probes import usable_cores
from lightning_multigpu.callbacks.profile.one_device import NUM_STEPS, Alone, OneDevice
from lightning_multigpu.report.document import RunDocument
from lightning_multigpu.report.run_table import one_device_line
from lightning_multigpu.report.schema import from_json
from tests.callbacks.training import batches, trainer
from tests.report.examples import record, report_of
from tests.report.shape import assert_follows_schema
from tests.strategies.pipeline.test_dry_run import Counting, Traced
from tests.strategies.tasks import Case, Classifier, make_trainer, train_loader
from tests.world import World

STEPS: list[tuple[int, float]] = []
"""Threads and loss of each call of a step in this process, on the module and on copies of it."""

_MEMORY = "communication/memory_bytes"


class Plain(Traced):
    def on_train_end(self) -> None:
        """Asks for nothing that Lightning's own strategies lack."""


class Gathering(Traced):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        # The other ranks do not take part when the copy asks for it.
        self.all_gather(loss.detach())
        self.train_accuracy.compute()
        return loss


def train(compares: bool, strategy: str) -> dict[str, Any]:
    case = Case(optimizer="adamw", max_epochs=2, num_samples=20, trainer={"accumulate_grad_batches": 2})
    logger, report = Counting(), RunReport(print_table=False, write_file=False, compare_with_one_device=compares)
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(3)
    module = {"ring_ddp": Gathering, "ddp": Plain, "pipeline": Traced}[strategy]()
    module.optimizer_name = case.optimizer
    callbacks = [report, CommunicationMonitor()] if strategy != "ddp" else [report]
    made = PipelineStrategy(num_micro_batches=2) if strategy == "pipeline" else strategy
    fit = make_trainer(case, made, 2, logger=logger, callbacks=callbacks, log_every_n_steps=1)
    loader = train_loader(case, fit)
    fit.fit(module, loader)
    assert report.report is not None
    assert_follows_schema(report.report)
    # Only the first log waits for transfers that are under way; later ones leave them to the next.
    sent = [row["communication/sent_bytes"] for row in logger.metrics if "communication/sent_bytes" in row]
    depend_on_time = ("_ms", "_sec", "sent_bytes", "memory_bytes")
    return {
        "weights and buffers": {name: value.tolist() for name, value in module.state_dict().items()},
        "optimizer": repr(fit.optimizers[0].state_dict()),
        "random numbers": [*module.draws, float(torch.rand(())), random.random(), float(np.random.rand())],
        "batches": module.collected,
        "calls": module.steps,
        "threads": torch.get_num_threads(),
        "logged": [{name: v for name, v in row.items() if not name.endswith(depend_on_time)} for row in logger.metrics],
        "sent": sent[:1],
        "through memory": [row[_MEMORY] for row in logger.metrics if _MEMORY in row][:1],
        "one_device": report.report.get("one_device"),
    }


@pytest.mark.filterwarnings("ignore:communication is not measured", "ignore:It is recommended to use")
@pytest.mark.parametrize("strategy", ["ring_ddp", "ddp", "pipeline"])
def test_the_run_trains_to_the_bit_as_without_the_comparison(world2: World, strategy: str) -> None:
    without, compared = world2.run(train, False, strategy), world2.run(train, True, strategy)
    for mine, other in zip(without, compared, strict=True):
        assert mine.pop("one_device") is None
        found = other.pop("one_device")
        assert found["ratio"] > 0, found
        assert found["threads"] == min(usable_cores(), 2)
        for what, value in mine.items():
            assert other[what] == value, what


class Watched(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if not hasattr(loss, "source"):  # a placeholder, on a stage that has no loss
            STEPS.append((torch.get_num_threads(), float(loss.detach())))
        return loss


def watch(strategy: str) -> tuple[list[tuple[int, float]], dict[str, Any]]:
    STEPS.clear()
    case = Case(max_epochs=1, num_samples=16)
    report = RunReport(print_table=False, write_file=False, compare_with_one_device=True)
    pipeline = PipelineStrategy(num_micro_batches=1, verify_steps=0)
    fit = make_trainer(case, pipeline if strategy == "pipeline" else strategy, 2, callbacks=[report])
    fit.fit(Watched(), train_loader(case, fit))
    assert report.report is not None
    return list(STEPS), report.report["one_device"]


@pytest.mark.parametrize("strategy", ["ring_ddp", "pipeline"])
def test_rank_0_alone_trains_the_whole_model_from_the_values_of_the_run(world2: World, strategy: str) -> None:
    (first, found), (other, _) = world2.run(watch, strategy)
    assert "reason" not in found, found
    alone, run = first[: 1 + NUM_STEPS], first[1 + NUM_STEPS :]
    assert [threads for threads, _ in alone] == [min(usable_cores(), 2)] * (1 + NUM_STEPS)
    assert all(threads == 1 for threads, _ in run + other)
    losses = [loss for _, loss in alone]
    assert losses[0] == pytest.approx(run[0][1], rel=1e-9)
    assert losses == sorted(losses, reverse=True), "the copy trains"
    assert len(set(losses)) == len(losses)


class Locked(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()  # cannot be copied


def test_where_there_is_no_figure_one_line_says_why(world2: World) -> None:
    def reason(module: type[LightningModule]) -> str:
        case = Case(max_epochs=1, num_samples=16)
        report = RunReport(print_table=False, write_file=False, compare_with_one_device=True)
        fit = make_trainer(case, "ring_ddp", 2, callbacks=[report])
        fit.fit(module(), train_loader(case, fit))
        assert report.report is not None
        assert report.report["steps"] == 2
        return one_device_line(from_json(RunDocument, report.report))

    assert set(world2.run(reason, Locked)) == {
        "no comparison with one device: a copy of the model does not train on one device: TypeError: cannot pickle "
        "'_thread.lock' object"
    }


def test_a_run_of_one_rank_has_nothing_to_compare_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tests.callbacks.training import Regression

    report = RunReport(compare_with_one_device=True)
    trainer(tmp_path, callbacks=[report]).fit(Regression(), batches(8))
    assert "no comparison with one device: the run has one rank" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("step_ms", "medians_ms", "num_batches", "expected"),
    [
        (14.0, [19.0, 20.0], 2, "2 ranks train 1.4 x as many samples as one device would (measured on"),
        (14.0, [19.0, 28.0], 2, "2 ranks train 1 x as many samples as one device would (measured on"),
        (14.0, [20.0, 20.0], 1, "2 ranks train 0.7 x as many samples as one device would: slower than one device ("),
    ],
    ids=["faster", "the slowest rank counts", "a pipeline trains one batch at once"],
)
def test_the_line_says_it_in_plain_sight(
    tmp_path: Path, step_ms: float, medians_ms: list[float], num_batches: int, expected: str
) -> None:
    comparison = OneDevice(trainer(tmp_path))
    comparison._alone = Alone(step_ms / 1e3, 2)
    section = comparison.comparison([ms / 1e3 for ms in medians_ms], num_batches)
    line = one_device_line(replace(from_json(RunDocument, report_of(record(0), record(1))), one_device=section))
    assert line.startswith(expected)
    assert line.endswith("without loading; one device with 2 intra-op threads)")
