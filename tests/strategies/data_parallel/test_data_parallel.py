"""dp: one process drives several devices. What it must compute is in the tests of every strategy; here is the rest."""

import signal
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_multigpu import DataParallelStrategy
from lightning_multigpu.callbacks import CommunicationMonitor, RunReport, ThroughputMonitor
from tests.modules import Normalised, TwoOptimizers
from tests.strategies.tasks import Case, Classifier, assert_same_weights, dataset, eval_loader, make_trainer, state

IGNORED = dataset(18).tensors[0][2:7, 0]  # the first feature of those samples


def train(module: L.LightningModule, devices: int, **options: Any) -> L.Trainer:
    """Trains on 18 samples: batches of 7, 7 and 4; with 3 devices of parts of 3, 2 and 2, and 2, 1 and 1."""
    strategy = options.pop("strategy", None) or (DataParallelStrategy() if devices > 1 else "auto")
    loader = DataLoader(dataset(18), batch_size=7)
    trainer = make_trainer(Case(max_epochs=2), strategy, devices, **options)
    trainer.fit(module, loader)
    return trainer


def assert_replicas_train_alike(
    make_module: Callable[[], L.LightningModule], devices: int = 3, *, strategy: Any = None, **options: Any
) -> Any:
    """The module trains on several devices as on one; the trained modules, that of one device first."""
    alone, replicated = make_module(), make_module()
    train(alone, 1, **options)
    train(replicated, devices, strategy=strategy, **options)
    assert_same_weights({"weights": state(replicated)}, {"weights": state(alone)})
    return alone, replicated


class _Summed(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1], reduction="sum")
        self.log("loss", loss, on_epoch=True)
        return loss


