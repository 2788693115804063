"""ThroughputMonitor in real fits of one device, on a clock that the fit moves: exact rates."""

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_multigpu.callbacks import ThroughputMonitor
from lightning_multigpu.planning.pipelines.timeline import NOTHING
from lightning_multigpu.strategies.run_view import RunView
from tests.callbacks.training import (
    BATCH_S,
    FEATURES,
    HandClock,
    RecordingLogger,
    Regression,
    batch_list,
    batches,
    trainer,
)
from tests.fake_gpu import DEVICE, FakeGPU
from tests.strategies.tasks import IS_LIGHTNING_2_5

SAMPLES = "throughput/samples_per_sec"
BATCHES = "throughput/batches_per_sec"
STEP = "throughput/step_ms"


@pytest.fixture
def logger() -> RecordingLogger:
    return RecordingLogger()


def test_batches_of_any_size_count(tmp_path: Path, clock: HandClock, logger: RecordingLogger) -> None:
    monitor = ThroughputMonitor()
    fit = trainer(tmp_path, callbacks=[monitor], logger=logger, log_every_n_steps=2)
    fit.fit(Regression(clock), batch_list([8, 4, 2, 2, 1]))
    assert logger.curve(SAMPLES) == [(1, 12 / (2 * BATCH_S)), (3, 4 / (2 * BATCH_S)), (4, 1 / BATCH_S)]
    assert logger.curve(BATCHES) == [(1, 1 / BATCH_S), (3, 1 / BATCH_S), (4, 1 / BATCH_S)]
    assert logger.curve(STEP) == [(1, 1e3 * BATCH_S), (3, 1e3 * BATCH_S), (4, 1e3 * BATCH_S)]
    assert monitor.steps == 5
    # The first step is left out of the statistics.
    assert monitor.statistics()[SAMPLES] == pytest.approx({"median": 4.0, "p95": 7.4, "mean": 4.5, "last": 2.0})


def test_a_step_is_all_of_its_accumulated_batches(tmp_path: Path, clock: HandClock, logger: RecordingLogger) -> None:
    monitor = ThroughputMonitor()
    fit = trainer(tmp_path, callbacks=[monitor], logger=logger, log_every_n_steps=1, accumulate_grad_batches=2)
    fit.fit(Regression(clock), batch_list([4, 2, 4, 2, 3]))
    assert logger.curve(SAMPLES) == [(0, 6 / (2 * BATCH_S)), (1, 6 / (2 * BATCH_S)), (2, 3 / BATCH_S)]
    assert logger.curve(STEP) == [(0, 2e3 * BATCH_S), (1, 2e3 * BATCH_S), (2, 1e3 * BATCH_S)]
    assert monitor.steps == 3


@pytest.mark.parametrize("accumulate", [1, 3])
def test_validation_is_not_charged(tmp_path: Path, clock: HandClock, logger: RecordingLogger, accumulate: int) -> None:
    monitor = ThroughputMonitor()
    options = {"log_every_n_steps": 100, "max_epochs": 2, "val_check_interval": 2, "num_sanity_val_steps": 1}
    fit = trainer(tmp_path, callbacks=[monitor], logger=logger, accumulate_grad_batches=accumulate, **options)
    fit.fit(Regression(clock), batches(24), [batches(8), batches(8)])
    rates = [value for _, value in logger.curve(SAMPLES)]
    assert rates == [4 / BATCH_S] * len(rates)
    assert monitor.statistics()[SAMPLES]["mean"] == pytest.approx(4 / BATCH_S)
    assert monitor.statistics()[STEP]["median"] == 1e3 * BATCH_S * accumulate


def test_a_checkpoint_can_follow_the_throughput_of_a_short_epoch(tmp_path: Path, clock: HandClock) -> None:
    checkpoint = ModelCheckpoint(tmp_path, monitor=SAMPLES, mode="max")
    fit = trainer(tmp_path, callbacks=[checkpoint, ThroughputMonitor()], enable_checkpointing=True)
    fit.fit(Regression(clock), batches(8), batches(4))
    assert checkpoint.best_model_score is not None
    assert checkpoint.best_model_score.item() == 4 / BATCH_S
    assert fit.callback_metrics[SAMPLES].dtype == torch.float64
    assert fit.logged_metrics[SAMPLES].item() == 4 / BATCH_S


def test_tokens_of_a_function(tmp_path: Path, clock: HandClock) -> None:
    made: list[Any] = [{"x": torch.ones(2, FEATURES), "length": 30}, {"x": torch.ones(2, FEATURES), "length": 50}]
    fit = trainer(tmp_path, callbacks=[ThroughputMonitor(tokens_fn=lambda batch: batch["length"])])
    fit.fit(Regression(clock), DataLoader(made, batch_size=None, collate_fn=lambda batch: batch))  # type: ignore[arg-type]
    assert fit.callback_metrics["throughput/tokens_per_sec"].item() == 80 / (2 * BATCH_S)


