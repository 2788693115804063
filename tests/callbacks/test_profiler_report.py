"""ProfilerReport in real fits: runs that are made to have one fault each.

What takes time sleeps, much longer than anything else, so that a busy machine finds the same. How well the predicted
savings come true is measured by ``benchmarks/diagnosis.py``.
"""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.profilers import Profiler, PyTorchProfiler, SimpleProfiler
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_multigpu.callbacks import ProfilerReport
from lightning_multigpu.callbacks.profile.profiled_steps import ProfiledStep, Span, TimedTransfer, figures_of
from lightning_multigpu.callbacks.profile.profiled_window import _callbacks_s
from lightning_multigpu.callbacks.profile.traced_steps import launches_of, reads_of
from lightning_multigpu.communication.metering.meter import Meter
from lightning_multigpu.report import document
from lightning_multigpu.report.page import FILE_NAME, page
from lightning_multigpu.report.rank_figures import PHASES, LaunchQueue, ReadValues
from lightning_multigpu.report.schema import as_json
from lightning_multigpu.report.text import text
from tests.callbacks.training import trainer
from tests.strategies.tasks import make_strategy
from tests.world import World, rank

STEP_S = 0.1
HEALTHY_STEP_S = 0.4
"""A busy machine takes a core away for 10 ms at a time, which may not be 5 % of a step with nothing wrong."""
STEPS = 8
"""As many end the window and two steps behind it."""


class Samples(Dataset[Tensor]):
    def __init__(self, load_s: float = 0.0) -> None:
        self.load_s = load_s

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> Tensor:
        if self.load_s:
            time.sleep(self.load_s)
        return torch.full((4,), float(index % 5))


class Net(L.LightningModule):
    """A step sleeps for ``step_s``; ``fault`` makes it longer."""

    def __init__(self, fault: str = "", step_s: float = STEP_S) -> None:
        super().__init__()
        self.step_s = step_s
        self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)))
        self.fault = fault

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if self.step_s:  # a sleep of 0 s gives the core away
            time.sleep(self.step_s)
        if self.fault == "straggler" and rank() == 1:
            time.sleep(STEP_S)
        loss: Tensor = self.layers(batch).square().mean()
        if self.fault == "reads":
            for value in loss.expand(3):
                value.item()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def profiled(
    directory: Path,
    module: L.LightningModule,
    loader: Any,
    strategy: Any,
    *,
    trace: bool = False,
    activations: bool = False,
    beside: Sequence[Callback] = (),
    **options: Any,
) -> tuple[dict[str, Any] | None, bool]:
    """The report, and whether the Trainer's profiler is in its place again."""
    report = ProfilerReport(wait=2, active=3, trace=trace, activations=activations)
    ranks = 1 if strategy == "auto" else 2
    settings = {"max_steps": STEPS, "max_epochs": -1, "strategy": strategy, "devices": ranks, **options}
    fit = trainer(directory, callbacks=[*beside, report], **settings)
    profiler = fit.profiler  # type: ignore[attr-defined]
    fit.fit(module, loader)
    return report.report, fit.profiler is profiler  # type: ignore[attr-defined]


def run(world: World, directory: Path, fault: str = "", *, step_s: float = STEP_S) -> dict[str, Any]:
    def fit() -> tuple[dict[str, Any] | None, bool]:
        loader = DataLoader(Samples(STEP_S if fault == "input" else 0.0), batch_size=2)
        # A slow network: two messages of the ring in a step, and half of their time would be saved.
        ring = make_strategy("ring_ddp", shared_memory=fault != "communication")
        ring.meter = Meter(clock=lambda: time.perf_counter() + 1000.0 * rank())  # it begins anywhere
        with pytest.MonkeyPatch.context() as patch:
            if fault == "communication":
                send = dist.isend
                patch.setattr(dist, "isend", lambda *args, **kwargs: time.sleep(STEP_S) or send(*args, **kwargs))
            return profiled(directory, Net(fault, step_s), loader, ring)

    (report, same_profiler), (other, _) = world.run(fit)
    assert report is not None
    assert same_profiler
    assert other == report
    return report


