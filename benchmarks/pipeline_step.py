"""Training step of a pipeline strategy against torch's schedule of the same name in a loop by hand.

    python -m benchmarks.pipeline_step [--schedules gpipe 1f1b] [--micro-batches 4 8] [--batch-size 32]

Two ranks, one intra-op thread each; the GPT of 6.5 M parameters, SGD. Both train a copy of the same model on the same
batches in the same processes and take turns step by step, since the machine's speed changes within seconds; a step is
all there is from one batch to the next: loading, forward, backward, optimizer; with a strategy also what Lightning does
in between. The last line tells what stock Lightning takes against a loop by hand on one device.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor
from typing_extensions import override

from benchmarks.compared import columns, compared
from benchmarks.heading import heading
from benchmarks.raw_pipeline import RawPipeline, gpt_loss, gpt_stages
from lightning_multigpu._torch_compat import new_group_in_order
from lightning_multigpu.bench.strategies.models import BenchGPT, repeated
from lightning_multigpu.communication.metering.clocks import synchronise
from lightning_multigpu.planning.pipelines.schedule_order import SCHEDULES
from lightning_multigpu.strategies.pipeline.strategy import PipelineStrategy
from tests.world import free_port

NUM_RANKS = 2
WARM_UP = 3  # turns that are not counted
ALONE = "one device"
_CPU = torch.device("cpu")

ByHand = Callable[[Tensor], Tensor | None]
"""Trains one step on a batch; gives the loss where it is known."""


class TakesTurns(Callback):
    """Trains by hand between the steps of the Trainer, in the same process, and times both.

    Args:
        by_hand: makes the step by hand, once the ranks have joined.
        batches: what is trained on by hand, from a loader of its own.
        turns: of each.
        device: of this rank; both are timed until it has done its work.
    """

    def __init__(
        self, by_hand: Callable[[], ByHand], batches: Iterator[Tensor], turns: int, device: torch.device
    ) -> None:
        self.trainer_s: list[float] = []
        self.by_hand_s: list[float] = []
        self.losses: list[tuple[float, float]] = []
        self._make = by_hand
        self._batches = batches
        self._turns = turns
        self._device = device
        self._start_s = 0.0
        self._output: Tensor | None = None

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step = self._make()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._output = outputs["loss"]

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx:
            self.trainer_s.append(self._now_s() - self._start_s)
            self._by_hand()
            if len(self.trainer_s) == self._turns:
                trainer.should_stop = True
        if dist.is_initialized():
            dist.barrier()
        self._start_s = self._now_s()

    def _now_s(self) -> float:
        synchronise(self._device)
        return time.perf_counter()

    def _by_hand(self) -> None:
        if dist.is_initialized():
            dist.barrier()
        start_s = self._now_s()
        loss = self._step(next(self._batches).to(self._device))
        self.by_hand_s.append(self._now_s() - start_s)
        if loss is not None:
            self.losses.append((float(self._output), float(loss)))


def raw_schedule(model: BenchGPT, schedule: str, num_micro_batches: int, device: torch.device) -> ByHand:
    """torch's schedule; the rank with the last stage is rank 0, as in the strategies."""
    group = new_group_in_order(list(reversed(range(NUM_RANKS))), backend=dist.get_backend())
    stages = gpt_stages(model, schedule, dist.get_rank(group), NUM_RANKS)
    pipeline = RawPipeline(group, schedule, num_micro_batches, stages, gpt_loss, device)
    optimizer = torch.optim.SGD([p for stage in stages for p in stage.parameters()], lr=1e-3)

    def step(batch: Tensor) -> Tensor | None:
        optimizer.zero_grad()
        losses = pipeline.step(batch, batch)
        optimizer.step()
        return torch.stack([loss.detach() for loss in losses]).mean() if losses else None

    return step