class _Ignoring(Classifier):
    """Two samples of the first batch count, both on the first device: losses and gradients of the others are NaN."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        counts = ignored(batch) != -100
        loss = (nn.functional.cross_entropy(self(batch[0]), batch[1], reduction="none") * counts).sum() / counts.sum()
        self.log("loss", loss, on_epoch=True)
        return loss


def ignored(batch: Any) -> Tensor:
    x, y = batch
    return torch.where((x[:, :1] == IGNORED.to(x)).any(1), -100, y)


def counted(batch: Any) -> float:
    return float((ignored(batch) != -100).sum())


def test_loss_reduction() -> None:
    for module, reduction in ((_Summed, "sum"), (_Ignoring, counted)):
        alone, replicated = assert_replicas_train_alike(module, strategy=DataParallelStrategy(loss_reduction=reduction))
        expected, logged = (float(each.trainer.callback_metrics["loss_epoch"]) for each in (alone, replicated))
        assert logged == pytest.approx(expected, rel=1e-9)


class _Unusual(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.recurrent = nn.LSTM(6, 5, batch_first=True)
        self.first = nn.Linear(5, 5, bias=False)
        self.second = nn.Linear(5, 5, bias=False)
        self.second.weight = self.first.weight
        self.late = nn.Linear(5, 3)
        self.register_buffer("scale", torch.ones(1))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
        self.late.requires_grad_(False)
        self.hooked: list[Tensor] = []
        self.accumulated = 0
        self.first.weight.register_hook(self._clip)
        self.first.weight.register_post_accumulate_grad_hook(self._count)
        self.second.register_forward_hook(self._keep)
        self.end = self._end
        self.factor = 1.0

    def _clip(self, gradient: Tensor) -> Tensor:
        self.hooked.append(gradient.clone())
        return gradient.clamp(-0.01, 0.01)

    def _keep(self, layer: nn.Module, inputs: Any, output: Tensor) -> None:
        self.of_hook[0] = output

    def _count(self, parameter: Tensor) -> None:
        self.accumulated += 1

    def _end(self, x: Tensor) -> Tensor:
        return self.late(x) * self.scale * self.factor  # type: ignore[no-any-return]

    def on_train_epoch_start(self) -> None:
        self.late.requires_grad_(self.current_epoch > 0)
        self.factor = 1.0 + self.current_epoch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = self.recurrent(batch[0].unsqueeze(1))
        self.of_hook = [x]
        logits = self.end(self.second(torch.tanh(self.first(x[:, 0]))))
        logits = logits + self.of_hook[0].mean(1, keepdim=True)
        # Over the module's own parameters: in a replica they are the replica's.
        penalty = sum((parameter**2).sum() for parameter in self.parameters())
        return nn.functional.cross_entropy(logits, batch[1]) + 0.01 * penalty

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def test_unusual_modules() -> None:
    alone, replicated = assert_replicas_train_alike(_Unusual)
    assert replicated.accumulated == alone.accumulated == 6
    for found, expected in zip(replicated.hooked, alone.hooked, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


class _Metrics(Classifier):
    """Metrics as they are used: alone, in a collection whose metrics share states, over all predictions."""

    def __init__(self) -> None:
        super().__init__()
        options = {"num_classes": 3, "average": "macro"}
        self.both = torchmetrics.MetricCollection(
            {
                "precision": torchmetrics.classification.MulticlassPrecision(**options),
                "recall": torchmetrics.classification.MulticlassRecall(**options),
            }
        )
        self.area = torchmetrics.classification.MulticlassAUROC(3)
        self.values = torchmetrics.CatMetric()
        self.highest = torchmetrics.MaxMetric()
        self.order: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.accuracy(logits, y)
        self.both(logits, y)
        self.area.update(logits.softmax(-1), y)
        self.values.update(x[:, 0])
        self.highest(x[:, 1].max())
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.log_dict(self.both, on_step=False, on_epoch=True)
        self.log("area", self.area, on_step=False, on_epoch=True)
        self.log("highest", self.highest, on_step=False, on_epoch=True)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.log("samples", float(len(y)), on_step=True, on_epoch=True, reduce_fx="sum")
        self.log("largest", x.max(), on_epoch=True, reduce_fx="max")
        self.log("of two", x[:2].mean(), on_epoch=True, batch_size=min(2, len(y)))
        return {"loss": loss, "first": x[:, 0], "mean": x.mean(), "names": [f"{value:.9f}" for value in x[:, 0]]}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        torch.testing.assert_close(outputs["first"], batch[0][:, 0])
        torch.testing.assert_close(outputs["mean"], batch[0].mean())
        assert outputs["names"] == [f"{value:.9f}" for value in batch[0][:, 0]]

    def on_train_epoch_end(self) -> None:
        self.order = self.values.compute().tolist()
        self.values.reset()


@pytest.mark.filterwarnings("ignore:No positive samples in targets")
def test_logs_metrics_and_outputs_are_those_of_the_batch() -> None:
    alone, replicated = assert_replicas_train_alike(_Metrics)
    assert replicated.order == alone.order == pytest.approx(dataset(18).tensors[0][:, 0].tolist())
    expected = {name: float(value) for name, value in alone.trainer.callback_metrics.items() if "of two" not in name}
    found = {name: float(value) for name, value in replicated.trainer.callback_metrics.items() if "of two" not in name}
    assert found == pytest.approx(expected, rel=1e-9)
    # Each replica logs the mean over two of its samples or, in parts of one sample, over that one.
    x = dataset(18).tensors[0].double()
    parts = [(0, 2), (3, 5), (5, 7), (7, 9), (10, 12), (12, 14), (14, 16), (16, 17), (17, 18)]
    sums, counts = [sum(x[a:b].mean() * (b - a) for a, b in parts)], [sum(b - a for a, b in parts)]
    assert float(replicated.trainer.callback_metrics["of two_epoch"]) == pytest.approx(float(sums[0]) / counts[0])


class _Smooths(Classifier):
    """Keeps the mean of its last losses, by a metric that it updates in the step or after it."""

    def __init__(self, *, in_step: bool) -> None:
        super().__init__()
        self.in_step = in_step
        self.recent = torchmetrics.RunningMean(window=2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.in_step:
            self.recent(loss.detach())
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if not self.in_step:
            self.recent(outputs["loss"].detach())


def test_a_metric_that_cannot_be_merged_may_be_updated_after_the_step() -> None:
    alone, replicated = assert_replicas_train_alike(partial(_Smooths, in_step=False), 2)
    assert float(replicated.recent.compute()) == pytest.approx(float(alone.recent.compute()), rel=1e-6)


class _Evaluated(Classifier):
    is_inference = True

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        assert torch.is_inference_mode_enabled() == self.is_inference
        assert not torch.is_grad_enabled()
        super().validation_step(batch, batch_idx)
        return {"count": torch.tensor(len(batch[1])), "mean": float(batch[0].mean())}

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["count"] == len(batch[1])
        assert outputs["mean"] == pytest.approx(float(batch[0].mean()), rel=1e-6)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[0][:, 0], [str(float(value)) for value in batch[0][:, 0]]


def predicted(strategy: Any, devices: int) -> list[Any]:
    found: Any = make_trainer(Case(), strategy, devices).predict(_Evaluated(), eval_loader(21, 8))
    return [(numbers.tolist(), texts) for numbers, texts in found]


def test_outputs_of_evaluation_are_in_the_order_of_the_samples() -> None:
    assert predicted(DataParallelStrategy(), 3) == predicted("auto", 1)


@pytest.mark.parametrize("inference_mode", [False, True])
def test_threads_are_in_the_modes_of_evaluation(inference_mode: bool) -> None:
    trainer = make_trainer(Case(), DataParallelStrategy(), 3, inference_mode=inference_mode)
    module = _Evaluated()
    module.is_inference = inference_mode
    trainer.validate(module, eval_loader(21, 8), verbose=False)


class _Mixed(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert self(batch[0]).dtype == torch.bfloat16, threading.current_thread().name
        return super().training_step(batch, batch_idx)


def test_threads_are_in_autocast() -> None:
    train(_Mixed(), 3, precision="bf16-mixed")


def test_batch_norm_keeps_the_statistics_of_the_first_replicas_part() -> None:
    module = Normalised(momentum=None)  # the mean over all batches
    train(module, 2, max_epochs=1)
    x = dataset(18).tensors[0].double()
    expected = torch.stack([x[0:4].mean(0), x[7:11].mean(0), x[14:16].mean(0)]).mean(0)
    torch.testing.assert_close(module.normalise.running_mean, expected)
    assert module.normalise.num_batches_tracked == 3


class _Keeping(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.last = batch[0][0]
        return super().training_step(batch, batch_idx)


def test_attributes_that_a_step_sets_are_the_first_replicas() -> None:
    module = _Keeping()
    train(module, 2)
    assert torch.equal(module.last, dataset(18).tensors[0][14].double())


class _SkipsParts(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if len(batch[1]) == 3 else super().training_step(batch, batch_idx)


class _LeavesOut(Classifier):
    """Logs the loss of each batch, and leaves every third batch out."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 3 == 1 else loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Sees no loss."""


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("accumulate", [1, 2])
def test_logs_of_a_batch_that_is_left_out(accumulate: int) -> None:
    """They were lost, and the epoch's mean was that of the other batches."""
    alone, replicated = assert_replicas_train_alike(_LeavesOut, accumulate_grad_batches=accumulate)
    torch.testing.assert_close(replicated.trainer.callback_metrics, alone.trainer.callback_metrics)


