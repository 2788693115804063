"""Checks of what is measured on a card: times of transfers, memory, NVML's figures, and the profiler's report."""

from __future__ import annotations

import gc
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.gpu.card import Card
from benchmarks.gpu.table import Check, Place
from benchmarks.gpu.training import world_of
from lightning_multigpu.callbacks import ProfilerReport, RunReport
from lightning_multigpu.communication.metering.clocks import clock_of
from lightning_multigpu.engine.placeholder import Placeholder
from lightning_multigpu.engine.training_memory import SavedActivations, held_bytes
from tests.strategies.tasks import (
    NUM_CLASSES,
    NUM_FEATURES,
    Case,
    Classifier,
    make_strategy,
    make_trainer,
    train_loader,
)

_KERNELS = "kernels run on GPUs only"
_MEBI = 2**20
_SLEEP_CYCLES = 20_000_000  # about ten milliseconds


class TimesAllReduce(Callback):
    """Times the transfer of an all-reduce, by events or by the host's clock, within the metered call.

    On a GPU the stream is busy while the host makes the call, so that the events of both follow each other at once.
    """

    def __init__(self, size_bytes: int) -> None:
        self._numel = size_bytes // 4
        self._spans: list[tuple[Any, Any]] = []

    def seconds(self) -> list[float]:
        """Of each all-reduce; waits for the device."""
        if any(isinstance(end, torch.cuda.Event) for _, end in self._spans):
            torch.cuda.synchronize()
            return [start.elapsed_time(end) / 1e3 for start, end in self._spans]
        return [end - start for start, end in self._spans]

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        strategy: Any = trainer.strategy
        group = strategy.metered(dist.group.WORLD, "probe")
        tensor = torch.ones(self._numel, device=strategy.root_device)
        strategy.barrier()
        own = dist.all_reduce

        def timed(*args: Any, **kwargs: Any) -> None:
            start = self._mark(tensor)
            own(*args, **kwargs)
            self._spans.append((start, self._mark(tensor)))

        if tensor.is_cuda:
            torch.cuda._sleep(_SLEEP_CYCLES)
        with mock.patch.object(dist, "all_reduce", timed):
            group.all_reduce(tensor, "sum")

    @staticmethod
    def _mark(tensor: Tensor) -> Any:
        if not tensor.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _time_all_reduce(card: Card, size_bytes: int) -> tuple[list[float], list[float]]:
    """Seconds of the all-reduces, timed here and by the meter."""
    strategy, times = make_strategy("ring_ddp"), TimesAllReduce(size_bytes)
    options = card.place(strategy, 2)
    case = Case(max_epochs=1)
    trainer = make_trainer(case, options.pop("strategy"), 2, callbacks=[times], **options)
    trainer.fit(Classifier(), train_loader(case, trainer))
    strategy.meter.flush()
    metered = [step.of("all_reduce", "probe")[0].total_s for step in strategy.meter.steps]
    return times.seconds(), metered