def plain_loop(model: BenchGPT) -> ByHand:
    """One device, no framework."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def step(batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model.training_step(batch, 0)
        loss.backward()
        optimizer.step()
        return loss

    return step


def run_rank(rank: int, port: int, schedule: str, num_micro_batches: int, given: argparse.Namespace, path: str) -> None:
    """One rank of one schedule, or the one device; writes the seconds of a step, turn by turn."""
    alone = schedule == ALONE
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank), NODE_RANK="0")
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    options: dict[str, Any] = {"accelerator": "cpu", "devices": 1}
    if not alone:
        strategy = PipelineStrategy(schedule=schedule, num_micro_batches=num_micro_batches)  # type: ignore[arg-type]
        options |= {"devices": NUM_RANKS, "strategy": strategy}
    profiler = _profiler(given, rank)
    seconds = turns_of(
        schedule, num_micro_batches, options, batch_size=given.batch_size, width=given.width, turns=given.turns
    )
    if profiler is not None:
        profiler.disable()
        profiler.dump_stats(f"{given.profile}.{schedule}.{num_micro_batches}.{rank}")
    Path(path, f"{rank}.json").write_text(json.dumps(seconds))


def turns_of(
    schedule: str,
    num_micro_batches: int,
    options: dict[str, Any],
    *,
    batch_size: int,
    width: int,
    turns: int,
    device: torch.device = _CPU,
) -> tuple[list[float], list[float]]:
    """Seconds of this rank's steps, turn by turn: of the Trainer, and by hand.

    Args:
        schedule: torch's name of the schedule, or :data:`ALONE`.
        num_micro_batches: M.
        options: the Trainer's strategy and devices.
        batch_size: samples of a step.
        width: of the model.
        turns: of each.
        device: of this rank.
    """
    alone = schedule == ALONE
    seed_everything(0, verbose=False)
    model = BenchGPT(width)
    batch = model.example_batch(batch_size)
    by_hand = copy.deepcopy(model).to(device)
    num_batches = turns + 1
    callback = TakesTurns(
        lambda: plain_loop(by_hand) if alone else raw_schedule(by_hand, schedule, num_micro_batches, device),
        iter(repeated(batch, batch_size, num_batches, 1)),
        turns,
        device,
    )
    trainer = Trainer(
        max_epochs=1, callbacks=[callback], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, plugins=None if alone else [LightningEnvironment()], **options,
    )  # fmt: skip
    trainer.fit(model, repeated(batch, batch_size, num_batches, 1))
    if any(abs(ours - raw) > 1e-4 * raw for ours, raw in callback.losses):
        raise RuntimeError(f"the losses of both differ: {callback.losses}")
    return callback.trainer_s, callback.by_hand_s


def _profiler(given: argparse.Namespace, rank: int) -> Any:
    if not given.profile:
        return None
    import cProfile

    profiler = cProfile.Profile()
    profiler.enable()
    return profiler


def measure(schedule: str, num_micro_batches: int, given: argparse.Namespace) -> tuple[list[float], list[float]]:
    """Seconds of a step, turn by turn and on the slowest rank: of the Trainer, and by hand."""
    num_ranks = 1 if schedule == ALONE else NUM_RANKS
    with tempfile.TemporaryDirectory() as directory:
        mp.spawn(  # type: ignore[no-untyped-call]
            run_rank, (free_port(), schedule, num_micro_batches, given, directory), nprocs=num_ranks
        )
        ranks = [json.loads(Path(directory, f"{rank}.json").read_text()) for rank in range(num_ranks)]
    return on_slowest_rank(ranks)


def on_slowest_rank(ranks: Sequence[Sequence[list[float]]]) -> tuple[list[float], list[float]]:
    """Both columns of :func:`turns_of` over all ranks, without the turns that warm up."""
    ours, raw = ([max(turn) for turn in zip(*(rank[i] for rank in ranks), strict=True)][WARM_UP:] for i in range(2))
    return ours, raw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="*", default=[*SCHEDULES, ALONE], choices=[*SCHEDULES, ALONE])
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--width", type=int, default=256, help="of the model; a small one shows what is not compute")
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--profile", help="write a cProfile of each rank to files that begin so")
    given = parser.parse_args()
    print(f"{heading()}; {NUM_RANKS} ranks, batch {given.batch_size}, {given.turns - WARM_UP} steps of each, in turns")
    print(columns("Trainer.fit", "by hand"))
    for schedule in given.schedules:
        for num_micro_batches in given.micro_batches if schedule != ALONE else [1]:
            name = f"{schedule}, M = {num_micro_batches}" if schedule != ALONE else schedule
            print(compared(name, *measure(schedule, num_micro_batches, given)), flush=True)


if __name__ == "__main__":
    main()