class _Remembers(nn.Module):
    """Keeps its input for a moment, which another thread must not replace."""

    def forward(self, x: Tensor) -> Tensor:
        self.kept = x
        time.sleep(0.005)
        return self.kept * 2


class _HasPlainList(Classifier):
    """Keeps a module in a plain list, as one does to leave its weights out of checkpoints, and its own layers again."""

    def __init__(self) -> None:
        super().__init__()
        self.kept = {"parts": [_Remembers(), self.first]}

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + self.kept["parts"][1](self.kept["parts"][0](x))[:, :6])


def test_modules_in_a_plain_list() -> None:
    """Threads shared them, and one thread's input replaced that of another."""
    assert_replicas_train_alike(_HasPlainList, 2)


class _UserError(Exception):
    pass


class _Failing(Classifier):
    """Fails in the forward, or in the backward, of the part with the sample of a value."""

    def __init__(self, in_backward: bool, sample: int) -> None:
        super().__init__()
        self.in_backward, self.value = in_backward, float(dataset(18).tensors[0][sample, 0])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if (batch[0][:, 0] == self.value).any():
            if not self.in_backward:
                self.fails()
            loss.register_hook(self.fails)
        return loss

    def fails(self, *args: Any) -> None:
        raise _UserError("of the user")


@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize(("sample", "replica"), [(7, 0), (13, 2)])
def test_a_failure_of_a_replica_is_raised_as_it_is(in_backward: bool, sample: int, replica: int) -> None:
    with pytest.raises(_UserError, match=r"^of the user") as caught:
        train(_Failing(in_backward, sample), 3)
    what = "backward" if in_backward else "training_step"
    assert caught.value.__notes__ == [f"in {what} of replica {replica} of 3, on cpu"]
    assert "self.fails" in "".join(traceback.format_tb(caught.value.__traceback__)) or in_backward
    assert "in fails" in "".join(traceback.format_tb(caught.value.__traceback__))


