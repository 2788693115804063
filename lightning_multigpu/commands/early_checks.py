"""The part of ``fit``, ``validate``, ``test`` and ``predict`` that does not import Lightning, which takes seconds.

A misspelt setting or strategy is refused at once, ``--help`` prints the most used options, and ranks that the command
line will need are started while this process imports Lightning. What is below a class's setting jsonargparse checks.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from lightning_multigpu._suggest import did_you_mean, nearest
from lightning_multigpu._usable_cores import usable_cores
from lightning_multigpu.commands.fit_help import ALL_OPTIONS, page
from lightning_multigpu.commands.settings import Settings, options, sources
from lightning_multigpu.commands.usage import COMMAND, PROGRAM, UsageError
from lightning_multigpu.job.waiting_ranks import ranks_started
from lightning_multigpu.registry import STRATEGIES

# Of LightningCLI and of TrainingCLI; the arguments of Trainer and of its methods are read from Lightning's source.
_SETTINGS = ("config", "seed_everything", "model", "data", "optimizer", "lr_scheduler")
_LAUNCHERS = ("LOCAL_RANK", "SLURM_NTASKS", "LSB_JOBID", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_CHECKPOINT_WORDS = ("best", "last", "hpc", "registry")
_NOT_SETTINGS = ("self", "model", "datamodule", "dataloaders", "train_dataloaders", "val_dataloaders")
_CLASS_SETTING = re.compile(
    r"(?:model|data|optimizer|lr_scheduler|trainer\.(?:strategy|callbacks|logger))(?:\[\d+\])?\.(\w+)"
)
_CLASS_KEYS = ("class_path", "init_args", "dict_kwargs")
_MISSPELT = 0.85


def run(name: str, arguments: Sequence[str]) -> int:
    """Runs the subcommand."""
    if {"-h", "--help"} & set(arguments):
        print(page(name))
        raise SystemExit(0)
    count = ranks_to_start(checked_settings(name, arguments), os.environ)
    # Ranks run the command line of this process again, and a program that calls main(arguments) has another one.
    is_own = Path(sys.argv[0]).name in (PROGRAM, "__main__.py") and sys.argv[1:] == [name, *arguments]
    only_prints = any(argument.startswith(("-h", "--help", "--print_config")) for argument in arguments)
    with ranks_started(range(1, count) if is_own and not only_prints else (), [*COMMAND, *sys.argv[1:]]):
        given = ["--help" if argument == ALL_OPTIONS else argument for argument in arguments]
        status: int = import_module("lightning_multigpu.commands.training").run(name, given)
    return status


def checked_settings(name: str, arguments: Sequence[str], *, also: Sequence[str] = ()) -> Settings:
    """The settings of a subcommand's arguments, or none where only Lightning can read them.

    ``also`` are further names of options, which a misspelt one may mean.

    Raises:
        UsageError: a setting, or a strategy of this pack has a wrong name, or a file is missing or cannot be read.
    """
    known = settings_of(name)
    run = dict(options(arguments)).get("resume")
    if run:
        check_run(run)
    if run and Path(run, "config.yaml").is_file():
        arguments = [f"--config={run}/config.yaml", *arguments]
    files = [value for option, value in options(arguments) if option in ("c", "config")]
    # A configuration may also be given as text or as a URL, and be empty: jsonargparse reads these.
    if not known or any(":" in file or (Path(file).is_file() and not Path(file).stat().st_size) for file in files):
        return {}
    settings: Settings = {}
    for file, of_source in sources(arguments):
        for path, value in of_source.items():
            _check_key(file, path, [*known, *also])
            settings = {key: each for key, each in settings.items() if not key.startswith((f"{path}.", f"{path}["))}
            settings[path] = value
    if isinstance(strategy := settings.get("trainer.strategy"), str):
        check_strategy(strategy)
    if not run:
        check_checkpoint(settings.get("ckpt_path"))
    return settings


def _check_key(file: str | None, path: str, known: Sequence[str]) -> None:
    """Checks a dotted name, but for the arguments of a class."""
    found = _CLASS_SETTING.match(path)
    if file is not None and found is not None and found[1] not in _CLASS_KEYS:
        right = nearest(found[1], _CLASS_KEYS) or f"init_args.{found[1]}"
        raise UsageError(f"{file}: {path} is not a setting. Did you mean {right!r}?")
    words = path.partition("[")[0].split(".")
    names = {".".join(words[:end]) for end in range(1, len(words) + 1)}
    sections = {name.split(".")[0] for name in known}
    if names & {*known} or path in sections:
        return
    dashes = "--" if file is None else ""
    by_last_word = {name.rpartition(".")[2]: name for name in known}
    near = None if words[0] in sections else nearest(words[0], sections)
    if near is None and (last := nearest(words[-1], by_last_word)) is not None:
        near = by_last_word[last]
    here = [name for name in known if name.startswith(f"{words[0]}.")] or sections
    hint = f"Did you mean '{dashes}{near}'?" if near else f"Known: {', '.join(sorted(here))}"
    raise UsageError(f"{file + ': ' if file else ''}{dashes}{path} is not a setting. {hint}")


def check_strategy(name: str) -> None:
    """Checks that a strategy's name is not a misspelt name of this pack.

    Another name may be Lightning's, or one that the user's own module registers. Such a name often contains one of this
    pack's ("my_ring_ddp"), which a misspelt one does not.

    Raises:
        UsageError: it is one.
    """
    near = nearest(name.lower(), [row.name for row in STRATEGIES])
    if near and near not in name.lower() and SequenceMatcher(None, name.lower(), near).ratio() >= _MISSPELT:
        raise UsageError(f"strategy={name!r}: there is no such strategy. Did you mean {near!r}?")


def check_run(path: str) -> None:
    """Checks that a run to resume exists; URLs pass.

    Raises:
        UsageError: it does not.
    """
    if "://" not in path and not Path(path).exists():
        raise UsageError(f"--resume={path}: there is no such directory")


def check_checkpoint(path: object) -> None:
    """Checks that a checkpoint exists; Lightning's words ("best", "last"...) and URLs pass.

    Raises:
        UsageError: it does not.
    """
    if path and str(path) not in _CHECKPOINT_WORDS and ":" not in str(path) and not Path(str(path)).exists():
        hint = did_you_mean(str(path), map(str, Path(str(path)).parent.glob("*.ckpt")))
        raise UsageError(f"ckpt_path={str(path)!r}: there is no such file. {hint}".rstrip())


def ranks_to_start(settings: Settings, environment: Mapping[str, str]) -> int:
    """The number of ranks of this host that import Lightning at the same time, this process included.

    It is that of ``devices``, and at most that of processor cores: on a core that they share, ranks would only delay
    each other and an error message. 1 where ranks are started otherwise than by running the command line again.
    """
    if any(name in environment for name in _LAUNCHERS):
        return 1
    devices = str(settings.get("trainer.devices", environment.get("PL_TRAINER_DEVICES")))
    if not devices.isdigit() or not _runs_script_again(settings):
        return 1
    return max(1, min(int(devices), usable_cores()))


def _runs_script_again(settings: Settings) -> bool:
    name = "trainer.strategy"
    strategy = settings.get(f"{name}.class_path", settings.get(name))
    method = settings.get(f"{name}.start_method", settings.get(f"{name}.init_args.start_method", "popen"))
    for row in STRATEGIES:
        if strategy == row.name:
            return bool(row.options.get("start_method", "popen") == "popen")
    classes = {row.class_path.rpartition(".")[2] for row in STRATEGIES}
    return str(strategy).rpartition(".")[2] in classes and method == "popen"


def settings_of(name: str) -> list[str]:
    """The dotted names of all settings of a subcommand; none where Lightning's source cannot be read."""
    package = find_spec("lightning")
    source = Path(str(package.origin if package else "")).with_name("pytorch") / "trainer/trainer.py"
    try:
        classes = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef)]
    except (OSError, SyntaxError):
        return []
    methods: Mapping[str, list[str]] = {
        node.name: [argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)]
        for cls in classes
        if cls.name == "Trainer"
        for node in cls.body
        if isinstance(node, ast.FunctionDef)
    }
    if not {"__init__", name} <= methods.keys():
        return []
    return [
        *_SETTINGS,
        *(["resume"] if name == "fit" else []),
        *(argument for argument in methods[name] if argument not in _NOT_SETTINGS),
        *(f"trainer.{argument}" for argument in methods["__init__"] if argument != "self"),
    ]