@pytest.mark.parametrize("fault", ["input", "straggler", "communication"])
def test_the_fault_is_named_first(world2: World, tmp_path: Path, fault: str) -> None:
    report = run(world2, tmp_path, fault)
    first, *_ = report["profile"]["findings"]
    assert first["kind"] == fault, text(report)
    if fault == "communication":
        assert "accumulate_grad_batches=2" in first["remedy"]


def test_a_callback_counts_for_as_long_as_it_runs_in_the_step() -> None:
    """The last step ends inside ProfilerReport.on_train_batch_end, whose later work was named as a slow callback."""
    hooks = [f"[Callback]{name}.on_train_batch_end" for name in ("Before", "ProfilerReport{}")]
    spans = [Span(0.5, 2.0, hooks[0]), Span(2.5, 9.0, hooks[1])]
    found = {"Before.on_train_batch_end": 1.0, "ProfilerReport.on_train_batch_end": 0.5}
    assert _callbacks_s(spans, 1.0, 3.0) == found


def step(*, data_wait: float = 0.05, communication: float = 0.03, ends_s: float = 0.03) -> ProfiledStep:
    """An all-reduce begins 20 ms before the wait for it, and ends ``ends_s`` after the wait's begin."""
    parts, at_s = [], 100.0
    for phase, seconds in (("data_wait", data_wait), ("backward", 0.04), ("communication", communication)):
        parts.append(Span(at_s, at_s + seconds, phase))
        at_s += seconds
    begin_s = parts[-1].start_s
    transfer = TimedTransfer("all_reduce", "data", 2, begin_s - 0.02, begin_s + ends_s, 1000, 900, 800)
    return ProfiledStep(batches=3, parts=parts, transfers=[transfer])


def test_the_figures_of_steps() -> None:
    found = figures_of([step(), step()])
    assert found["phases_s"] == pytest.approx({"data_wait": 0.05, "backward": 0.04, "communication": 0.03})
    assert (found["hidden_s"], found["waits_s"]) == (pytest.approx(0.02), pytest.approx({"gradients": 0.03}))
    [sums] = found["transfers"]
    assert (sums.count, sums.size_bytes, sums.sent_bytes, sums.memory_bytes) == (1, 1000, 900, 800)
    assert (sums.seconds, found["batches"]) == (pytest.approx(0.05), 3)


def test_the_phases_of_a_rank_add_up_to_its_step() -> None:
    """On a busy machine each step has another phase that is long, and medians of phases added up to 15.3 of 18.8 ms."""
    phases_s = figures_of([step(data_wait=0.5), step(communication=0.48), step()])["phases_s"]
    assert sum(phases_s.values()) == pytest.approx(0.57)
    assert phases_s["data_wait"] / phases_s["backward"] == pytest.approx(0.05 / 0.04)


def test_a_wait_without_transfers_hides_none() -> None:
    """The hidden part was the time of transfers without that of all waits, whatever they were for."""
    assert figures_of([step(ends_s=0.01)])["hidden_s"] == pytest.approx(0.02)


def test_the_files_are_there_and_the_figures_are_of_each_rank(world2: World, tmp_path: Path) -> None:
    """All times of a rank are on the clock of its meter, which is ahead on rank 1."""
    report = run(world2, tmp_path, step_s=HEALTHY_STEP_S)
    assert report["profile"]["findings"] == [], text(report)
    read = document.read(tmp_path / document.FILE_NAME)
    assert as_json(read) == report
    assert page(read) == (tmp_path / FILE_NAME).read_text()
    ranks = report["profile"]["ranks"]
    assert [of_rank["rank"] for of_rank in ranks] == [0, 1]
    for of_rank in ranks:
        assert of_rank["steps"] == 3
        assert of_rank["batches"] == 1
        assert of_rank["is_metered"]
        assert of_rank["phases_s"].keys() <= {*PHASES}
        assert of_rank["phases_s"]["forward"] >= HEALTHY_STEP_S
        assert 0 < sum(of_rank["phases_s"].values()) < 10, "a clock that is ahead moves no rank"
        assert of_rank["parameters_bytes"] == 320
    [averaging] = [t for t in ranks[0]["transfers"] if (t["operation"], t["group"]) == ("all_reduce", "data")]
    assert averaging["count"] == 1
    assert averaging["sent_bytes"] == 4 * (16 + 4) * 4  # float32 gradients of four layers
    signals = [t for of_rank in ranks for t in of_rank["transfers"] if t["group"] == "Lightning"]
    assert signals == [], "ranks agree on signals with each batch, and Lightning does not broadcast them"