@pytest.mark.parametrize("flops", [100.0, None], ids=["a sample", "of the module"])
def test_operations_and_their_share_of_the_peak(tmp_path: Path, clock: HandClock, flops: Any) -> None:
    model, peak_flops = Regression(clock), 3200.0 if flops else None
    model.flops_per_batch = 400  # type: ignore[assignment]
    fit = trainer(tmp_path, callbacks=[ThroughputMonitor(flops_per_sample=flops, peak_flops=peak_flops)])
    fit.fit(model, batches(16))
    assert fit.callback_metrics["throughput/flops_per_sec"].item() == 400 / BATCH_S
    assert ("throughput/mfu" in fit.callback_metrics) is bool(flops), "nobody knows the peak of a CPU"
    assert not flops or fit.callback_metrics["throughput/mfu"].item() == 400 / BATCH_S / 3200


@pytest.mark.parametrize("option", ["flops_per_sample", "peak_flops"])
def test_what_must_be_above_zero(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option}=0: must be above 0"):
        ThroughputMonitor(**{option: 0})  # type: ignore[arg-type]


def test_a_batch_without_tensors_costs_the_samples_and_nothing_else(tmp_path: Path, clock: HandClock) -> None:
    class OfText(Regression):
        def loss(self, batch: Any) -> Tensor:
            return self.layer(torch.ones(1, FEATURES)).pow(2).mean()

    fit = trainer(tmp_path, callbacks=[ThroughputMonitor()])
    with pytest.warns(UserWarning, match=r"no tensor was found .* a str. Pass ThroughputMonitor\(batch_size_fn=...\)"):
        fit.fit(OfText(clock), DataLoader(["some", "text"], batch_size=None))  # type: ignore[arg-type]
    assert SAMPLES not in fit.callback_metrics
    assert fit.callback_metrics[BATCHES].item() == 1 / BATCH_S

    fit = trainer(tmp_path, callbacks=[ThroughputMonitor(batch_size_fn=len)])
    fit.fit(OfText(clock), DataLoader(["some", "text"], batch_size=None))  # type: ignore[arg-type]
    assert fit.callback_metrics[SAMPLES].item() == 4 / BATCH_S


def test_a_resumed_fit_measures_its_own_steps_and_goes_on_in_the_curve(
    tmp_path: Path, clock: HandClock, logger: RecordingLogger
) -> None:
    first = trainer(tmp_path)
    first.fit(Regression(clock), batches(12))
    first.save_checkpoint(tmp_path / "half.ckpt")
    monitor = ThroughputMonitor()
    second = trainer(tmp_path, callbacks=[monitor], logger=logger, log_every_n_steps=2, max_epochs=2)
    loading = {} if IS_LIGHTNING_2_5 else {"weights_only": False}
    second.fit(Regression(clock), batches(12), ckpt_path=tmp_path / "half.ckpt", **loading)
    assert monitor.steps == 3
    assert [step for step, _ in logger.curve(SAMPLES)] == [3, 5]


@pytest.mark.parametrize(
    "options",
    [{"fast_dev_run": 2}, {"max_time": timedelta(microseconds=1)}, {"log_every_n_steps": 0}],
    ids=["fast_dev_run", "max_time", "never log"],
)
def test_the_keys_are_there_however_short_the_fit(tmp_path: Path, clock: HandClock, options: dict[str, Any]) -> None:
    fit = trainer(tmp_path, callbacks=[ThroughputMonitor()], **options)
    fit.fit(Regression(clock), batches(16), batches(4))
    assert fit.callback_metrics[SAMPLES].item() == 4 / BATCH_S


def fake_fit(device: torch.device) -> Any:
    view = RunView(data_ranks=2, held_bytes=lambda: NOTHING)
    strategy = SimpleNamespace(root_device=device, run_view=lambda: view)
    return SimpleNamespace(strategy=strategy, world_size=8, global_step=0, lightning_module=None)


def test_the_peak_is_that_of_all_devices_that_work_on_a_batch(clock: HandClock) -> None:
    pipeline = fake_fit(torch.device("cpu"))
    monitor = ThroughputMonitor(flops_per_sample=1000.0, peak_flops=100.0, log=False)
    monitor.on_train_start(pipeline, Regression())
    monitor.on_train_batch_start(pipeline, Regression(), None, 0)
    clock.now_s += 2.0
    pipeline.global_step = 1
    monitor.collect(pipeline, Regression(), torch.ones(4, FEATURES))
    assert monitor.statistics()["throughput/flops_per_sec"]["last"] == 2000.0
    # 8 devices train on 2 batches, so 4 of them share this one.
    assert monitor.statistics()["throughput/mfu"]["last"] == 2000.0 / (4 * 100.0)


def test_a_device_behind_the_host_is_not_waited_for_until_an_interval_ends(fake_gpu: FakeGPU) -> None:
    monitor, fit = ThroughputMonitor(log=False), fake_fit(DEVICE)
    monitor.on_train_start(fit, Regression())
    monitor.on_train_batch_start(fit, Regression(), None, 0)
    fake_gpu.run(5.0)
    fit.global_step = 1
    monitor.collect(fit, Regression(), torch.ones(4, FEATURES))
    assert (monitor.series, fake_gpu.waits) == ({}, 0)
    monitor.settle()
    assert [*monitor.series[STEP].values] == [5000.0]
