"""The command line: ``lightning-multigpu``, the same as ``python -m lightning_multigpu``.

::

    lightning-multigpu fit --config configs/ring_ddp.yaml --trainer.max_epochs=3
    lightning-multigpu fit --resume runs/ring_ddp/version_0
    lightning-multigpu fit --model=examples.digits.DigitsCNN --data=examples.digits.DigitsData --trainer.max_epochs=3
    lightning-multigpu strategies

``fit``, ``validate``, ``test`` and ``predict`` are Lightning's command line with the names of this pack known to it. A
strategy is given by its name (``--trainer.strategy=ring_ddp``) or, where it takes options, by its class::

    trainer:
      strategy:
        class_path: lightning_multigpu.RingDDPStrategy
        init_args:
          bucket_cap_mb: 50

Modules of the current directory can be imported, so that ``examples.digits`` works from the root of a checkout.

Exit status: 0 for success; 2 when the command line, a configuration file or a setting is wrong, after one message on
standard error and before any rank begins; else that of the failure, with its traceback.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import NamedTuple

from lightning_multigpu._suggest import did_you_mean
from lightning_multigpu.commands.usage import PROGRAM, UsageError


class Command(NamedTuple):
    """A command: its words on the command line, a line of ``--help``, a module of ``lightning_multigpu.commands``.

    The module is imported when the command runs, so that no command pays for another's imports. It has a function
    ``run(name, arguments) -> exit status``.
    """

    name: str
    summary: str
    module: str

    def run(self, arguments: Sequence[str]) -> int:
        """Runs the command with the arguments that follow its name; returns the exit status.

        Raises:
            UsageError: an option is wrong.
            SystemExit: for ``--help``.
        """
        module = import_module(f"lightning_multigpu.commands.{self.module}")
        return int(module.run(self.name, arguments))


COMMANDS: tuple[Command, ...] = (
    Command("new", "write a small project that trains at once", "new"),
    Command("fit", "train a model", "training"),
    Command("validate", "run a model over its validation data", "training"),
    Command("test", "run a model over its test data", "training"),
    Command("predict", "compute a model's predictions", "training"),
    Command("strategies", "list the training strategies and what they send", "strategies"),
    Command("plan", "predict step time, memory and scaling under every strategy, without training", "plans.plan"),
    Command("report", "show the profile of a run again", "profiles"),
    Command("bench collectives", "time and check every collective on each back end", "benches.bench_collectives"),
    Command("bench strategies", "time a training step under several strategies", "benches.bench_strategies"),
    Command("calibrate", "measure this machine for plans", "calibrate"),
    Command("serve", "run a parameter server on this machine, for workers that name it", "serve"),
    Command("emulate", "run a command on emulated hosts of this machine", "emulate"),
    Command("doctor", "check this host, or all hosts of a job, and print what a bug report needs", "doctor"),
    Command("topology", "show what joins the devices, and the path that bytes take", "topology"),
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
    # Behind all others: no file there, of another user perhaps, is taken for the standard library's or a package's.
    if not {"", os.getcwd()} & {*sys.path}:
        sys.path.append(os.getcwd())
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
    if name == "--version":
        print(f"{PROGRAM} {version('lightning-multigpu')} (lightning {version('lightning')}, torch {version('torch')})")
        return 0
    for command in COMMANDS:
        words = command.name.split()
        if [*arguments[: len(words)]] == words:
            return command.run(arguments[len(words) :])
    known = [command.name for command in COMMANDS]
    below = [each.partition(" ")[2] for each in known if each.startswith(f"{name} ")]
    if name in ("-h", "--help") or (below and {"-h", "--help"} & {*rest[:1]}):
        print(_help())
        return 0
    if below:
        hint = did_you_mean(rest[0], below) if rest else ""
        raise UsageError(f"{name} takes a subcommand first, one of {', '.join(below)}. {hint}".rstrip())
    if not name or name.startswith("-"):
        raise UsageError(f"the command comes first, one of {', '.join(known)}; {PROGRAM} --help describes them")
    raise UsageError(f"{name!r} is not a command; known are {', '.join(known)}. {did_you_mean(name, known)}".rstrip())


def _help() -> str:
    width = max(len(command.name) for command in COMMANDS)
    commands = "\n".join(f"  {command.name:<{width}}  {command.summary}" for command in COMMANDS)
    return f"""\
usage: {PROGRAM} COMMAND [options]

Multi-GPU and multi-node training strategies for PyTorch Lightning.

commands:
{commands}

options:
  -h, --help  this text; after a command, that command's options
  --version   the versions of this pack, Lightning and torch

examples:
  {PROGRAM} new my_project
  {PROGRAM} fit --config configs/ring_ddp.yaml
  {PROGRAM} fit --config configs/ring_ddp.yaml --trainer.devices=4 --print_config
  {PROGRAM} fit --resume runs/ring_ddp/version_0
  {PROGRAM} strategies"""


def _report(error: UsageError, arguments: Sequence[str]) -> None:
    # torchrun and srun run this on every rank of a host; they all fail alike, and one message is enough.
    if os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) != "0":
        return
    known = {command.name.split()[0] for command in COMMANDS}
    name = f"{PROGRAM} {arguments[0]}" if arguments and arguments[0] in known else PROGRAM
    print(f"{name}: error: {error}", file=sys.stderr)