def test_a_pipeline_waits_for_other_stages(world2: World, tmp_path: Path) -> None:
    def fit() -> dict[str, Any] | None:
        loader = DataLoader(Samples(), batch_size=2)
        return profiled(tmp_path, Net(step_s=0.01), loader, make_strategy("gpipe"), activations=True)[0]

    report, _ = world2.run(fit)
    assert report is not None
    assert all("stage_wait" in of_rank["phases_s"] for of_rank in report["profile"]["ranks"])
    assert [pipeline["ranks"] for pipeline in report["profile"]["pipelines"]] == [[1, 0]]
    assert "A step of gpipe with " in text(report)
    for held in report["memory"]:
        assert held["activations_bytes"] > 0
        assert held["gradients_bytes"] == held["parameters_bytes"] > 0


def test_activations_of_all_replicas_are_counted(tmp_path: Path) -> None:
    """Those of the first replica were, of one of the two samples: hooks on saved tensors are those of a thread."""
    loader = DataLoader(Samples(), batch_size=2)
    report, _ = profiled(tmp_path, Net(step_s=0.0), loader, make_strategy("dp"), activations=True)
    assert report is not None
    assert report["memory"][0]["activations_bytes"] == 5 * 2 * 4 * 4


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (SimpleProfiler, {}),
        (PyTorchProfiler, {"schedule": torch.profiler.schedule(wait=4, warmup=1, active=3)}),  # in the midst of it
    ],
)
def test_alone_beside_another_profiler(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: type[Profiler], options: dict[str, Any]
) -> None:
    """A second torch.profiler would empty Lightning's: no steps are recorded beside it."""
    profiler = kind(dirpath=tmp_path, filename="told", **options)
    loader = DataLoader(Samples(), batch_size=2)
    own = kind is not PyTorchProfiler
    asked: dict[str, Any] = {"profiler": profiler, "trace": True, "activations": own, "max_steps": 12}
    report, same = profiled(tmp_path, Net("reads", step_s=0.0), loader, "auto", **asked)
    assert same
    assert report is not None
    [of_rank] = report["profile"]["ranks"]
    assert (of_rank["transfers"], of_rank["is_metered"]) == ([], False)
    line = Net.training_step.__code__.co_firstlineno
    read = [(Path(each["function"]).name, each["count"]) for each in of_rank["reads"]]
    assert read == ([(f"test_profiler_report.py({line}): training_step", 3)] if own else [])
    assert "launches" not in of_rank, "there is no GPU"
    [told] = tmp_path.glob("fit-told*.txt")
    assert ("aten::" in told.read_text()) is not own
    if isinstance(profiler, SimpleProfiler):
        assert len(profiler.recorded_durations["[Strategy]SingleDeviceStrategy.training_step"]) == 12
    # Each layer keeps its input of 2 x 4 floats, the first one the batch; the square keeps the last output.
    assert report["memory"][0].get("activations_bytes") == (5 * 2 * 4 * 4 if own else None)
    printed = capsys.readouterr().out
    assert printed.startswith("single_device: 1 rank on 1 node, 12 optimizer steps, ")
    assert str(tmp_path / document.FILE_NAME) in printed


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_that_is_too_short_or_fails_leaves_nothing(tmp_path: Path, fails: bool) -> None:
    """Within the window the run's own error comes through, and its last checkpoint is whole."""

    class Failing(Net):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            if fails and self.global_step == 3:
                raise KeyError("no more")

    loader = DataLoader(Samples(), batch_size=2)
    broadcast = dist.broadcast
    if fails:
        saves = ModelCheckpoint(dirpath=tmp_path, every_n_train_steps=1)
        with pytest.raises(KeyError, match="no more"):
            profiled(tmp_path, Failing(step_s=0.0), loader, "auto", beside=[saves], enable_checkpointing=True)
        assert torch.load(saves.best_model_path, weights_only=False)["global_step"] == 3
    else:
        with pytest.warns(UserWarning, match="profiled no step: training ended within the first 2 steps"):
            report, same = profiled(tmp_path, Failing(step_s=0.0), loader, "auto", max_steps=2)
        assert same
        assert report is not None
        assert "profile" not in report
    assert dist.broadcast is broadcast
    assert (tmp_path / document.FILE_NAME).exists() is not fails
    assert not (tmp_path / FILE_NAME).exists()


