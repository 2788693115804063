"""Throughput of two stages on two cores against one process on one core, with this pack and with others.

    python -m benchmarks.pipeline_throughput [--fairscale PYTHON] [--deepspeed PYTHON] [--batch-size 32]

The GPT of :mod:`benchmarks.plain_gpt` (6.5 M parameters), 8 micro-batches, SGD, one intra-op thread a process or,
in FairScale's one process, a stage. Every way is a job of its own; jobs take turns, and what counts is the median of
the repetitions' medians. FairScale and DeepSpeed are run by the Python that has them.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from benchmarks.heading import heading
from benchmarks.plain_gpt import batch_of, gpt, loss_of, median_step_s
from benchmarks.raw_pipeline import RawPipeline
from lightning_multigpu.bench.strategies.models import repeated
from lightning_multigpu.strategies.pipeline.strategy import PipelineStrategy
from tests.world import free_port

NUM_RANKS, MICRO_BATCHES = 2, 8
ONE_CORE = "one core"
_PEER = Path(__file__).with_name("pipeline_peer.py")

Job = Callable[[str, argparse.Namespace], None]


class GPT(LightningModule):
    """Trains :func:`gpt`."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = gpt()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        text, targets = batch
        return loss_of(self.layers(text), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class Marks(Callback):
    """The time at each batch's start."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    @override
    def on_train_batch_start(self, *_: Any) -> None:
        self.marks.append(time.perf_counter())


def strategy_rank(rank: int, port: int, given: argparse.Namespace, path: str) -> None:
    """One rank of ``Trainer(strategy="pipeline_1f1b")``."""
    _set_up(rank, port)
    marks = Marks()
    strategy = PipelineStrategy(schedule="1f1b", num_micro_batches=MICRO_BATCHES)
    trainer = Trainer(
        accelerator="cpu", devices=NUM_RANKS, strategy=strategy, plugins=[LightningEnvironment()], max_epochs=1,
        callbacks=[marks], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(GPT(), repeated(batch_of(given.batch_size), given.batch_size, given.steps + 3, 1))
    if rank == 0:
        seconds = [end - start for start, end in pairwise(marks.marks)][2:]
        _write(path, f"lightning {lightning.__version__}", statistics.median(seconds))


def raw_rank(rank: int, port: int, given: argparse.Namespace, path: str) -> None:
    """One rank of torch's Schedule1F1B by hand."""
    _set_up(rank, port)
    dist.init_process_group("gloo", rank=rank, world_size=NUM_RANKS)
    group = dist.new_group(list(range(NUM_RANKS)), backend="gloo")
    layers = gpt()
    half = len(layers) // NUM_RANKS
    stage = layers[half * rank : half * (rank + 1)]
    pipeline = RawPipeline(group, "1f1b", MICRO_BATCHES, [stage], loss_of)
    optimizer = torch.optim.SGD(stage.parameters(), lr=1e-3)
    text, targets = batch_of(given.batch_size)

    def step() -> None:
        optimizer.zero_grad()
        pipeline.step(text, targets)
        optimizer.step()

    seconds = median_step_s(step, given.steps)
    if rank == 0:
        _write(path, f"torch {torch.__version__}", seconds)
    dist.barrier()
    dist.destroy_process_group()


def _set_up(rank: int, port: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), LOCAL_RANK=str(rank), NODE_RANK="0")
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def _write(path: str, library: str, seconds: float) -> None:
    Path(path).write_text(json.dumps({"library": library, "seconds": seconds}))


def ranks_job(entry: Callable[..., None]) -> Job:
    def job(path: str, given: argparse.Namespace) -> None:
        mp.spawn(entry, (free_port(), given, path), nprocs=NUM_RANKS)  # type: ignore[no-untyped-call]

    return job


def peer_job(library: str, python: str, num_ranks: int) -> Job:
    """Processes of another Python; with several, each knows its rank."""

    def job(path: str, given: argparse.Namespace) -> None:
        port = free_port()
        numbers = [str(number) for number in (given.batch_size, MICRO_BATCHES, given.steps)]
        common = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PATH": f"{Path(python).parent}{os.pathsep}{os.environ['PATH']}",
        }
        place = {"WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = [
            subprocess.Popen(
                [python, str(_PEER), library, path, *numbers],
                env={**common, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.DEVNULL,
            )
            for rank in range(num_ranks)
        ]
        try:
            if any(rank.wait(timeout=600) for rank in ranks):
                raise RuntimeError(f"a process of {library} failed; its output is above")
        finally:
            for process in ranks:
                process.kill()
                process.wait()
            for segment in Path("/dev/shm").glob(f"deepspeed_*_{port}_*"):
                segment.unlink()

    return job


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fairscale", metavar="PYTHON")
    parser.add_argument("--deepspeed", metavar="PYTHON")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--repetitions", type=int, default=3)
    given = parser.parse_args()
    print(
        f"{heading()}; batch {given.batch_size}, M = {MICRO_BATCHES}, "
        f"{given.repetitions} repetitions of {given.steps} steps"
    )
    jobs: dict[str, Job] = {
        ONE_CORE: peer_job("one", sys.executable, 1),
        "pipeline_1f1b": ranks_job(strategy_rank),
        "Schedule1F1B by hand": ranks_job(raw_rank),
    }
    if given.fairscale:
        jobs["Pipe, one process"] = peer_job("fairscale", given.fairscale, 1)
    if given.deepspeed:
        jobs["PipelineEngine"] = peer_job("deepspeed", given.deepspeed, NUM_RANKS)
    found: dict[str, list[float]] = {name: [] for name in jobs}
    libraries: dict[str, str] = {}
    for _ in range(given.repetitions):
        for name, job in jobs.items():
            with tempfile.TemporaryDirectory() as directory:
                path = f"{directory}/results.json"
                job(path, given)
                results = json.loads(Path(path).read_text())
            found[name].append(results["seconds"])
            libraries[name] = results["library"]
    base_s = statistics.median(found[ONE_CORE])
    for name, seconds in found.items():
        middle_s = statistics.median(seconds)
        print(
            f"{name:>20} {1e3 * middle_s:7.0f} ms a step ({1e3 * min(seconds):.0f} to {1e3 * max(seconds):.0f}), "
            f"{given.batch_size / middle_s:6.1f} samples/s = {base_s / middle_s:.2f}  {libraries[name]}"
        )


if __name__ == "__main__":
    main()