class _Recomputing(Classifier):
    """Its first layer, with dropout, runs under ``torch.utils.checkpoint``."""

    def forward(self, x: Tensor) -> Tensor:
        first = nn.Sequential(self.first, nn.Dropout(0.1))
        return self.layers[1:](checkpoint(first, x, use_reentrant=False))  # type: ignore[no-any-return, no-untyped-call]


class _SetUp(Classifier):
    """Its first batch sets a bias, behind the back of torch's counters of changes."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.first.bias.any():
            self.first.bias.data.copy_(-self.first(x).mean(0))
        return super().forward(x)

    def on_fit_start(self) -> None:
        self.first.bias.data.zero_()


class _Forward(Classifier):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.jvp(self.layers, (x,), (x,))[1]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("signum", "sample", "status"),
    [(signal.SIGINT, 7, 1), (signal.SIGINT, 13, 1), (signal.SIGTERM, 7, 128 + signal.SIGTERM)],
    ids=["Ctrl-C in the main thread", "Ctrl-C while it waits", "SIGTERM"],
)
def test_signals_end_the_program(signum: signal.Signals, sample: int, status: int) -> None:
    """After SIGTERM it ended with status 0, as if it had trained to the end."""

    class Signalled(_Failing):
        def fails(self, *args: Any) -> None:
            signal.raise_signal(signum)

    with pytest.raises(SystemExit) as ended:
        train(Signalled(False, sample), 3)
    assert ended.value.code == status
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("replica")]


LISTED: Any = [{"x": torch.zeros(index + 1), "name": "n"} for index in range(4)]  # no collate function stacks these


@pytest.mark.parametrize(
    ("collate", "message"),
    [
        (list, r"the batch is a list of 4 samples \(dict each\).*cut into parts along.*under dp devices=1"),
        (lambda samples: [each["name"] for each in samples], "the batch is a list without a tensor: dp cannot cut it"),
    ],
)
def test_batches_that_cannot_be_cut(collate: Any, message: str) -> None:
    loader = DataLoader(LISTED, batch_size=4, collate_fn=collate)
    with pytest.raises(ValueError, match=message):
        make_trainer(Case(), DataParallelStrategy(), 2).fit(Classifier(), loader)


class _Started(LightningEnvironment):
    creates_processes_externally = True

    def world_size(self) -> int:
        return 2


def _correlates() -> L.LightningModule:
    module = Classifier()
    module.correlation = torchmetrics.PearsonCorrCoef()
    return module


RING = "strategy='ring_ddp'"
REFUSED: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (Classifier, {"num_nodes": 2}, ValueError, f"num_nodes=2: dp is one process.*pass num_nodes=1, or {RING}"),
    (Classifier, {"sync_batchnorm": True}, ValueError, "sync_batchnorm=True: under dp .*sync_batchnorm=False, or"),
    (Classifier, {"plugins": [_Started()]}, ValueError, "_Started has started 2 processes, and dp is one process"),
    (TwoOptimizers, {}, ValueError, f"automatic_optimization=False: under dp each replica .*, or {RING}"),
    (
        lambda: torch.compile(Classifier(), backend="eager"),
        {},
        ValueError,
        "the module is compiled, for the tensors of one device; pass the module without torch.compile",
    ),
    # They drew other numbers in backward, and gradients were wrong.
    (_Recomputing, {}, RuntimeError, f"the step draws random numbers from .*{RING}"),
    # A replica's part of the first batch set the layer up, in silence.
    (_SetUp, {}, ValueError, r"training_step changes layers\.0\.bias: under dp each replica has a part of the batch"),
    (_Forward, {}, RuntimeError, f"forward-mode derivatives .* under dp: .* Use {RING}"),
    (_SkipsParts, {}, ValueError, "training_step returns no loss on replica 1 of 2, and a loss on the others"),
    # A running mean had the values of the first replica alone.
    (_correlates, {}, ValueError, r"PearsonCorrCoef cannot be merged .* its state 'mean_x' has dist_reduce_fx"),
    (partial(_Smooths, in_step=True), {}, ValueError, r"RunningMean cannot be merged .* it counts each update"),
]


@pytest.mark.filterwarnings("ignore:You passed `Trainer")
@pytest.mark.parametrize(("module", "options", "error", "message"), REFUSED, ids=[words[:30] for *_, words in REFUSED])
def test_refused(module: Any, options: dict[str, Any], error: type[Exception], message: str) -> None:
    threads = threading.active_count()
    with pytest.raises(error, match=message):
        train(module(), 2, **options)
    assert threading.active_count() == threads


def test_the_order_of_the_loader_is_kept_and_the_threads_intra_op_threads_are_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: set[int] = set()
    module, before = Classifier(), torch.get_num_threads()
    module.first.register_forward_hook(lambda *_: seen.add(torch.get_num_threads()))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    torch.set_num_threads(4)
    try:
        trainer = train(module, 2)
        assert torch.get_num_threads() == 4
    finally:
        torch.set_num_threads(before)
    assert seen == {2}
    assert isinstance(trainer.train_dataloader.sampler, torch.utils.data.SequentialSampler)


def test_the_share_of_peak_flops_is_that_of_all_devices() -> None:
    monitor = ThroughputMonitor(flops_per_sample=10.0, peak_flops=5.0)
    metrics = train(Classifier(), 3, callbacks=[monitor], log_every_n_steps=1).callback_metrics
    shares = metrics["throughput/samples_per_sec"] * 10.0 / (3 * 5.0)
    assert float(metrics["throughput/mfu"]) == pytest.approx(float(shares))


def test_what_travels_is_measured(caplog: pytest.LogCaptureFixture, tmp_path: Any) -> None:
    module = Normalised()
    report = RunReport(print_table=False)
    trainer = train(module, 2, callbacks=[CommunicationMonitor(log=False), report], default_root_dir=str(tmp_path))
    assert "Global batch: 7 samples a step (data ranks: 1 x 7); dp cuts each batch" in caplog.text
    strategy: Any = trainer.strategy
    buffers = 6 * 8 + 6 * 8 + 8  # of BatchNorm: mean, variance, number of batches
    gradients = sum(parameter.nbytes for parameter in module.parameters())
    held = strategy.held_bytes()
    assert held.parameters_bytes == held.gradients_bytes == gradients
    for step in strategy.meter.steps:
        for operation, size in (("broadcast", buffers), ("reduce", gradients)):
            [totals] = step.of(operation, "devices")
            assert (totals.size_bytes, totals.group_size, totals.exposed_s) == (size, 2, totals.total_s)
    assert report.report is not None
    assert {"model to the devices", "batches to the devices", "sum of gradients"} == set(
        report.report["communication_ms"]
    )
