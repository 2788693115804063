"""The short page of ``fit --help`` and its like. Lightning's page has some 500 lines, and takes its import to print."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_multigpu.commands.usage import PROGRAM

ALL_OPTIONS = "--help_all"
_TRAINING = "fit"

# Option, value and description; the names are those of Lightning's parser.
_COMMON = (
    ("config", "FILE", "settings in YAML; options override them, --trainer.devices=4"),
    ("model", "CLASS", "the LightningModule, as package.Class; --model.NAME=VALUE sets its argument"),
    ("data", "CLASS", "the LightningDataModule, in the same way"),
    ("ckpt_path", "FILE", "a checkpoint to load; last: the newest one of this configuration"),
    ("trainer.strategy", "NAME", f"ring_ddp, pipeline_1f1b, auto, ...; '{PROGRAM} strategies' describes them"),
    ("trainer.devices", "N", "ranks on each host (default: auto)"),
    ("trainer.num_nodes", "N", "hosts (default: 1)"),
    ("trainer.accelerator", "TYPE", "cpu, gpu or auto"),
    ("trainer.precision", "TYPE", "32-true, bf16-mixed, 16-mixed, 64-true and others"),
    ("trainer.callbacks", "CLASS", "a callback; --trainer.callbacks+=CLASS adds another"),
    ("trainer.logger", "CLASS", "a logger, or false"),
    ("trainer.default_root_dir", "DIR", "for logs and checkpoints"),
    ("trainer.fast_dev_run", "N", "only N batches, without logs and checkpoints; true: 1"),
    ("seed_everything", "N", "the seed of random numbers (default: 0)"),
)
_OF_TRAINING = (
    ("resume", "RUN", "a run's directory: continue from its newest checkpoint, with its settings"),
    ("optimizer", "CLASS", "instead of the model's configure_optimizers()"),
    ("lr_scheduler", "CLASS", "the same for the learning rate"),
    ("trainer.max_epochs", "N", "stop after N epochs"),
    ("trainer.max_steps", "N", "stop after N optimizer steps"),
    ("trainer.accumulate_grad_batches", "N", "batches for each optimizer step (default: 1)"),
    ("trainer.gradient_clip_val", "X", "clip gradients to this norm"),
    ("trainer.limit_train_batches", "N", "batches of an epoch, or their share"),
)
_PRINTING = (
    ("print_config", "", "print all settings as YAML, those of the command line included, and run nothing"),
    (
        ALL_OPTIONS.removeprefix("--"),
        "",
        "all options with types and defaults; takes seconds, since it imports Lightning",
    ),
    ("trainer.strategy.help", "CLASS", "the options of a class, as lightning_multigpu.RingDDPStrategy"),
)


def page(name: str) -> str:
    """The help of ``fit``, ``validate``, ``test`` or ``predict``: the most used options, a line each."""
    return "\n".join(
        [
            f"usage: {PROGRAM} {name} --config FILE [options]",
            f"       {PROGRAM} {name} --model CLASS [--data CLASS] [--trainer.OPTION VALUE ...]",
            "",
            "most used options:",
            *_lines([*_COMMON, *(_OF_TRAINING if name == _TRAINING else ())]),
            "",
            "options that print:",
            *_lines(_PRINTING),
        ]
    )


def _lines(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    return [f"  {f'--{option} {value}'.rstrip():<35} {description}" for option, value, description in rows]
