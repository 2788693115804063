"""Test accuracy on the digits example by compression setting and seed.

    python -m benchmarks.accuracy [--seeds 0 1 2] [--settings bf16 int8] [--max-epochs 15]

Two ranks on this host, compressing between them as two hosts would, with the settings of
:mod:`benchmarks.compression`, error feedback from the first step on. The model, the data (270 images to test on:
one is 0.37 points), epochs and batch size are those of ``examples/digits.py``.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import warnings
from typing import Any

import lightning as L

from benchmarks.compression import SETTINGS
from benchmarks.heading import heading
from examples.digits import DigitsCNN, DigitsData
from lightning_multigpu import RingDDPStrategy


def accuracy(setting: Any, seed: int, max_epochs: int) -> float:
    """Percent of the test images that are told rightly after training."""
    L.seed_everything(seed, verbose=False)
    with tempfile.TemporaryDirectory() as folder:
        trainer = L.Trainer(
            strategy=RingDDPStrategy(start_method="spawn", compression=setting, shared_memory=False),
            accelerator="cpu",
            devices=2,
            max_epochs=max_epochs,
            default_root_dir=folder,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        model, data = DigitsCNN(), DigitsData()
        trainer.fit(model, data)
        tester = L.Trainer(
            accelerator="cpu", logger=False, enable_progress_bar=False, default_root_dir=folder, barebones=False
        )
        [metrics] = tester.test(model, data, verbose=False)
    return 100 * float(metrics["test_accuracy"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--settings", nargs="+", default=list(SETTINGS), choices=SETTINGS)
    parser.add_argument("--max-epochs", type=int, default=15)
    given = parser.parse_args()
    warnings.filterwarnings("ignore", message=r"The '\w+_dataloader' does not have many workers")
    print(f"{heading()}; 2 ranks, {given.max_epochs} epochs")
    print("test accuracy in %" + "".join(f"  seed {seed}" for seed in given.seeds) + "    mean   against none")
    reference = None
    for name in ("none", *given.settings):
        found = [accuracy(None if name == "none" else name, seed, given.max_epochs) for seed in given.seeds]
        mean = statistics.mean(found)
        reference = mean if reference is None else reference
        cells = "".join(f"{value:8.2f}" for value in found)
        print(f"{name:18}{cells}{mean:8.2f}{mean - reference:+15.2f}", flush=True)


if __name__ == "__main__":
    main()