def metered_time(place: Place) -> str:
    """The meter's seconds of an all-reduce are those of events around the call, to a tenth."""
    size_bytes = (64 if place.card.is_gpu else 16) * _MEBI
    notes = []
    for rank, (own, metered) in enumerate(place.run(2, _time_all_reduce, place.card, size_bytes)):
        assert len(own) == len(metered), f"{len(own)} calls, {len(metered)} metered"
        # The first one connects the ranks.
        pairs = sorted(zip(own[1:], metered[1:], strict=True))
        own_s, metered_s = pairs[len(pairs) // 2]
        assert abs(metered_s - own_s) <= 0.1 * own_s + 50e-6, (
            f"rank {rank}: {metered_s * 1e3:.2f} ms metered, {own_s * 1e3:.2f} ms between events"
        )
        notes.append(f"{metered_s * 1e3:.1f} of {own_s * 1e3:.1f} ms")
    return f"{size_bytes // _MEBI} MiB, metered: {', '.join(notes)}"


def _lap_of_a_kernel(card: Card) -> tuple[bool, float, float]:
    device = card.device()
    clock = clock_of(device)
    if card.is_gpu:  # the first launch of a kernel loads it, and the first event is made
        torch.cuda._sleep(1)
        clock.wait(clock.mark())
    start = clock.mark()
    start_s = time.perf_counter()
    if card.is_gpu:
        torch.cuda._sleep(100_000_000)
    end = clock.mark()
    launched_s, at_once = time.perf_counter() - start_s, clock.passed(end)
    clock.wait(end)
    return at_once, launched_s, clock.seconds(start, end)


def stopwatch_of_the_device(place: Place) -> str:
    """The clock of a device times its work, and not how long the host takes to launch it."""
    ((at_once, launched_s, seconds),) = place.run(1, _lap_of_a_kernel, place.card)
    if not place.card.is_gpu:
        assert at_once
        return ""
    assert not at_once, "the lap had ended before its kernel"
    assert seconds > 5 * launched_s, f"{seconds:.3f} s, launched in {launched_s:.3f} s"
    return f"{seconds * 1e3:.0f} ms, launched in {launched_s * 1e3:.2f} ms"


class Deep(L.LightningModule):
    """Equal blocks with parameters of several megabytes, beside which activations are small."""

    def __init__(self, width: int, num_blocks: int = 16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.width = width
        self.layers = nn.Sequential(
            *(
                nn.Sequential(nn.Linear(width, 4 * width), nn.Tanh(), nn.Linear(4 * width, width))
                for _ in range(num_blocks)
            )
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        out: Tensor = self.layers(batch)
        return out.square().mean()

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(torch.randn(16 * 8, self.width), batch_size=16)  # type: ignore[arg-type]

    def configure_optimizers(self) -> Any:
        # AdamW over lists of tensors needs memory for intermediate values; SGD with momentum works in place.
        return torch.optim.SGD(self.parameters(), lr=1e-3, momentum=0.9)


class Peak(Callback):
    """The most bytes that torch has allocated on the card from the fourth batch on, without those before the fit.

    Neither are those of cuBLAS, which torch allocates for each thread: 32 MiB on an H100.

    Attributes:
        peak_bytes: these bytes.
        saved_bytes: the most bytes that autograd kept for backward at a time in the third batch.
        all_bytes: torch's own figure at the end of training, when the report takes it. Later the module becomes whole.
        predicted: the bytes by kind that the rank of a pipeline should hold.
    """

    def __init__(self) -> None:
        self.before_bytes = self.peak_bytes = self.all_bytes = self.saved_bytes = 0
        self.predicted: dict[str, int] = {}
        self._counting = ExitStack()

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        gc.collect()
        self._device = trainer.strategy.root_device
        if self._device.type == "cuda":
            torch._C._cuda_clearCublasWorkspaces()
            # Parameters are on the device already; those of other stages of a pipeline take no memory.
            held = sum(p.nbytes for p in pl_module.parameters() if p.is_cuda and not isinstance(p, Placeholder))
            self.before_bytes = torch.cuda.memory_allocated(self._device) - held

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, index: int) -> None:
        if index == 2:
            self._saved = SavedActivations([*pl_module.parameters(), *pl_module.buffers()])
            self._counting.enter_context(self._saved.counted())
        if index == 3:
            self._counting.close()
            self.saved_bytes = self._saved.peak_bytes
        if index == 3 and self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        strategy: Any = trainer.strategy
        if strategy.stage_record() is not None:
            held = [parameter for parameter in pl_module.parameters() if strategy.holds(parameter)]
            self.predicted = vars(held_bytes(held, trainer.optimizers))
        if self._device.type == "cuda":
            self.all_bytes = torch.cuda.max_memory_allocated(self._device)
            allocated = torch.cuda.memory_allocated(self._device)
            torch._C._cuda_clearCublasWorkspaces()
            of_cublas = allocated - torch.cuda.memory_allocated(self._device)
            self.peak_bytes = self.all_bytes - of_cublas - self.before_bytes


def _memory(card: Card, name: str, width: int) -> tuple[dict[str, Any], int, int]:
    """What a rank's report says of its memory, the bytes above, and the peak that the report should have.

    The first fit makes what stays in the process.
    """
    for each in (32, width):
        strategy, peak = make_strategy(name), Peak()
        strategy.record_stages()
        report = RunReport(print_table=False, write_file=False)
        options = card.place(strategy, 2)
        trainer = make_trainer(
            Case(max_epochs=1, precision="32-true"),
            options.pop("strategy"),
            2,
            callbacks=[peak, report],
            **options,
        )
        trainer.fit(Deep(each))
        assert report.report is not None
        own = report.report["memory"][trainer.global_rank]
    activations = {"activations_bytes": peak.saved_bytes} if peak.predicted else {}
    return {**own, **activations, "predicted": peak.predicted}, peak.peak_bytes, peak.all_bytes


def predicted_memory(place: Place, *, name: str) -> str:
    """The bytes of parameters, gradients, optimizer states and activations are the peak of the card, to a twentieth."""
    width = 512 if place.card.is_gpu else 64
    notes = []
    for own, peak, at_end in place.run(world_of(name), _memory, place.card, name, width):
        kinds = ("parameters_bytes", "gradients_bytes", "optimizer_bytes")
        held = sum(own[kind] for kind in kinds) + own.get("activations_bytes", 0)
        for kind in kinds:
            predicted = own["predicted"].get(kind, own[kind])
            assert abs(predicted - own[kind]) <= 0.05 * own[kind], f"{kind}: {predicted} predicted, {own[kind]} held"
        if not place.card.is_gpu:
            notes.append(f"{held / _MEBI:.2f} MiB held")
            continue
        assert own["device_peak_bytes"] == at_end, f"{own['device_peak_bytes']} in the report, {at_end} of torch"
        assert abs(peak - held) <= 0.05 * held, (
            f"rank {own['rank']}: {held / _MEBI:.1f} MiB predicted, {peak / _MEBI:.1f} MiB at the peak"
        )
        notes.append(f"{held / _MEBI:.0f} of {peak / _MEBI:.0f} MiB")
    return ", ".join(notes)


def _device_figures(card: Card) -> tuple[dict[str, Any], int, int]:
    report = RunReport(print_table=False, write_file=False)
    case = Case(max_epochs=30)
    strategy = make_strategy("ring_ddp")
    options = card.place(strategy, 2)
    trainer = make_trainer(case, options.pop("strategy"), 2, callbacks=[report], **options)
    trainer.fit(Classifier(), train_loader(case, trainer))
    assert report.report is not None
    metrics = report.report["ranks"][trainer.global_rank]["metrics"]
    device = strategy.root_device
    if not card.is_gpu:
        return metrics, 0, 2**62
    return metrics, torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory


def device_figures(place: Place) -> str:
    """Utilisation, memory, power and temperature in a report, as NVML gives them for this card."""
    notes = []
    for metrics, allocated, total in place.run(2, _device_figures, place.card):
        used = metrics["device/memory_used_bytes"]["mean"]
        assert allocated <= used <= total, f"{used:.3g} bytes in use, {allocated:.3g} allocated of {total:.3g}"
        busy = metrics["device/utilization_percent"]["mean"]
        assert 0 <= busy <= 100, busy
        keys = {"device/power_watts": (10, 1500), "device/temperature_celsius": (10, 110)}
        for key, (least, most) in keys.items() if place.card.is_gpu else ():
            assert least <= metrics[key]["mean"] <= most, f"{key} {metrics[key]['mean']}"
        notes.append(f"{busy:.0f} %, {used / 1e9:.1f} GB")
    return "; ".join(notes)


class TinyLayers(L.LightningModule):
    """Two hundred layers of which each is faster on a GPU than its launch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(NUM_FEATURES, NUM_FEATURES) for _ in range(200)))
        self.head = nn.Linear(NUM_FEATURES, NUM_CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.layers(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def _profile(card: Card, name: str | None, directory: Path, module: type[L.LightningModule]) -> dict[str, Any] | None:
    report = ProfilerReport(wait=2, active=3, trace=True, print_table=False)
    case = Case(max_epochs=3, precision="32-true")
    ranks = 1 if name is None else 2
    options = card.place("auto" if name is None else make_strategy(name), ranks)
    trainer = make_trainer(
        case, options.pop("strategy"), ranks, callbacks=[report], default_root_dir=directory, **options
    )
    trainer.fit(module(), train_loader(case, trainer))
    return report.report and report.report["profile"]


def profiled_kernels(place: Place, *, name: str | None) -> str:
    """The profile has the kernels of each rank."""
    ranks = 1 if name is None else 2
    profile = place.run(ranks, _profile, place.card, name, place.directory, Classifier)[0]
    assert profile is not None
    if not place.card.is_gpu:
        return f"{len(profile['ranks'])} ranks"
    for rank in profile["ranks"]:
        assert rank["launches"]["kernels"] > 0
        assert rank["launches"]["busy_s"] > 0
    return f"{profile['ranks'][0]['launches']['kernels']} kernels a step"


def launch_bound(place: Place) -> str:
    """A model of tiny layers is launch-bound, and the report says so first."""
    (profile,) = place.run(1, _profile, place.card, None, place.directory, TinyLayers)
    assert profile is not None
    kinds = [finding["kind"] for finding in profile["findings"]]
    assert "launch-bound" in kinds[:1], f"findings: {kinds or 'none'}; launches {profile['ranks'][0]['launches']}"
    return str(profile["findings"][0]["evidence"])


def checks() -> list[Check]:
    found = [Check(row="ring_ddp", column="metered time of an all-reduce", function=metered_time, ranks=2, alone=True)]
    clock = stopwatch_of_the_device
    found.append(Check(row="machine", column="clock of the device", function=clock, ranks=1, alone=True))
    found += [
        Check(row=name, column="predicted memory", function=partial(predicted_memory, name=name), ranks=2)
        for name in ("pipeline_1f1b", "pipeline_interleaved", "tensor_split")
    ]
    found.append(Check(row="ring_ddp", column="figures of NVML", function=device_figures, ranks=2))
    profiled: list[tuple[str, str | None]] = [("machine", None), ("ring_ddp", "ring_ddp"), ("gpipe", "gpipe")]
    found += [
        Check(
            row=row,
            column="profile with kernels",
            function=partial(profiled_kernels, name=name),
            ranks=1 if name is None else 2,
        )
        for row, name in profiled
    ]
    found.append(
        Check(row="machine", column="launch-bound is found", function=launch_bound, ranks=1, needs=_KERNELS, alone=True)
    )
    return found
