"""The digits, on ranks of which one is slow; run it from the root of the checkout.

::

    python -m examples.course.straggler --strategy sync_ps
    python -m examples.course.straggler --strategy async_ps
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import lightning as L
from lightning.pytorch.callbacks import Callback, Timer

from examples.digits import DigitsCNN, DigitsData
from lightning_multigpu.callbacks import RunReport


class Straggler(Callback):
    """Makes a training step of each rank longer: those of rank 1 by ``slow_s``, those of the others by ``fast_s``."""

    def __init__(self, fast_s: float, slow_s: float) -> None:
        self.fast_s, self.slow_s = fast_s, slow_s
        self.batches = 0

    def on_train_batch_start(self, trainer: L.Trainer, *args: Any) -> None:
        time.sleep(self.slow_s if trainer.global_rank == 1 else self.fast_s)
        self.batches += 1


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on handwritten digits, on ranks of which one is slow.")
    add = parser.add_argument
    add("--strategy", default="sync_ps", help="default: %(default)s")
    add("--devices", type=int, default=2, help="ranks; rank 1 is the slow one; default: %(default)s")
    add("--fast-ms", type=float, default=20, help="that a step of the other ranks sleeps; default: %(default)s")
    add("--slow-ms", type=float, default=100, help="that a step of rank 1 sleeps; default: %(default)s")
    add("--max-epochs", type=int, default=3, help="default: %(default)s")
    options = parser.parse_args()

    L.seed_everything(0)
    straggler, timer = Straggler(options.fast_ms / 1e3, options.slow_ms / 1e3), Timer()
    trainer = L.Trainer(
        strategy=options.strategy,
        accelerator="cpu",
        devices=options.devices,
        max_epochs=options.max_epochs,
        default_root_dir="runs/course",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[straggler, timer, RunReport()],
    )
    trainer.fit(DigitsCNN(), DigitsData())
    print(f"rank {trainer.global_rank} trained on {straggler.batches} batches")
    if trainer.is_global_zero:
        accuracy = float(trainer.callback_metrics["val_accuracy"])
        print(f"{options.strategy}: {timer.time_elapsed('train'):.1f} s of training, val_accuracy {accuracy:.2f}")


if __name__ == "__main__":
    main()
