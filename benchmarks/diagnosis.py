"""Compares the step time that a diagnosis predicts with that after its remedy.

``python -m benchmarks.diagnosis`` makes runs that have one fault each, at two magnitudes: a slow loader, a slow link
between two emulated hosts (which needs root), too few micro-batches of a pipeline. It prints the first finding and its
prediction, applies the remedy, and prints the step that is measured then. What computes sleeps, so that the machine
need not be quiet.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.heading import heading
from lightning_multigpu import PipelineStrategy, RingDDPStrategy
from lightning_multigpu.callbacks import ProfilerReport
from lightning_multigpu.report.document import FILE_NAME

BATCH = 32
CASES: dict[str, tuple[list[float], str]] = {
    "input": ([0.02, 0.06], "seconds to load a batch, beside a step of 40 ms"),
    "communication": ([1.0, 4.0], "million parameters, over 100 Mbit/s, beside a step of 40 ms"),
    "pipeline bubble": ([2, 4], "micro-batches, gpipe on 2 ranks, passes of 40 and 80 ms a batch"),
}


class Samples(Dataset[Tensor]):
    def __init__(self, batch_s: float) -> None:
        self.batch_s = batch_s

    def __len__(self) -> int:
        return 2 * BATCH * 40

    def __getitem__(self, index: int) -> Tensor:
        if self.batch_s:
            time.sleep(self.batch_s / BATCH)
        return torch.full((8,), index / 1000)


class _Sleep(torch.autograd.Function):
    """A forward pass of ``seconds`` for a whole batch, a backward pass of twice that, in proportion to the samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds * len(x) / BATCH
        time.sleep(ctx.seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class Layer(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(8, 8), seconds

    def forward(self, x: Tensor) -> Tensor:
        return _Sleep.apply(self.linear(x), self.seconds)  # type: ignore[no-any-return,no-untyped-call]


class Net(L.LightningModule):
    def __init__(self, layer_s: float, step_s: float, parameters: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(Layer(layer_s) for _ in range(2)))
        self.step_s = step_s
        self.weight = nn.Parameter(torch.zeros(int(parameters))) if parameters else None

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        time.sleep(self.step_s)
        loss: Tensor = self.layers(batch).square().mean()
        return loss if self.weight is None else loss + self.weight.sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


def train(case: str, value: float, directory: str, *, remedied: bool) -> None:
    """One run; rank 0 leaves its profile in ``directory``."""
    torch.set_num_threads(1)
    strategy: Any = RingDDPStrategy(start_method="popen")
    module = Net(0.0, 0.04, value * 1e6 if case == "communication" else 0)
    options: dict[str, Any] = {}
    if case == "pipeline bubble":
        factor = 4 if value == 2 else 2
        strategy = PipelineStrategy(schedule="gpipe", num_micro_batches=int(value) * (factor if remedied else 1))
        module = Net(0.04, 0.0, 0)
    elif case == "communication" and remedied:
        strategy = RingDDPStrategy(start_method="popen", compression="bf16")
    elif case == "input" and remedied:
        options = {"num_workers": 2, "persistent_workers": True}
    nodes = int(os.environ.get("NUM_NODES", "1"))
    L.Trainer(
        accelerator="cpu", devices=2 // nodes, num_nodes=nodes, strategy=strategy, max_steps=32, logger=False,
        callbacks=[ProfilerReport(wait=7, active=12, print_table=False)], default_root_dir=directory,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    ).fit(module, DataLoader(Samples(value if case == "input" else 0.0), batch_size=BATCH, **options))  # fmt: skip


def profile_of(case: str, value: float, *, remedied: bool) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as directory:
        arguments = ["--case", case, "--value", str(value), "--directory", directory, *["--remedied"] * remedied]
        command = [sys.executable, "-m", "benchmarks.diagnosis", *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if case == "communication":
            emulate = ("emulate", "--nodes", "2", "--devices", "1", "--bandwidth", "100mbit", "--burst", "64kb", "--")
            command = [sys.executable, "-m", "lightning_multigpu", *emulate, *command]
            environment["NUM_NODES"] = "2"
        finished = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=600)
        if finished.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {finished.returncode}:\n{finished.stderr[-4000:]}")
        profile: dict[str, Any] = json.loads((Path(directory) / FILE_NAME).read_text())["profile"]
        return profile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--value", type=float)
    parser.add_argument("--directory", help="one run alone, whose profile goes there")
    parser.add_argument("--remedied", action="store_true")
    options = parser.parse_args()
    if options.directory:
        train(options.case, options.value, options.directory, remedied=options.remedied)
        return
    print("python -m benchmarks.diagnosis")
    print(heading())
    print(f"{'fault':20s} {'':8s} {'step ms':>8s} {'predicted':>9s} {'measured':>8s} {'error':>6s}  first finding")
    for case, (values, meaning) in CASES.items():
        if options.case in (None, case):
            print(f"# {case}: {meaning}")
            for value in values:
                before = profile_of(case, value, remedied=False)
                finding = before["findings"][0]
                predicted_s = float(finding["step_s"])
                print(f"{case:20s} {value:8g} {1e3 * before['step_s']:8.1f} {1e3 * predicted_s:9.1f} ", end="",
                      flush=True)  # the prediction is there before the remedy runs # fmt: skip
                measured_s = profile_of(case, value, remedied=True)["step_s"]
                error = (predicted_s - measured_s) / measured_s
                print(f"{1e3 * measured_s:8.1f} {100 * error:+5.0f}%  {finding['kind']}", flush=True)


if __name__ == "__main__":
    main()
