"""Idle share of pipeline schedules, with stages that sleep, against torch's own schedules and against theory.

    python -m benchmarks.pipeline_bubble [--ranks 2 4] [--micro-batches 4 8 16] [--operation-ms 100 20]
        [--schedules model_parallel gpipe 1f1b interleaved zero_bubble] [--turns 3]

Every stage sleeps for the same time in its forward pass, for its input's gradient and for its weight's, so that ranks
do not take cores from each other. The last two are nodes of their own in the graph, for schedules that compute them
apart; stage 0 sleeps for its input's gradient too. Both ways run in the same processes and take turns::

    bubble = 1 - slept / wall; a rank sleeps 3 v M operations in a step of M micro-batches with v stages a rank

over the schedule alone: from the start on the rank of stage 0 to the last rank's end; and over the whole step: from the
start of a schedule to that of the next, with optimizer, logs and the Trainer in between.
"""

from __future__ import annotations

import argparse
import logging
import os
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

from benchmarks.heading import heading
from benchmarks.raw_pipeline import RawPipeline, stages_per_rank
from lightning_multigpu._torch_compat import new_group_in_order
from lightning_multigpu.bench.strategies.models import repeated
from lightning_multigpu.engine.pipeline.stages.runner import PipelineRunner
from lightning_multigpu.planning.pipelines.schedule_order import schedule_orders, step_time
from lightning_multigpu.strategies.pipeline.strategy import PipelineStrategy
from tests.world import free_port

SCHEDULES = ("model_parallel", "gpipe", "1f1b", "interleaved", "zero_bubble")
STEPS = 4  # a turn; the first one is not counted
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
    """Start and end of every run of a schedule in this process, the strategy's or torch's."""

    def __init__(self) -> None:
        self.taken: list[Span] = []
        for cls in (PipelineScheduleSingle, PipelineScheduleMulti):
            self._watch(cls, "step")
        self._watch(PipelineRunner, "_run_in_order")

    def _watch(self, cls: Any, name: str) -> None:
        original = getattr(cls, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            start_s = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                self.taken.append((start_s, time.perf_counter()))

        setattr(cls, name, run)


class TakesTurns(Callback):
    """Runs torch's schedule by hand between turns of the Trainer.

    Args:
        schedule: its name.
        num_micro_batches: M.
        spans: of both.

    Attributes:
        ways: of the Trainer and by hand, the spans of each rank turn by turn, once training has ended.
    """

    def __init__(self, schedule: str, num_micro_batches: int, spans: Spans) -> None:
        self.ways: list[list[list[list[Span]]]] = []
        self._schedule = schedule
        self._num_micro_batches = num_micro_batches
        self._spans = spans
        self._turns: list[tuple[list[Span], list[Span]]] = []

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        group = new_group_in_order(list(reversed(range(dist.get_world_size()))), backend="gloo")
        seconds = float(next(layer.seconds for layer in pl_module.layers))  # type: ignore[union-attr]
        modules: list[nn.Module] = [SleepingLayer(seconds) for _ in range(stages_per_rank(self._schedule))]
        if dist.get_rank(group) == 0:
            modules[0] = nn.Sequential(Shift(), modules[0])
        self._pipeline = RawPipeline(
            group, self._schedule, self._num_micro_batches, modules, lambda output, _: output.square().mean()
        )
        self._optimizer = torch.optim.SGD([p for module in modules for p in module.parameters()], lr=1e-3)
        dist.barrier()
        self._spans.taken.clear()

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx and batch_idx % STEPS == 0:
            self._by_hand()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._by_hand()
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, self._turns)
        self.ways = [[[turn[way] for turn in turns] for turns in gathered] for way in range(2)]

    def _by_hand(self) -> None:
        # The first batch of a kind is trained on apart from the others, in a schedule of its own.
        ours = self._spans.taken[-STEPS:]
        self._spans.taken.clear()
        batch = torch.ones(self._num_micro_batches, WIDTH)
        for _ in range(STEPS):
            dist.barrier()
            self._optimizer.zero_grad()
            self._pipeline.step(batch, batch)
            self._optimizer.step()
        self._turns.append((ours[1:], self._spans.taken[1:]))
        dist.barrier()
        self._spans.taken.clear()


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
                ways = train(name, num_ranks, num_micro_batches, operation_ms / 1e3, given.turns, spans)
                if rank == 0:
                    show(name, num_ranks, num_micro_batches, operation_ms, ways)


def train(name: str, num_ranks: int, num_micro_batches: int, seconds: float, turns: int, spans: Spans) -> list[Any]:
    """Of both ways, the spans of each rank turn by turn."""
    schedule = "gpipe" if name == "model_parallel" else name
    takes_turns = TakesTurns(schedule, num_micro_batches, spans)
    trainer = Trainer(
        accelerator="cpu",
        devices=num_ranks,
        strategy=PipelineStrategy(schedule=schedule, num_micro_batches=num_micro_batches),  # type: ignore[arg-type]
        plugins=[LightningEnvironment()],
        max_epochs=1,
        callbacks=[takes_turns],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batch = torch.ones(num_micro_batches, WIDTH)
    model = SleepingStages(num_ranks * stages_per_rank(schedule), seconds)
    trainer.fit(model, repeated(batch, num_micro_batches, turns * STEPS, 1))
    return takes_turns.ways


def bubbles(ranks: Sequence[Sequence[Sequence[Span]]], busy_s: float) -> tuple[float, float]:
    """Percent over the schedule and over the step, medians over all turns; the last rank has stage 0."""
    schedules, steps = [], []
    for turn in zip(*ranks, strict=True):
        starts = [start for start, _ in turn[-1]]
        ends = [max(end for _, end in spans) for spans in zip(*turn, strict=True)]
        schedules += [end - start for start, end in zip(starts, ends, strict=True)]
        steps += [after - start for start, after in pairwise(starts)]
    return tuple(100 * (1 - busy_s / statistics.median(seconds)) for seconds in (schedules, steps))  # type: ignore[return-value]


def theory(name: str, num_ranks: int, num_micro_batches: int) -> float:
    """Percent, with nothing but the operations themselves in the schedule's order."""
    schedule, v = "gpipe" if name == "model_parallel" else name, stages_per_rank(name)
    orders = schedule_orders(schedule, num_ranks, v, num_micro_batches)
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
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    print(
        f"{heading()}; medians of {given.turns} turns of {STEPS - 1} steps; "
        "bubble in % of the schedule (of the whole step)"
    )
    print(f"{'ms':>4} {'schedule':>14} {'P':>2} {'M':>3} {'theory':>7} {'Trainer.fit':>14} {'by hand':>14}  difference")
    for num_ranks in given.ranks:
        mp.spawn(run_rank, (num_ranks, free_port(), given), nprocs=num_ranks)  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
