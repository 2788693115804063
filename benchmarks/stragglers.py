"""Samples a second of asynchronous and synchronous parameter servers, where one worker is slower than the others.

    python -m benchmarks.stragglers [--workers 4] [--step-ms 50] [--slower 4] [--slow-rank 3] [--turns 3]

A worker sleeps for most of its step, so that workers do not take cores from each other. "sum of workers" is the rate of
each worker alone: ``async_ps`` with one worker and a server, a fast one and the slow one. The time is that of whole
epochs but the first, from the first batch of any worker until worker 0 has the weights of the last epoch; the program
checks that each sample was seen once an epoch. The runs take turns.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from benchmarks.heading import heading
from lightning_multigpu import ParameterServerStrategy
from lightning_multigpu.report.statistics import Spread

_BATCH_SIZE = 4
_WIDTH = 64


class Sleeper(L.LightningModule):
    """Sleeps in each step, as long as its rank says, and remembers the samples that it has seen.

    Args:
        sleeps_s: of each rank.
        folder: each rank writes a file there.
    """

    def __init__(self, sleeps_s: list[float], folder: Path) -> None:
        super().__init__()
        self.sleeps_s, self.folder = sleeps_s, folder
        self.layers = nn.Sequential(nn.Linear(_WIDTH, _WIDTH), nn.ReLU(), nn.Linear(_WIDTH, 1))
        self.seen: list[int] = []
        self.start_s = 0.0

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.current_epoch == 1:
            self.start_s = self.start_s or time.time()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        inputs, numbers = batch
        self.seen += numbers.tolist()
        time.sleep(self.sleeps_s[self.global_rank])
        return F.mse_loss(self.layers(inputs).flatten(), inputs[:, 0])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)

    @override
    def on_train_end(self) -> None:
        found = {"start_s": self.start_s, "end_s": time.time(), "seen": self.seen}
        (self.folder / f"{self.global_rank}.json").write_text(json.dumps(found))


def rate(mode: str, sleeps_s: list[float], num_batches: int, epochs: int) -> float:
    """Samples a second of all workers together."""
    samples = num_batches * _BATCH_SIZE
    data = TensorDataset(torch.randn(samples, _WIDTH), torch.arange(samples))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        L.Trainer(
            strategy=ParameterServerStrategy(mode=mode, start_method="fork"),  # type: ignore[arg-type]
            accelerator="cpu",
            devices=len(sleeps_s),
            max_epochs=epochs,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        ).fit(Sleeper(sleeps_s, folder), DataLoader(data, batch_size=_BATCH_SIZE))
        ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(len(sleeps_s))]
    seen = Counter(number for rank in ranks for number in rank["seen"])
    assert seen == dict.fromkeys(range(samples), epochs), "a sample was not seen once an epoch"
    return samples * (epochs - 1) / (ranks[0]["end_s"] - min(rank["start_s"] for rank in ranks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--step-ms", type=float, default=50, help="that a fast worker sleeps (%(default)s)")
    parser.add_argument("--slower", type=float, default=4, help="times that the slow worker sleeps (%(default)s)")
    parser.add_argument("--slow-rank", type=int, default=3)
    parser.add_argument("--batches", type=int, default=240, help="of an epoch (%(default)s)")
    parser.add_argument("--epochs", type=int, default=3, help="with the first (%(default)s)")
    parser.add_argument("--turns", type=int, default=3)
    given = parser.parse_args()
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    fast_s, slow_s = given.step_ms / 1e3, given.slower * given.step_ms / 1e3
    torch.set_num_threads(1)
    sleeps_s = [slow_s if rank == given.slow_rank else fast_s for rank in range(given.workers)]
    found: dict[str, list[float]] = {name: [] for name in ("fast", "slow", "sum", "async_ps", "sync_ps")}
    for _ in range(given.turns):
        found["fast"].append(rate("async", [fast_s], given.batches // 4, 2))
        found["slow"].append(rate("async", [slow_s], given.batches // 4, 2))
        found["sum"].append((given.workers - 1) * found["fast"][-1] + found["slow"][-1])
        found["async_ps"].append(rate("async", sleeps_s, given.batches, given.epochs))
        found["sync_ps"].append(rate("sync", sleeps_s, given.batches, given.epochs))
    print(
        f"{heading()}\n"
        f"# {given.epochs - 1} epochs after a first of {given.batches} batches of {_BATCH_SIZE} samples; steps sleep "
        f"{given.step_ms:g} ms, those of worker {given.slow_rank} of {given.workers} {slow_s * 1e3:g} ms\n# medians of "
        f"{given.turns} turns\n"
        f"{'':30}  samples/s      25 %      75 %  of the sum"
    )
    names = {"fast": "a fast worker alone", "slow": "the slow worker alone", "sum": "sum of workers"}
    for name, rates in found.items():
        spread = Spread.of(rates)
        share = Spread.of([a / b for a, b in zip(rates, found["sum"], strict=True)]).median
        print(f"  {names.get(name, name):28} {spread.median:10.1f} {spread.p25:9.1f} {spread.p75:9.1f} {share:11.2f}")


if __name__ == "__main__":
    main()
