"""RunReport in real fits: the file, the table, and the ways in which a fit can end."""

import platform
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_multigpu import RingDDPStrategy
from lightning_multigpu.callbacks import KEYS, ProfilerReport, RunReport, ThroughputMonitor
from lightning_multigpu.callbacks.monitor import keys_of
from lightning_multigpu.report.document import FILE_NAME, read
from lightning_multigpu.report.schema import as_json
from tests.callbacks.training import (
    BATCH_S,
    FEATURES,
    HandClock,
    RecordingLogger,
    Regression,
    batch_list,
    batches,
    hand_clock,
    trainer,
)
from tests.world import World, rank

SAMPLES = "throughput/samples_per_sec"


def test_alone_it_is_enough(tmp_path: Path, clock: HandClock, capsys: pytest.CaptureFixture[str]) -> None:
    report = RunReport()
    fit = trainer(tmp_path, callbacks=[report], log_every_n_steps=1)
    before = list(fit.callbacks)  # type: ignore[attr-defined]
    fit.fit(Regression(clock), batch_list([9, 4, 4, 2]))
    assert fit.callbacks == before  # type: ignore[attr-defined]
    assert fit.callback_metrics == {}, "it does not log"
    assert report.path == tmp_path / FILE_NAME
    found: Any = as_json(read(report.path))
    assert found == report.report
    assert found["strategy"] == {"name": "single_device", "options": {}}
    assert found["world"] == {"size": 1, "nodes": 1, "hosts": [platform.node()]}
    assert found["versions"]["torch"] == torch.__version__
    assert found["steps"] == 4
    metrics = found["aggregate"]["metrics"]
    assert metrics == found["ranks"][0]["metrics"]
    assert metrics.keys() <= KEYS.keys()
    assert metrics[SAMPLES] == pytest.approx({"median": 8.0, "p95": 8.0, "mean": 20 / 3, "last": 4.0})
    assert metrics["throughput/step_ms"]["median"] == 1e3 * BATCH_S
    assert 0 <= metrics["device/utilization_percent"]["mean"] <= 100
    # Nobody communicated, and nobody said how many tokens there are.
    assert not any(key.startswith("communication/") for key in metrics)
    assert "throughput/tokens_per_sec" not in metrics
    printed = capsys.readouterr().out
    assert "single_device: 1 rank on 1 node, 4 optimizer steps" in printed
    assert "\x1b" not in printed
    assert str(report.path) in printed


@pytest.mark.parametrize("options", [{"max_epochs": 2}, {"max_steps": 3, "val_check_interval": 1}])
def test_gradients_count_though_lightning_frees_them_before_a_validation(
    tmp_path: Path, options: dict[str, Any]
) -> None:
    """Ranks held 0 bytes of gradients in the report of any fit that ended with a validation."""
    report = RunReport()
    trainer(tmp_path, callbacks=[report], **options).fit(Regression(), batches(8), batches(2))
    assert report.report is not None
    [memory] = report.report["memory"]
    assert memory["gradients_bytes"] == memory["parameters_bytes"] > 0


class SlowCheckpoint(ModelCheckpoint):
    """A checkpoint after every second step, whose writing takes as long as ten batches."""

    def __init__(self, directory: Path, clock: HandClock) -> None:
        super().__init__(directory, every_n_train_steps=2, save_top_k=-1)
        self._clock = clock

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        self._clock.now_s += 10 * BATCH_S


def test_with_monitors_and_without_a_step_ends_before_its_checkpoint(tmp_path: Path, clock: HandClock) -> None:
    """Silent monitors came after checkpoints, and counted the writing for the step before."""
    found = []
    for own in ([], [ThroughputMonitor()]):
        report, checkpoint = RunReport(print_table=False), SlowCheckpoint(tmp_path, clock)
        fit = trainer(tmp_path, callbacks=[checkpoint, report, *own], enable_checkpointing=True)
        fit.fit(Regression(clock), batches(16))
        assert report.report is not None
        found.append(report.report["aggregate"]["metrics"]["throughput/step_ms"])
        assert fit.callbacks[-1] == checkpoint  # type: ignore[attr-defined]
    assert found[0] == found[1]
    assert found[0]["last"] == 1e3 * BATCH_S


def test_one_report_of_a_fit(tmp_path: Path) -> None:
    """A second profile took the first one's place in patches of torch: the fit ended in an AttributeError."""
    fit = trainer(tmp_path, callbacks=[RunReport(), ProfilerReport()])
    with pytest.raises(ValueError, match="RunReport, ProfilerReport in one Trainer"):
        fit.fit(Regression(), batches(16))


class Stopping(Regression):
    def on_train_batch_end(self, *args: Any) -> None:
        if self.global_step == 2:
            self.trainer.should_stop = True


