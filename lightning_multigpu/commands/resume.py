"""``fit --resume`` and ``--ckpt_path last``: the checkpoint and the settings of an earlier run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import yaml
from lightning.pytorch.utilities import rank_zero_only

from lightning_multigpu._suggest import did_you_mean
from lightning_multigpu.commands.usage import UsageError
from lightning_multigpu.job.checkpoint_files.last_checkpoint import (
    CheckpointFile,
    complete_checkpoints,
    folders_of,
    newest,
    runs_of,
    short,
)
from lightning_multigpu.strategies.base import MultiGPUStrategy

OPTION = "resume"
HELP = (
    "A run's directory, or a checkpoint file: goes on from the newest complete checkpoint there, with the settings "
    "that the run has saved beside it; further options and --config override them."
)
_CONFIG = "config.yaml"  # as LightningCLI names it
_WORDS = ("best", "last", "hpc", "registry")  # Lightning's, in place of a checkpoint


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

    def check(self, settings: Mapping[str, Any]) -> None:
        """Checks that the section ``model`` of a new run's settings is as that of the run was.

        Raises:
            UsageError: it is not; the message names each setting with both values.
        """
        if self.config is None:
            return
        if differing := "; ".join(_differences(_load(self.config).get("model"), settings.get("model"), "model")):
            raise UsageError(
                f"the model differs from that of {short(str(self.config))}: {differing}. To resume that run, leave the "
                "model's settings out; for another run, leave --resume out"
            )

    def tell(self) -> None:
        settings = "" if self.config is None else f", with the settings of {short(str(self.config))}"
        _tell(f"Resumes from {self.file}{settings}")


def check_checkpoint(path: object) -> None:
    """Checks that a checkpoint exists; Lightning's words ("best", "last"...) and URLs pass.

    Raises:
        UsageError: it does not.
    """
    if path and str(path) not in _WORDS and ":" not in str(path) and not Path(str(path)).exists():
        hint = did_you_mean(str(path), map(str, Path(str(path)).parent.glob("*.ckpt")))
        raise UsageError(f"ckpt_path={str(path)!r}: there is no such file. {hint}".rstrip())


def check_epochs(file: CheckpointFile, max_epochs: int | None) -> None:
    """Checks that a fit up to ``max_epochs`` does not end before the checkpoint's epoch, which Lightning refuses on
    every rank.

    Raises:
        UsageError: it does.
    """
    if max_epochs is not None and -1 < max_epochs < file.epoch:
        raise UsageError(
            f"{file} is beyond max_epochs={max_epochs}; pass --trainer.max_epochs={file.epoch + 2} or more"
        )


def taken_out(arguments: Sequence[str]) -> tuple[str | None, list[str]]:
    """The value of ``--resume``, None where it is not given, and the other arguments of the subcommand.

    Raises:
        UsageError: its value is missing.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument(f"--{OPTION}", metavar="RUN")
    try:
        found, others = parser.parse_known_args(list(arguments))
    except argparse.ArgumentError as error:
        raise UsageError("--resume takes a run's directory: --resume runs/ring_ddp/version_0") from error
    return found.resume, others


def find(path: str) -> Resumption:
    """The run to resume; ``path`` is its directory or one of its checkpoints.

    Raises:
        UsageError: there is no such directory, or no complete checkpoint in it.
    """
    if "://" not in path and not Path(path).exists():
        raise UsageError(f"--resume={path}: there is no such directory")
    file = newest(complete_checkpoints(path))
    if file is None:
        raise UsageError(
            f"--resume={path}: there is no complete checkpoint in it or below it; leave --resume out to begin anew"
        )
    return Resumption(file, _config_of(file))


def find_last(trainer: pl.Trainer, settings: Mapping[str, Any]) -> CheckpointFile | None:
    """The newest complete checkpoint of the runs of a Trainer's logger, or of the folders that it saves to.

    Runs whose model or data were configured otherwise do not count. A rank other than 0 of a strategy of this pack may
    find none: it takes what rank 0 has found.

    Raises:
        UsageError: there is none.
    """
    given = [str(path) for each in trainer.checkpoint_callbacks if (path := getattr(each, "dirpath", None))]
    runs = runs_of(trainer)
    places = given or ([runs] if runs is not None else folders_of(trainer))
    files = [file for place in places for file in complete_checkpoints(place)]
    found = newest(file for file in files if not _settings_differ(file, settings))
    if found is None and (trainer.is_global_zero or not isinstance(trainer.strategy, MultiGPUStrategy)):
        shown = " or ".join(map(short, places)) or "a directory of this run"
        problem = f"ckpt_path='last': there is no complete checkpoint of this configuration in {shown}"
        if (other := newest(files)) is None:
            raise UsageError(f"{problem}; leave --ckpt_path out to begin anew")
        differing = "; ".join(_settings_differ(other, settings))
        raise UsageError(
            f"{problem}. The newest of another one is {other} ({differing}): to take it all the same, pass its path"
        )
    if found is not None:
        _tell(f"ckpt_path='last' is {found}")
    return found


def _settings_differ(file: CheckpointFile, settings: Mapping[str, Any]) -> list[str]:
    config = _config_of(file)
    saved = {} if config is None else _load(config)
    return [
        difference
        for section in ("model", "data")
        if section in saved
        for difference in _differences(saved[section], settings.get(section), section)
    ]


def _config_of(file: CheckpointFile) -> Path | None:
    """Settings are saved beside the logs, one folder above the checkpoints, or among them."""
    if "://" in file.path:
        return None
    folder = Path(file.folder)
    return next((path for path in (folder / _CONFIG, folder.parent / _CONFIG) if path.is_file()), None)


def _load(config: Path) -> Mapping[str, Any]:
    try:
        loaded = yaml.safe_load(config.read_text())
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(f"{config}: these settings of an earlier run cannot be read: {error}") from error
    return loaded if isinstance(loaded, dict) else {}


def _differences(saved: Any, now: Any, key: str) -> Iterator[str]:
    """Settings that differ; a setting that only the newer code of a class has is not compared."""
    if isinstance(saved, Mapping) and isinstance(now, Mapping):
        if saved.get("class_path") != now.get("class_path"):
            yield f"{key}.class_path was {saved.get('class_path')}, and is {now.get('class_path')}"
            return
        for name in saved.keys() & now.keys():
            yield from _differences(saved[name], now[name], f"{key}.{name}")
    elif saved != now:
        yield f"{key} was {saved}, and is {now}"


@rank_zero_only
def _tell(line: str) -> None:
    print(line, file=sys.stderr)
