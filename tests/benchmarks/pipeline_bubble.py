"""For how much of a schedule ranks are idle, measured with stages that sleep, against torch's own and against theory.

    python -m tests.benchmarks.pipeline_bubble [--ranks 2 4] [--micro-batches 4 8 16] [--operation-ms 100 20]
        [--schedules model_parallel gpipe 1f1b interleaved zero_bubble]

Every stage sleeps for the same time in its forward pass, for its input's gradient and for its weight's, so that ranks
do not take cores from each other. The last two are nodes of their own in the graph, for schedules that compute them
apart; stage 0 sleeps for its input's gradient too. Both ways run in the same processes, one after the other::

    bubble = 1 - slept / wall; a rank sleeps 3 v M operations in a step of M micro-batches with v stages a rank

over the schedule alone: from the start on the rank of stage 0 to the last rank's end; and over the whole step: from the
start of a schedule to that of the next, with optimizer, logs and the Trainer in between.
"""

from __future__ import annotations

import argparse
import logging
import os
import platform
import statistics
import time
import warnings
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from typing_extensions import override

from lightning_multigpu.bench.strategies.models import repeated
from lightning_multigpu.engine.pipeline.timetable import step_time, timetable
from lightning_multigpu.strategies.pipeline import PipelineStrategy
from tests.benchmarks.raw_pipeline import RawPipeline, stages_per_rank
from tests.world import free_port

SCHEDULES = ("model_parallel", "gpipe", "1f1b", "interleaved", "zero_bubble")
STEPS = 4  # of each way; the first one is not counted
WIDTH = 8

Span = tuple[float, float]


class _InputPath(torch.autograd.Function):
    """Sleeps in forward, and for the gradient of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return gradient, None


class _WeightPath(torch.autograd.Function):
    """Sleeps for the gradient of its weight only."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return gradient, None