@pytest.mark.parametrize(
    ("model", "options", "steps"),
    [
        (Regression, {"max_time": timedelta(microseconds=1)}, 1),
        (Regression, {"max_steps": 3, "max_epochs": -1}, 3),
        (Stopping, {}, 2),
        (Regression, {"callbacks": [EarlyStopping("val_loss", patience=1, min_delta=1e9)], "max_epochs": 9}, 8),
        (Regression, {"limit_train_batches": 0}, 0),
    ],
    ids=["max_time", "max_steps", "should_stop", "early stopping", "nothing to train on"],
)
def test_written_however_a_fit_ends_in_order(
    tmp_path: Path, model: type[Regression], options: dict[str, Any], steps: int
) -> None:
    callbacks = [*options.pop("callbacks", []), RunReport(print_table=False)]
    fit = trainer(tmp_path, callbacks=callbacks, **options)
    fit.fit(model(), batches(16), batches(4))
    assert read(tmp_path / FILE_NAME).steps == steps


def test_a_fit_that_fails_leaves_the_report_of_the_one_before(tmp_path: Path) -> None:
    class Failing(Regression):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            raise RuntimeError("broken")

    trainer(tmp_path, callbacks=[RunReport(print_table=False)]).fit(Regression(), batches(8))
    before = (tmp_path / FILE_NAME).read_bytes()
    report = RunReport()
    with pytest.raises(RuntimeError, match="broken"):
        trainer(tmp_path, callbacks=[report]).fit(Failing(), batches(8))
    assert (tmp_path / FILE_NAME).read_bytes() == before
    assert report.report is None


def test_fast_dev_run_prints_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trainer(tmp_path, callbacks=[RunReport()], fast_dev_run=True).fit(Regression(), batches(8))
    assert "1 optimizer step\n" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_does_not_fail_a_training_that_succeeded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr("lightning_multigpu.report.document.write_bytes", full)
    report = RunReport(print_table=False)
    with pytest.warns(UserWarning, match="was not written to .*: no space left on device"):
        trainer(tmp_path, callbacks=[report]).fit(Regression(), batches(8))
    assert report.path is None
    assert report.report is not None


def test_a_log_directory_elsewhere_is_refused_in_words(tmp_path: Path) -> None:
    class Remote(RecordingLogger):
        @property
        def save_dir(self) -> str:
            return "s3://bucket/logs"

    with pytest.warns(UserWarning, match="not written to s3://bucket/logs: the folder is not on this machine"):
        trainer(tmp_path, callbacks=[RunReport(print_table=False)], logger=Remote()).fit(Regression(), batches(8))


class OwnBatches(IterableDataset[Tensor]):
    def __init__(self, size: int, count: int = 6) -> None:
        self.size = size
        self.count = count

    def __iter__(self) -> Any:
        return (torch.ones(self.size, FEATURES) for _ in range(self.count))


@pytest.mark.filterwarnings("ignore:communication is not measured. DDPStrategy has no meter")
@pytest.mark.parametrize("strategy", ["ring_ddp", "ddp"])
def test_two_ranks_with_batches_of_different_size(world2: World, tmp_path: Path, strategy: str) -> None:
    def train() -> tuple[dict[str, Any] | None, dict[str, float]]:
        report = RunReport(print_table=False)
        with pytest.MonkeyPatch.context() as patch:
            clock = hand_clock(patch)
            monitors = [report, ThroughputMonitor()]
            fit = trainer(tmp_path, callbacks=monitors, strategy=strategy, devices=2, log_every_n_steps=2)
            fit.fit(Regression(clock), DataLoader(OwnBatches(4 + 2 * rank()), batch_size=None))
        return report.report, {key: value.item() for key, value in fit.callback_metrics.items()}

    (report, logged), (report_again, logged_again) = world2.run(train)
    assert report is not None
    assert report == report_again == as_json(read(tmp_path / FILE_NAME))
    assert logged == logged_again
    # 4 and 6 samples in half a second: the sum, and not one rank's figure times two.
    assert logged[SAMPLES] == (4 + 6) / BATCH_S
    assert logged["throughput/batches_per_sec"] == 2 / BATCH_S
    assert logged["throughput/step_ms"] == 1e3 * BATCH_S
    assert [entry["rank"] for entry in report["ranks"]] == [0, 1]
    assert [entry["metrics"][SAMPLES]["median"] for entry in report["ranks"]] == [4 / BATCH_S, 6 / BATCH_S]
    assert report["aggregate"]["metrics"][SAMPLES]["median"] == (4 + 6) / BATCH_S
    assert report["strategy"] == {"name": strategy, "options": {}}
    assert report["world"]["size"] == 2
    assert report["steps"] == 6
    communication = {key for key in keys_of("communication") if not key.startswith("parameter_server")}
    assert communication & set(report["aggregate"]["metrics"]) == (communication if strategy == "ring_ddp" else set())


@pytest.mark.filterwarnings("ignore:rank 1 has no more training batches")
def test_a_rank_that_only_repeats_a_batch_does_not_count(world2: World, tmp_path: Path) -> None:
    def train() -> tuple[int, int]:
        monitor = ThroughputMonitor()
        strategy = RingDDPStrategy(uneven_inputs="join")
        fit = trainer(tmp_path, callbacks=[monitor], strategy=strategy, devices=2)
        fit.fit(Regression(), DataLoader(OwnBatches(4, count=6 if rank() == 0 else 3), batch_size=None))
        return monitor.steps, len(monitor.series[SAMPLES])

    assert world2.run(train) == [(6, 6), (6, 3)]