def test_steps_with_a_validation_are_left_out(tmp_path: Path) -> None:
    class Validating(Net):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            time.sleep(5 * STEP_S)
            assert batch.sum().item() >= 0

    loader = DataLoader(Samples(), batch_size=2)
    report = ProfilerReport(wait=1, active=2, write_file=False)
    fit = trainer(tmp_path, max_steps=7, callbacks=[report], val_check_interval=2, limit_val_batches=1)
    fit.fit(Validating(), loader, loader)
    assert report.report is not None
    [only] = report.report["profile"]["ranks"]
    assert only["steps"] == 2
    assert sum(only["phases_s"].values()) < 5 * STEP_S


@pytest.mark.parametrize(("name", "value"), [("wait", -1), ("active", 0)])
def test_what_cannot_be_is_refused(name: str, value: int) -> None:
    with pytest.raises(ValueError, match=f"{name}={value}: must be at least"):
        ProfilerReport(**{name: value})


def test_the_launches_of_a_gpu_are_found_in_a_trace() -> None:
    """Three kernels, which start when the host has launched all of them."""
    written: list[dict[str, Any]] = [{"ph": "M", "name": "process_name"}]
    for number in range(3):
        args = {"correlation": number}
        for name, category, start, seconds in (
            ("cudaLaunchKernel", "cuda_runtime", 10.0 * number + 2, 3.0),
            ("gemm", "kernel", 100 + 100.0 * number, 90.0),
        ):
            written.append({"ph": "X", "name": name, "cat": category, "ts": start, "dur": seconds, "args": args})
    recorded: Any = SimpleNamespace(
        export_chrome_trace=lambda path: Path(path).write_text(json.dumps({"traceEvents": written}))
    )
    assert launches_of(recorded) == LaunchQueue(kernels=3, busy_s=pytest.approx(270e-6), queued=1)


def test_the_functions_that_wait_for_a_gpu() -> None:
    """A wait within a read counts once; a copy to the host waits as well."""

    def event(name: str, seconds: float, parent: Any = None) -> Any:
        return SimpleNamespace(
            name=name, cpu_parent=parent, time_range=SimpleNamespace(elapsed_us=lambda: 1e6 * seconds)
        )

    step = event("train.py(7): training_step", 9.0, event("lightning/pytorch/strategies/strategy.py(1): step", 9.0))
    read = event(
        "aten::_local_scalar_dense", 2.0, event("aten::item", 2.0, event("torch/_tensor.py(5): to", 2.0, step))
    )
    copy = event("aten::copy_", 1.0, event("metrics.py(3): update", 1.0, step))
    waits = [event("cudaStreamSynchronize", 1.5, read), event("cudaStreamSynchronize", 0.5, copy)]
    alone = event("cudaDeviceSynchronize", 8.0)  # torch's profiler waits for the device at its end
    found = reads_of(SimpleNamespace(events=lambda: [step, read, copy, *waits, alone, read]))  # type: ignore[arg-type]
    assert found == [ReadValues("train.py(7): training_step", 2, 4.0), ReadValues("metrics.py(3): update", 1, 0.5)]
