"""``fit --resume``: the checkpoint and the settings of an earlier run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lightning.pytorch.utilities import rank_zero_only

from lightning_multigpu.commands.usage import UsageError
from lightning_multigpu.job.checkpoint_files.last_checkpoint import CheckpointFile, complete_checkpoints, newest, short

OPTION = "resume"
HELP = (
    "A run's directory, or a checkpoint file: goes on from the newest complete checkpoint there, with the settings "
    "that the run has saved beside it; further options and --config override them."
)
_CONFIG = "config.yaml"  # as LightningCLI names it


class Resumption(NamedTuple):
    """An earlier run that is to go on: its newest complete checkpoint, and the settings saved beside it, if any."""

    file: CheckpointFile
    config: Path | None

    def options(self, given: Sequence[str]) -> list[str]:
        """The options of the run, overridden by those that were given with ``--resume``.

        Raises:
            UsageError: a checkpoint was given as well.
        """
        if any(option.partition("=")[0] == "--ckpt_path" for option in given):
            raise UsageError(f"--resume and --ckpt_path exclude each other; --resume takes {self.file} by itself")
        saved = [] if self.config is None else [f"--config={short(str(self.config))}"]
        return [*saved, *given, "--ckpt_path=null"]  # set once all is parsed: the saved settings may name another file

    @rank_zero_only
    def tell(self) -> None:
        settings = "" if self.config is None else f", with the settings of {short(str(self.config))}"
        print(f"Resumes from {self.file}{settings}", file=sys.stderr)


def taken_out(arguments: Sequence[str]) -> tuple[Resumption | None, list[str]]:
    """The run of ``--resume``, None where it is not given, and the other arguments of the subcommand.

    Raises:
        UsageError: its value is missing, there is no such directory, or no complete checkpoint in it.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(f"--{OPTION}", metavar="RUN")
    try:
        found, others = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise UsageError("--resume takes a run's directory: --resume runs/ring_ddp/version_0") from error
    path = found.resume
    if path is None:
        return None, others
    if "://" not in path and not Path(path).exists():
        raise UsageError(f"--resume={path}: there is no such directory")
    file = newest(complete_checkpoints(path))
    if file is None:
        raise UsageError(
            f"--resume={path}: there is no complete checkpoint in it or below it; leave --resume out to begin anew"
        )
    folder = Path(file.folder)
    configs = [folder / _CONFIG, folder.parent / _CONFIG]  # beside the logs, one folder above the checkpoints
    return Resumption(file, next((each for each in configs if "://" not in path and each.is_file()), None)), others
