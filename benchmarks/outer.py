"""Local SGD with an outer optimizer, against averages of the gradients in each step, at equal samples.

    python -m benchmarks.outer [--steps 1500] [--start 500] [--every 50] [--seeds 0]

Four ranks of this host train the byte-level language model of ``examples/`` on the documentation that comes with
Python. As in the paper, the first steps are those of plain training; then each way goes on from the same checkpoint.
Shown are the loss on text that was not trained on, in nats per byte, and what rank 0 sent through sockets since then,
the end of the fit included. Then four emulated hosts, with one rank each and links of 100 Mbit/s, take steps of the MLP
of ``bench strategies``, 6.3 M parameters; the time is a mean, in which each average has its share. Ranks share the
cores of this host.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from benchmarks.heading import heading, quiet
from examples.language_model import ByteGPT, TextData
from lightning_multigpu import FaultTolerantDDPStrategy, RingDDPStrategy
from lightning_multigpu.bench.strategies.models import BenchMLP, repeated

_RANKS = 4
_EVERY = {"average_every": 50}
_RUNS: dict[str, dict[str, Any]] = {
    "ring_ddp": {},
    "compression=int8": {"compression": "int8"},
    "average_every": _EVERY,
    "outer_optimizer": {**_EVERY, "outer_optimizer": "nesterov"},
    "outer_optimizer, int8": {**_EVERY, "outer_optimizer": "nesterov", "compression": "int8"},
}
_TRAINED = ("ring_ddp", "average_every", "outer_optimizer, int8")
_FT = "outer_optimizer, int8, ft_ddp"
_RUNS[_FT] = _RUNS["outer_optimizer, int8"]
_TIMED = ("ring_ddp", "compression=int8", "outer_optimizer, int8", _FT)
_WARM_UP = 50


class Model(ByteGPT):
    """The language model, with a learning rate that rises for some steps and then falls to a tenth."""

    def __init__(self, num_steps: int) -> None:
        super().__init__(width=64, num_layers=2, context=64, learning_rate=4e-3)
        self.num_steps = num_steps

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)

        def factor(step: int) -> float:
            return min(step / _WARM_UP, 0.55 + 0.45 * math.cos(math.pi * min(1.0, step / self.num_steps)))

        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Figures(L.Callback):
    """Rank 0 writes when each step ended and what it had sent until then; last of all, what it had sent in the fit."""

    def __init__(self, path: Path) -> None:
        self.path, self.sent_bytes, self.ended = path, 0, list[tuple[float, int]]()

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._count(trainer)

    def _count(self, trainer: L.Trainer) -> None:
        steps = trainer.strategy.meter.steps  # type: ignore[attr-defined]
        while steps:
            self.sent_bytes += steps.popleft().sent_bytes
        self.ended.append((time.perf_counter(), self.sent_bytes))

    def on_fit_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        meter = trainer.strategy.meter  # type: ignore[attr-defined]
        meter.end_step()  # the end of a fit averages too
        meter.flush()
        self._count(trainer)
        if trainer.is_global_zero:
            whole = self.path.with_suffix(".new")  # other ranks may already read
            whole.write_text(json.dumps(self.ended))
            whole.replace(self.path)


def fit(model: L.LightningModule, data: Any, path: Path, num_steps: int, strategy: Any, **options: Any) -> Any:
    """The figures of rank 0; with ``ckpt_path`` they begin there."""
    start = options.pop("ckpt_path", None)
    L.Trainer(
        strategy=strategy, max_steps=num_steps, max_epochs=-1, default_root_dir=path.parent, accelerator="cpu",
        logger=False, enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
        num_sanity_val_steps=0, callbacks=[Figures(path), *options.pop("callbacks", [])], **options,
    ).fit(model, data, ckpt_path=start)  # fmt: skip
    return json.loads(path.read_text()) if path.exists() else None


def trained(run: str, given: argparse.Namespace, seed: int, folder: Path) -> tuple[float, int]:
    """The loss on text that was not trained on, and the bytes that rank 0 sent after the start."""
    start = folder / f"seed{seed}.ckpt"
    if given.start and not start.exists():
        saving = ModelCheckpoint(folder, filename=start.stem, every_n_train_steps=given.start)
        _fit("ring_ddp", given, seed, folder, given.start, callbacks=[saving])
    model, data, found = _fit(run, given, seed, folder, given.steps, ckpt_path=start if given.start else None)
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    [metrics] = L.Trainer(devices=1, accelerator="cpu", **quiet).validate(model, data, verbose=False)
    return float(metrics["val_loss"]), int(found[-1][1])


def _fit(run: str, given: argparse.Namespace, seed: int, folder: Path, num_steps: int, **options: Any) -> Any:
    L.seed_everything(seed, verbose=False)
    model, data = Model(given.steps), TextData(context=64)
    every = {"average_every": given.every} if "average_every" in _RUNS[run] else {}
    strategy = RingDDPStrategy(start_method="fork", shared_memory=False, **{**_RUNS[run], **every})
    options = {"enable_checkpointing": "callbacks" in options, "devices": _RANKS, **options}
    return model, data, fit(model, data, folder / "figures.json", num_steps, strategy, **options)


def timed(run: str, folder: Path) -> None:
    """On each host: takes steps, of a whole period where ranks average after several."""
    every = _RUNS[run].get("average_every", 5)
    torch.manual_seed(int(os.environ["NODE_RANK"]))
    model = BenchMLP()
    data = repeated(model.example_batch(64), 64, 2 * every, _RANKS)
    strategy = (FaultTolerantDDPStrategy if run == _FT else RingDDPStrategy)(**_RUNS[run])
    fit(model, data, folder / "figures.json", 2 * every, strategy, enable_checkpointing=False)


def step_times(folder: Path) -> None:
    print(f"\n{'ms a step, 4 hosts at 100 Mbit/s':36}{'mean':>10}{'MB sent a step':>18}", flush=True)
    for run in _TIMED:
        command = [sys.executable, "-m", "lightning_multigpu", "emulate", f"--nodes={_RANKS}", "--devices=1"]
        command += ["--bandwidth=100mbit", "--burst=16kb", "--", sys.executable, "-m", "benchmarks.outer"]
        subprocess.run([*command, "--timed", run, "--folder", str(folder)], check=True, capture_output=True)
        *ended, _ = json.loads((folder / "figures.json").read_text())
        half = len(ended) // 2  # the steps before this one are not timed
        seconds, sent = ((end - begin) / half for begin, end in zip(ended[half - 1], ended[-1], strict=True))
        print(f"{run:36}{1e3 * seconds:10.0f}{sent / 1e6:18.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1500, help="of each run of the language model (%(default)s)")
    parser.add_argument("--start", type=int, default=500, help="of these by ring_ddp, before each run (%(default)s)")
    parser.add_argument("--every", type=int, default=50, help="steps between two averages (%(default)s)")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--runs", nargs="*", default=_TRAINED, choices=list(_RUNS))
    parser.add_argument("--only-hosts", action="store_true", help="leave out the losses")
    parser.add_argument("--no-hosts", action="store_true", help="leave out the time of steps between hosts")
    parser.add_argument("--timed", choices=_TIMED, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    quiet()
    if given.timed:
        timed(given.timed, given.folder)
        return
    print(heading())
    print(f"{_RANKS} ranks, seeds {given.seeds}; {given.steps} steps, the first {given.start} by ring_ddp")
    print(f"averages after {given.every} steps\n")
    print(f"{'':36}{'loss':>10}{'to ring_ddp':>14}{'MB sent':>10}{'1 / part of ring_ddp':>22}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder, reference = Path(name), (0.0, 0)
        for run in () if given.only_hosts else given.runs:
            found = [trained(run, given, seed, folder) for seed in given.seeds]
            loss, sent = statistics.mean(each[0] for each in found), found[0][1]
            reference = reference if reference[1] else (loss, sent)
            part = f"{100 * (loss / reference[0] - 1):+12.2f} %{sent / 1e6:10.2f}{reference[1] / sent:22.1f}"
            print(f"{run:36}{loss:10.4f}{part}", flush=True)
        if not given.no_hosts:
            step_times(folder)


if __name__ == "__main__":
    main()
