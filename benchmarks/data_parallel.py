"""Throughput of ``dp`` on CPU replicas, one intra-op thread each, against one replica.

    python -m benchmarks.data_parallel [--models gpt mlp] [--devices 2] [--turns 9] [--all-threads]

The GPT (batches of 16) is bound by computation. The MLP (batches of 256) has as many parameters and less computation:
the sum of gradients shows.

Each way is a ``Trainer.fit`` on the same global batch, a few steps a turn; the ways take turns in an order that moves
on by one place. A turn's figure is the median of its steps; what counts is the median of the turns.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import time
import warnings
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from benchmarks.heading import heading
from lightning_multigpu import DataParallelStrategy
from lightning_multigpu.bench.strategies.models import BenchGPT, BenchMLP, repeated
from lightning_multigpu.communication.metering.meter import Meter

BATCH_SIZES = {"gpt": 16, "mlp": 256}
_WARM_UP = 2


class Marks(Callback):
    """The time at each batch's start."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        self.marks.append(time.perf_counter())


def turn(model: LightningModule, batch: Any, batch_size: int, steps: int, *, devices: int, threads: int) -> Trainer:
    """Trains so many steps after the warm-up, with so many intra-op threads in all."""
    torch.set_num_threads(threads)
    trainer = Trainer(
        accelerator="cpu", devices=devices, strategy=DataParallelStrategy() if devices > 1 else "auto", max_epochs=1,
        callbacks=[Marks()], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(model, repeated(batch, batch_size, _WARM_UP + steps + 1, 1))
    return trainer


def median_step_s(trainer: Trainer) -> float:
    """Of a turn."""
    [marks] = [callback for callback in trainer.callbacks if isinstance(callback, Marks)]  # type: ignore[attr-defined]
    return statistics.median(end - start for start, end in pairwise(marks.marks[_WARM_UP:]))


def travel_ms(meter: Meter) -> dict[str, float]:
    """The median time of each operation between the devices in a step."""
    steps = [*meter.steps][_WARM_UP:]
    names = {totals.operation for step in steps for totals in step.operations}
    return {
        name: 1e3 * statistics.median(sum(totals.total_s for totals in step.of(name, "devices")) for step in steps)
        for name in sorted(names)
    }


def compare(name: str, given: argparse.Namespace) -> None:
    """Prints the ways' steps for one model."""
    torch.manual_seed(0)
    model = {"mlp": BenchMLP, "gpt": BenchGPT}[name]()
    batch_size = BATCH_SIZES[name]
    batch = model.example_batch(batch_size)
    replicas = f"dp, {given.devices} replicas of 1 thread"
    ways = {
        "one replica of 1 thread": {"devices": 1, "threads": 1},
        replicas: {"devices": given.devices, "threads": given.devices},
    }
    if given.all_threads:
        ways[f"one device, {given.devices} threads"] = {"devices": 1, "threads": given.devices}
    found: dict[str, list[float]] = {way: [] for way in ways}
    names = [*ways]
    for index in range(given.turns):
        first = index % len(names)
        for way in [*names[first:], *names[:first]]:
            trainer = turn(model, batch, batch_size, given.steps, **ways[way])
            found[way].append(median_step_s(trainer))
            if way == replicas:
                travelled = travel_ms(trainer.strategy.meter)  # type: ignore[attr-defined]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{name}: {parameters:,} parameters, global batch {batch_size}, {given.turns} turns of {given.steps} steps")
    base_s = statistics.median(found[names[0]])
    for way, seconds in found.items():
        step_s = statistics.median(seconds)
        print(
            f"  {way:28s} {1e3 * step_s:8.1f} ms  ({1e3 * min(seconds):.1f} - {1e3 * max(seconds):.1f})   throughput "
            f"{base_s / step_s:.2f} times that of one replica"
        )
    print("  between the devices, last turn: " + ", ".join(f"{name} {ms:.2f} ms" for name, ms in travelled.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=[*BATCH_SIZES], default=[*BATCH_SIZES])
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--turns", type=int, default=9)
    parser.add_argument("--all-threads", action="store_true", help="also one device with as many intra-op threads")
    parser.add_argument("--steps", type=int, default=4)
    given = parser.parse_args()
    if "OMP_NUM_THREADS" in os.environ:
        raise SystemExit("OMP_NUM_THREADS is set, and this program sets the threads itself: unset it")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    print(heading())
    for name in given.models:
        compare(name, given)


if __name__ == "__main__":
    main()
