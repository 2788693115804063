"""``fit``, ``validate``, ``test`` and ``predict``: other ranks start while this process imports Lightning."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import yaml

from lightning_multigpu._usable_cores import usable_cores
from lightning_multigpu.commands.usage import COMMAND, PROGRAM
from lightning_multigpu.job.waiting_ranks import ranks_started
from lightning_multigpu.registry import STRATEGIES

_LAUNCHERS = ("LOCAL_RANK", "SLURM_NTASKS", "LSB_JOBID", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def run(name: str, arguments: Sequence[str]) -> int:
    """Runs the subcommand."""
    # Ranks run the command line of this process again, and a program that calls main(arguments) has another one.
    is_own = Path(sys.argv[0]).name in (PROGRAM, "__main__.py") and sys.argv[1:] == [name, *arguments]
    only_prints = any(argument.startswith(("-h", "--help", "--print_config")) for argument in arguments)
    count = ranks_to_start(arguments, os.environ) if is_own and not only_prints else 1
    with ranks_started(range(1, count), [*COMMAND, *sys.argv[1:]]):
        status: int = import_module("lightning_multigpu.commands.training").run(name, arguments)
    return status


def ranks_to_start(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """The number of ranks of this host that import Lightning at the same time, this process included.

    It is that of ``devices``, and at most that of processor cores: on a core that they share, ranks would only delay
    each other and an error message. 1 where ranks are started otherwise than by running the command line again, and
    where only Lightning can read the settings: a rank that does not wait is started at the launch.
    """
    if any(name in environment for name in _LAUNCHERS) or any("start_method" in each for each in arguments):
        return 1
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for option in ("--resume", "--trainer.devices", "--trainer.strategy", "--trainer.strategy.class_path"):
        parser.add_argument(option)
    parser.add_argument("-c", "--config", action="append", default=[])
    trainer: dict[str, Any] = {"devices": environment.get("PL_TRAINER_DEVICES")}
    with contextlib.suppress(Exception):  # what is wrong, the parser says
        given = vars(parser.parse_known_args(list(arguments))[0])
        for file in (given["resume"] and f"{given['resume']}/config.yaml", *given["config"]):
            if file:
                trainer |= yaml.safe_load(Path(file).read_text()).get("trainer", {})
        trainer |= {name[8:]: value for name, value in given.items() if name.startswith("trainer.") and value}
    devices, strategy = str(trainer["devices"]), trainer.get("strategy.class_path", trainer.get("strategy"))
    if not devices.isdigit() or not _runs_script_again(strategy):
        return 1
    return max(1, min(int(devices), usable_cores()))


def _runs_script_again(strategy: Any) -> bool:
    """Whether a strategy, as in a configuration file, is one of this pack's with ``start_method="popen"``."""
    options: Any = {}
    if isinstance(strategy, Mapping):
        strategy, options = strategy.get("class_path"), strategy.get("init_args") or {}
    for row in STRATEGIES:
        if strategy == row.name or str(strategy).rpartition(".")[2] == row.class_path.rpartition(".")[2]:
            return bool((options or row.options).get("start_method", "popen") == "popen")
    return False
