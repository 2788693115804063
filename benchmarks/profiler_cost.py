"""Cost of ProfilerReport outside of its window: a step with it against a step without it.

    python -m benchmarks.profiler_cost --turns 9

One process with one thread trains two models in turns, with the callback and without it, and prints the medians over
the turns of the median step, and of the ratio within a turn: the smallest step that Lightning makes, and an MLP of
6.3 M parameters (six Linear(1024, 1024) with ReLU, batch 64). The callback's window never comes. The silent monitors
of throughput, communication and devices are a part of its cost.
"""

from __future__ import annotations

import argparse
import logging
import statistics
import tempfile
import time
import warnings
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from benchmarks.heading import heading
from lightning_multigpu.callbacks import ProfilerReport

MODELS = {"smallest step": (8, 1, 400), "MLP": (1024, 6, 60)}
"""Width, layers and steps."""


class Net(L.LightningModule):
    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(m for _ in range(num_layers) for m in (nn.Linear(width, width), nn.ReLU())))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.layers(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Steps(L.Callback):
    def __init__(self) -> None:
        self.ends_s: list[float] = []

    def on_train_batch_start(self, *_: Any) -> None:
        self.ends_s.append(time.perf_counter())


def step_s(width: int, num_layers: int, num_steps: int, *, profiled: bool) -> float:
    """The median step of one fit, its first ten steps left out."""
    steps = Steps()
    with tempfile.TemporaryDirectory() as directory:
        L.Trainer(
            accelerator="cpu", devices=1, max_steps=num_steps, max_epochs=-1, logger=False,
            callbacks=[steps, *[ProfilerReport(wait=10**9, print_table=False)] * profiled], default_root_dir=directory,
            enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        ).fit(Net(width, num_layers), DataLoader(torch.randn(64 * 20, width), batch_size=64))  # fmt: skip
    return statistics.median(b - a for a, b in zip(steps.ends_s[10:], steps.ends_s[11:], strict=False))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=9)
    turns = parser.parse_args().turns
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")  # that no step was profiled
    print(f"# python -m benchmarks.profiler_cost --turns {turns}")
    print(heading())
    for name, model in MODELS.items():
        pairs = []
        for turn in range(turns):
            order = (False, True) if turn % 2 else (True, False)
            found = {profiled: step_s(*model, profiled=profiled) for profiled in order}
            pairs.append((found[False], found[True]))
        without_us, with_us = (1e6 * statistics.median(times) for times in zip(*pairs, strict=True))
        ratios = sorted(profiled / plain for plain, profiled in pairs)
        print(f"{name:13s} without {without_us:8.0f} us  with {with_us:8.0f} us  ratio {statistics.median(ratios):.4f} "
              f"({ratios[0]:.4f} to {ratios[-1]:.4f})", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
