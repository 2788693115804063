"""The command line: ``lightning-multigpu``, the same as ``python -m lightning_multigpu``.

::

    lightning-multigpu fit --config configs/ring_ddp.yaml --trainer.max_epochs=3
    lightning-multigpu fit --model=examples.digits.DigitClassifier --trainer.strategy=ring_ddp --trainer.devices=2
    lightning-multigpu strategies --json

``fit``, ``validate``, ``test`` and ``predict`` are Lightning's command line with the names of this pack known to it. A
strategy is given by its name (``--trainer.strategy=ring_ddp``) or, where it takes options, by its class::

    trainer:
      strategy:
        class_path: lightning_multigpu.RingDDPStrategy
        init_args:
          bucket_cap_mb: 50

Modules of the current directory can be imported, so that ``examples.digits`` works from the root of a checkout.

Exit status: 0 for success; 2 when the command line, a configuration file or a setting is wrong, after one message on
standard error and before any process is started; else that of the failure, with its traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version

from lightning_multigpu._suggest import did_you_mean
from lightning_multigpu.commands.usage import PROGRAM, UsageError


@dataclass(frozen=True)
class Command:
    """One subcommand. Its module is imported when it runs, so that no subcommand pays for another's imports.

    Args:
        name: the word on the command line.
        summary: what it does, in one line of ``--help``.
        module: where its function ``run(name, arguments) -> exit status`` is.
    """

    name: str
    summary: str
    module: str

    def run(self, arguments: Sequence[str]) -> int:
        """Runs the subcommand with the arguments that follow its name; returns the exit status."""
        run: Callable[[str, Sequence[str]], int] = import_module(self.module).run
        return run(self.name, arguments)


COMMANDS: tuple[Command, ...] = (
    Command("fit", "train a model", "lightning_multigpu.commands.training"),
    Command("validate", "run a model over its validation data", "lightning_multigpu.commands.training"),
    Command("test", "run a model over its test data", "lightning_multigpu.commands.training"),
    Command("predict", "compute a model's predictions", "lightning_multigpu.commands.training"),
    Command("strategies", "list the training regimes and what they send", "lightning_multigpu.commands.strategies"),
    Command("pipeline", "predict what a pipeline takes, without training", "lightning_multigpu.commands.pipeline"),
    Command("bench", "time collectives or strategies on this machine", "lightning_multigpu.commands.bench"),
    Command("emulate", "run a command on emulated hosts of this machine", "lightning_multigpu.commands.emulate"),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit status.

    Args:
        arguments: what follows the program's name; by default those of this process. Ranks that are started by
            running the script again get the arguments of this *process*, so a script that passes others must pass
            them again when it is rerun.

    Raises:
        SystemExit: help or a printed configuration was asked for; its code is the exit status.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    _make_current_directory_importable()
    try:
        return _dispatch(arguments)
    except UsageError as error:
        _report(error, arguments)
        return 2
    except BrokenPipeError:
        # The reader has gone, as in "... | head"; without this the interpreter's own flush at exit complains.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _dispatch(arguments: Sequence[str]) -> int:
    name, *rest = arguments or ("",)
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name == "--version":
        print(f"{PROGRAM} {version('lightning-multigpu')} (lightning {version('lightning')}, torch {version('torch')})")
        return 0
    commands = {command.name: command for command in COMMANDS}
    if name in commands:
        return commands[name].run(rest)
    known = ", ".join(commands)
    if not name:
        raise UsageError(f"a command is needed, one of {known}; {PROGRAM} --help describes them")
    if name.startswith("-"):
        raise UsageError(f"{name!r} stands before the command; the command comes first, one of {known}")
    raise UsageError(f"{name!r} is not a command; known are {known}. {did_you_mean(name, commands)}".rstrip())


def _help() -> str:
    width = max(len(command.name) for command in COMMANDS)
    lines = [f"  {command.name:<{width}}  {command.summary}" for command in COMMANDS]
    return "\n".join(
        [
            f"usage: {PROGRAM} COMMAND [options]",
            "",
            "Multi-GPU and multi-node training regimes as PyTorch Lightning strategies.",
            "",
            "commands:",
            *lines,
            "",
            "options:",
            "  -h, --help  this text; after a command, that command's options",
            "  --version   the versions of this pack, Lightning and torch",
            "",
            "examples:",
            f"  {PROGRAM} fit --config configs/ring_ddp.yaml",
            f"  {PROGRAM} fit --config configs/ring_ddp.yaml --trainer.devices=4 --print_config",
            f"  {PROGRAM} strategies",
        ]
    )


def _report(error: UsageError, arguments: Sequence[str]) -> None:
    # torchrun and srun run this on every rank of a host; they all fail alike, and one message is enough.
    if os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) != "0":
        return
    known = [command.name for command in COMMANDS]
    name = f"{PROGRAM} {arguments[0]}" if arguments and arguments[0] in known else PROGRAM
    print(f"{name}: error: {error}", file=sys.stderr)


def _make_current_directory_importable() -> None:
    """As ``python -m`` does: the console script has its own directory in ``sys.path`` instead."""
    here = os.getcwd()
    if not sys.flags.safe_path and "" not in sys.path and here not in sys.path:
        sys.path.insert(0, here)