class SleepingLayer(nn.Module):
    """Features (batch, 8) to features (batch, 8)."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.weight = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return _InputPath.apply(x, self.seconds) + _WeightPath.apply(self.weight, self.seconds)  # type: ignore[no-any-return, no-untyped-call]


class Shift(nn.Module):
    """Makes the first stage's input need a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class SleepingStages(LightningModule):
    """One layer a stage."""

    def __init__(self, num_stages: int, seconds: float) -> None:
        super().__init__()
        self.shift = Shift()
        self.layers = nn.Sequential(*(SleepingLayer(seconds) for _ in range(num_stages)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layers(self.shift(batch)).square().mean()  # type: ignore[no-any-return]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Spans:
    """Start and end of every call of torch's schedules in this process, whoever calls them."""

    def __init__(self) -> None:
        self.taken: list[Span] = []
        for cls in (PipelineScheduleSingle, PipelineScheduleMulti):
            self._watch(cls)

    def _watch(self, cls: Any) -> None:
        original = cls.step

        def step(*args: Any, **kwargs: Any) -> Any:
            start_s = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.taken.append((start_s, time.perf_counter()))

        cls.step = step


class Afterwards(Callback):
    """Runs torch's schedule by hand behind the Trainer's last batch."""

    def __init__(self, schedule: str, num_micro_batches: int, spans: Spans) -> None:
        self.ways: list[Any] = []
        self._schedule = schedule
        self._num_micro_batches = num_micro_batches
        self._spans = spans

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        ours = self._spans.taken[1 - STEPS :]
        num_ranks = dist.get_world_size()
        group = dist.new_group(list(reversed(range(num_ranks))), backend="gloo", sort_ranks=False)
        position = dist.get_rank(group)
        seconds = float(next(layer.seconds for layer in pl_module.layers))  # type: ignore[union-attr]
        modules: list[nn.Module] = [SleepingLayer(seconds) for _ in range(stages_per_rank(self._schedule))]
        if position == 0:
            modules[0] = nn.Sequential(Shift(), modules[0])
        pipeline = RawPipeline(
            group, self._schedule, self._num_micro_batches, modules, lambda output, _: output.square().mean()
        )
        optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=1e-3)
        batch = torch.ones(self._num_micro_batches, WIDTH)
        self._spans.taken.clear()
        for _ in range(STEPS):
            dist.barrier(group)
            optimizer.zero_grad()
            pipeline.step(batch, batch)
            optimizer.step()
        gathered: list[Any] = [None] * num_ranks
        dist.all_gather_object(gathered, (ours, self._spans.taken[1 - STEPS :]))
        self.ways = list(zip(*gathered, strict=True))


def run_rank(rank: int, num_ranks: int, port: int, given: argparse.Namespace) -> None:
    """One rank of all runs with so many; the first one prints."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank), NODE_RANK="0")
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    spans = Spans()
    for operation_ms in given.operation_ms:
        for name in given.schedules:
            for num_micro_batches in [1] if name == "model_parallel" else given.micro_batches:
                ways = train(name, num_ranks, num_micro_batches, operation_ms / 1e3, spans)
                if rank == 0:
                    show(name, num_ranks, num_micro_batches, operation_ms, ways)


def train(name: str, num_ranks: int, num_micro_batches: int, seconds: float, spans: Spans) -> list[Any]:
    """Of both ways, the spans of each rank."""
    schedule = "gpipe" if name == "model_parallel" else name
    afterwards = Afterwards(schedule, num_micro_batches, spans)
    trainer = Trainer(
        accelerator="cpu",
        devices=num_ranks,
        strategy=PipelineStrategy(schedule=schedule, num_micro_batches=num_micro_batches),  # type: ignore[arg-type]
        plugins=[LightningEnvironment()],
        max_epochs=1,
        callbacks=[afterwards],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batch = torch.ones(num_micro_batches, WIDTH)
    model = SleepingStages(num_ranks * stages_per_rank(schedule), seconds)
    trainer.fit(model, repeated(batch, num_micro_batches, STEPS, 1))
    return afterwards.ways


def bubbles(spans: Sequence[Sequence[Span]], busy_s: float) -> tuple[float, float]:
    """Percent over the schedule and over the step, medians, from the spans of all ranks; the last one has stage 0."""
    starts = [start for start, _ in spans[-1]]
    ends = [max(rank[step][1] for rank in spans) for step in range(len(starts))]
    schedule_s = statistics.median(end - start for start, end in zip(starts, ends, strict=True))
    step_s = statistics.median(after - start for start, after in pairwise(starts))
    return 100 * (1 - busy_s / schedule_s), 100 * (1 - busy_s / step_s)


def theory(name: str, num_ranks: int, num_micro_batches: int) -> float:
    """Percent, with nothing but the operations themselves in the schedule's order."""
    schedule, v = "gpipe" if name == "model_parallel" else name, stages_per_rank(name)
    orders = timetable(schedule, num_ranks, v, num_micro_batches)
    stages = num_ranks * v
    return 100 * (
        1 - 3 * v * num_micro_batches / step_time(orders, [1.0] * stages, [2.0] * stages, [0.0] * (stages - 1))
    )


def show(name: str, num_ranks: int, num_micro_batches: int, operation_ms: float, ways: list[Any]) -> None:
    """One line: theory, the strategy, torch's schedule by hand, and the difference of the two in points."""
    busy_s = 3 * num_micro_batches * stages_per_rank(name) * operation_ms / 1e3
    ours, raw = (bubbles(spans, busy_s) for spans in ways)
    print(
        f"{operation_ms:4.0f} {name:>14} {num_ranks:2} {num_micro_batches:3} "
        f"{theory(name, num_ranks, num_micro_batches):7.1f} {ours[0]:6.1f} ({ours[1]:5.1f}) "
        f"{raw[0]:6.1f} ({raw[1]:5.1f}) {ours[0] - raw[0]:+7.1f} ({ours[1] - raw[1]:+.1f})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES), choices=SCHEDULES)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--operation-ms", type=float, nargs="+", default=[100, 20])
    given = parser.parse_args()
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, "
        f"Python {platform.python_version()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}; "
        f"medians of {STEPS - 1} steps; bubble in % of the schedule (of the whole step)"
    )
    print(f"{'ms':>4} {'schedule':>14} {'P':>2} {'M':>3} {'theory':>7} {'Trainer.fit':>14} {'by hand':>14}  difference")
    for num_ranks in given.ranks:
        mp.spawn(run_rank, (num_ranks, free_port(), given), nprocs=num_ranks)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
