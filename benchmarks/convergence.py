"""What asynchronous training converges to on real data, against one device at equal samples.

    python -m benchmarks.convergence [--data digits text] [--seeds 0 1 2] [--epochs 15] [--text-epochs 3]
    python -m benchmarks.convergence --data text --optimizer NAdam [--beta1 0.95] [--text-workers 2]

- test accuracy on the digits (270 images to test on: one is 0.37 points)
- validation loss of the byte-level language model, in nats per byte

Models, data and batch size a worker are those of ``examples/``. One device has the batch size of one worker, so that
it makes as many updates in an epoch as all workers together. Workers share the cores of this host.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import tempfile
from collections.abc import Callable
from typing import Any

import lightning as L
import torch

from benchmarks.heading import heading, quiet
from examples.digits import DigitsCNN, DigitsData
from examples.language_model import ByteGPT, TextData
from lightning_multigpu import ParameterServerStrategy

_OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "max_staleness=2": {"max_staleness": 2},
}
_OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    # As AdamW, with Nesterov's momentum: all of it after some 100 steps, and by default after some 25,000.
    "NAdam": functools.partial(torch.optim.NAdam, decoupled_weight_decay=True, weight_decay=0.01, momentum_decay=1.0),
}


def trained(
    model: L.LightningModule, data: L.LightningDataModule, workers: int, options: dict[str, Any], epochs: int
) -> L.Trainer:
    """Trains the model; returns a Trainer to evaluate it with."""
    quiet: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    strategy: Any = "ddp_fork"  # leaves this process as it was, so that it can be forked again
    if workers > 1:
        strategy = ParameterServerStrategy(mode="async", start_method="fork", **options)
    with tempfile.TemporaryDirectory() as folder:
        L.Trainer(
            strategy=strategy,
            devices=workers,
            max_epochs=epochs,
            default_root_dir=folder,
            limit_val_batches=0,
            num_sanity_val_steps=0,
            **quiet,
        ).fit(model, data)
    return L.Trainer(devices=1, **quiet)


def digits(seed: int, workers: int, options: dict[str, Any], epochs: int) -> float:
    """Percent of the test images that are told rightly."""
    L.seed_everything(seed, verbose=False)
    model, data = DigitsCNN(), DigitsData()
    [metrics] = trained(model, data, workers, options, epochs).test(model, data, verbose=False)
    return 100 * float(metrics["test_accuracy"])


class _TextModel(ByteGPT):
    """The language model with another optimizer."""

    def __init__(self, learning_rate: float, make_optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__(learning_rate=learning_rate)
        self._make_optimizer = make_optimizer

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._make_optimizer(self.parameters(), lr=self.learning_rate)


def text(
    seed: int,
    workers: int,
    options: dict[str, Any],
    epochs: int,
    *,
    learning_rate: float,
    make_optimizer: Callable[..., torch.optim.Optimizer],
) -> float:
    """The loss on text that was not trained on."""
    L.seed_everything(seed, verbose=False)
    model, data = _TextModel(learning_rate, make_optimizer), TextData()
    [metrics] = trained(model, data, workers, options, epochs).validate(model, data, verbose=False)
    return float(metrics["val_loss"])


def show(
    what: str,
    measure: Callable[[int, int, dict[str, Any], int], float],
    seeds: list[int],
    runs: list[tuple[int, str]],
    epochs: int,
    *,
    in_percent: bool,
) -> None:
    """One line for one device, and one for each run."""
    compared = "loss against one" if in_percent else "points to one"
    print(f"\n{what + f', {epochs} epochs':52}" + "".join(f"  seed {seed}" for seed in seeds) + f"    mean  {compared}")
    reference = 0.0
    for workers, name in [(1, ""), *runs]:
        found = [measure(seed, workers, _OPTIONS[name], epochs) for seed in seeds]
        mean = statistics.mean(found)
        reference = reference if workers > 1 else mean
        label = "one device" if workers == 1 else f"async_ps, {workers} workers{', ' if name else ''}{name}"
        difference = f"{100 * (mean / reference - 1):+14.1f} %" if in_percent else f"{mean - reference:+14.2f}"
        cells = "".join(f"{value:8.{3 if in_percent else 2}f}" for value in found)
        print(f"{label:52}{cells}{mean:8.{3 if in_percent else 2}f}{difference}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--data", nargs="+", default=["digits", "text"], choices=["digits", "text"])
    parser.add_argument("--epochs", type=int, default=15, help="of the digits (%(default)s)")
    parser.add_argument("--text-epochs", type=int, default=3, help="of the language model (%(default)s)")
    parser.add_argument("--text-seeds", type=int, nargs="+", default=[0], help="of the language model (%(default)s)")
    parser.add_argument("--text-workers", type=int, nargs="+", default=[2, 4], help="2, 4 or both")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="of the language model (%(default)s)")
    parser.add_argument("--optimizer", choices=list(_OPTIMIZERS), default="AdamW", help="of the language model")
    parser.add_argument("--beta1", type=float, default=0.9, help="of that optimizer (%(default)s)")
    given = parser.parse_args()
    quiet()
    print(heading(), flush=True)
    runs = [(2, ""), (4, ""), (4, "max_staleness=2")]
    if "digits" in given.data:
        show("test accuracy on the digits, %", digits, given.seeds, runs, given.epochs, in_percent=False)
    if "text" in given.data:
        make_optimizer = functools.partial(_OPTIMIZERS[given.optimizer], betas=(given.beta1, 0.999))
        measure = functools.partial(text, learning_rate=given.learning_rate, make_optimizer=make_optimizer)
        what = f"loss, {given.optimizer}, rate {given.learning_rate:g}, beta1 {given.beta1:g}"
        runs = [run for run in [(2, ""), (4, "")] if run[0] in given.text_workers]
        show(what, measure, given.text_seeds, runs, given.text_epochs, in_percent=True)


if __name__ == "__main__":
    main()
