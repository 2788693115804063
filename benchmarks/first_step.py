"""Seconds from the start of a command to the end of its first training step, on two ranks of this host.

    python -m benchmarks.first_step [--turns 5] [--contenders ddp ring_ddp fit:ddp fit:ring_ddp] [--hide transformers]

A contender is a strategy in a script (``python train.py``) or, as ``fit:ring_ddp``, in the command line's ``fit``.
``one device`` has one process. The contenders take turns. The model is a Linear layer, so that the time is that of
imports, processes and joining. Packages that are hidden look to torchmetrics as if they were not installed.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path

_ROOT = Path(__file__).parents[1]
CONTENDERS = ("one device", "ddp", "ring_ddp", "ring_ddp_spawn", "fit:ddp", "fit:ring_ddp")
SCRIPT = """
import sys
import lightning as L
import lightning_multigpu
from model import Model
from lightning.pytorch.demos.boring_classes import BoringDataModule

if __name__ == "__main__":
    strategy, devices = sys.argv[1:]
    trainer = L.Trainer(strategy=strategy, devices=int(devices), accelerator="cpu", max_steps=1, logger=False,
                        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(Model(), BoringDataModule())
"""
MODEL = """
import os, time
from lightning.pytorch.demos.boring_classes import BoringModel

class Model(BoringModel):
    def on_train_batch_end(self, outputs, batch, batch_idx):
        if batch_idx == 0 and self.global_rank == 0:
            with open(os.environ["FIRST_STEP_FILE"], "w") as file:
                file.write(repr(time.time()))
"""
HIDING = """
import importlib.metadata, importlib.util, lightning_utilities.core.imports as imports
HIDDEN = {hidden!r}
def _version(name):
    if name in HIDDEN:
        raise importlib.metadata.PackageNotFoundError(name)
    return importlib.metadata.version(name)
imports._version = _version
imports.find_spec = lambda name, package=None: None if name in HIDDEN else importlib.util.find_spec(name, package)
"""


def first_step_s(contender: str, directory: Path, paths: list[str]) -> tuple[float, float]:
    """Seconds to the end of the first step, and to the end of the command.

    Raises:
        RuntimeError: the command has failed.
    """
    strategy, devices = ("auto", 1) if contender == "one device" else (contender.removeprefix("fit:"), 2)
    command = [sys.executable, "train.py", strategy, str(devices)]
    if contender.startswith("fit:"):
        flags = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        options = ["accelerator=cpu", f"devices={devices}", f"strategy={strategy}", "max_steps=1"]
        options += [f"{flag}=false" for flag in flags]
        command = [sys.executable, "-m", "lightning_multigpu", "fit", "--model=model.Model",
                   "--data=lightning.pytorch.demos.boring_classes.BoringDataModule",
                   *(f"--trainer.{option}" for option in options)]  # fmt: skip
    step_file = directory / "first_step"
    step_file.unlink(missing_ok=True)
    environment = os.environ | {
        "FIRST_STEP_FILE": str(step_file),
        "PYTHONPATH": os.pathsep.join([*paths, str(_ROOT)]),
        "OMP_NUM_THREADS": "1",
    }
    start = time.time()
    ended = subprocess.run(command, cwd=directory, env=environment, capture_output=True, text=True, check=False)
    end = time.time()
    if ended.returncode != 0 or not step_file.exists():
        raise RuntimeError(f"{' '.join(command)} ended with {ended.returncode}\n{ended.stderr}")
    return float(step_file.read_text()) - start, end - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--contenders", nargs="+", default=list(CONTENDERS))
    parser.add_argument("--hide", nargs="*", default=[], metavar="PACKAGE")
    options = parser.parse_args()
    print(f"$ python -m benchmarks.first_step {' '.join(sys.argv[1:])}")
    versions = ", ".join(f"{name} {version(name)}" for name in ("torch", "lightning", "torchmetrics"))
    print(f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, {versions}, "
          f"{time.strftime('%Y-%m-%d')}; load {os.getloadavg()[0]:.1f} before", flush=True)  # fmt: skip
    seconds: dict[str, list[tuple[float, float]]] = {contender: [] for contender in options.contenders}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        (directory / "train.py").write_text(SCRIPT)
        (directory / "model.py").write_text(MODEL)
        paths: list[str] = []
        if options.hide:
            (directory / "hiding").mkdir()
            (directory / "hiding/sitecustomize.py").write_text(HIDING.format(hidden=options.hide))
            paths = [str(directory / "hiding")]
        for turn in range(1, options.turns + 1):
            for contender, taken in seconds.items():
                taken.append(first_step_s(contender, directory, paths))
            steps = ", ".join(f"{contender} {taken[-1][0]:.1f}" for contender, taken in seconds.items())
            print(f"turn {turn}, load {os.getloadavg()[0]:.1f}: {steps}", flush=True)
    print(f"{'seconds to the':>16}  {'first step':>10}  {'range':>13}  {'end':>5}")
    for contender, taken in seconds.items():
        steps, ends = (sorted(values) for values in zip(*taken, strict=True))
        spread = f"{steps[0]:.1f} to {steps[-1]:.1f}"
        print(f"{contender:>16}  {statistics.median(steps):>10.1f}  {spread:>13}  {statistics.median(ends):>5.1f}")


if __name__ == "__main__":
    main()
