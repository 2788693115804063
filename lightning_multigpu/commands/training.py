"""``lightning-multigpu fit|validate|test|predict``: Lightning's command line with the strategies of this pack."""

from __future__ import annotations

import os
import re
from argparse import SUPPRESS, ArgumentError
from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from typing_extensions import override

import lightning_multigpu.strategies  # noqa: F401  # jsonargparse finds imported classes by their names alone
from lightning_multigpu._suggest import did_you_mean
from lightning_multigpu.commands import resume
from lightning_multigpu.commands.usage import PROGRAM, UsageError
from lightning_multigpu.registry import STRATEGIES

_REFUSALS = (ValueError, TypeError, MisconfigurationException)
# What these refuse is a setting of the user's, not a bug that needs a traceback.
_NOT_USERS = ("lightning.", "lightning_multigpu.")


def run(name: str, arguments: Sequence[str]) -> int:
    """Parses the arguments as LightningCLI does and runs ``Trainer.<name>``."""
    TrainingCLI([name, *arguments])
    return 0


def _defaults_of_environment() -> dict[str, int]:
    """The numbers of hosts and ranks that ``emulate`` has set; a Trainer reads them only where it is given none."""
    names = {"num_nodes": "PL_TRAINER_NUM_NODES", "devices": "PL_TRAINER_DEVICES"}
    return {name: int(os.environ[variable]) for name, variable in names.items() if variable in os.environ}


class TrainingParser(LightningArgumentParser):
    """Remembers what the first class that could not be made raised.

    jsonargparse buries it, without its traceback, in a list of all the types that the value did not fit.
    """

    failure: tuple[type, Exception] | None = None

    @override
    def add_instantiator(self, instantiator: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        super().add_instantiator(_Remembering(self, instantiator), *args, **kwargs)


class _Remembering:
    """An instantiator of :class:`TrainingParser`; the callback that saves settings takes it to spawned ranks."""

    def __init__(self, parser: TrainingParser, instantiator: Callable[..., Any]) -> None:
        update_wrapper(self, instantiator)  # jsonargparse passes what its signature asks for
        self._parser = parser
        self._instantiator = instantiator

    def __call__(self, class_type: type, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._instantiator(class_type, *args, **kwargs)
        except Exception as error:
            self._parser.failure = self._parser.failure or (class_type, error)
            raise


def _instance(cls: type, *args: Any, **kwargs: Any) -> Any:
    return cls(*args, **kwargs)


class TrainingCLI(LightningCLI):
    """LightningCLI that refuses what is wrong in one message, before any process is started.

    Model and data are given by their classes (``--model=examples.digits.DigitsCNN``). The configuration is
    saved beside the logs, over that of an earlier run there. ``wanted`` are further options, for subclasses.

    Raises:
        UsageError: an argument, a configuration file or a setting is wrong.
    """

    def __init__(self, arguments: Sequence[str], wanted: Any = None) -> None:
        self._wanted = wanted
        names = ", ".join(row.name for row in STRATEGIES)
        self._command = arguments[0]
        described = f"Strategies of this pack: {names}; '{PROGRAM} strategies' describes them. Else as LightningCLI."
        super().__init__(
            args=list(arguments),
            parser_class=TrainingParser,
            seed_everything_default=0,
            subclass_mode_model=True,
            subclass_mode_data=True,
            save_config_kwargs={"overwrite": True},
            trainer_defaults=_defaults_of_environment(),
            parser_kwargs={
                "prog": PROGRAM,
                "exit_on_error": False,
                "allow_abbrev": False,
                self._command: {"description": described},
            },
        )

    @override
    def subcommands(self) -> dict[str, set[str]]:  # type: ignore[override]  # static in Lightning, which asks self
        """The one that was asked for: making the parsers of the others would take three quarters of the time."""
        return {self._command: super().subcommands()[self._command]}

    @override
    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        if self._command == "fit":  # for --help: the option is taken out before the parser sees it
            parser.add_argument(f"--{resume.OPTION}", type=str, default=SUPPRESS, metavar="RUN", help=resume.HELP)

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        self._resumption: resume.Resumption | None = None
        if self._command == "fit":
            self._resumption, given = resume.taken_out(args[1:])
            args = [args[0], *(given if self._resumption is None else self._resumption.options(given))]
        try:
            self.config = parser.parse_args(args)
            strategy = self.config[self.config.subcommand].trainer.strategy
            classes = {row.class_path.rpartition(".")[2]: row.class_path for row in STRATEGIES}
            # A path is a class's, of any module: one of the user's may have the name of one of this pack.
            path = strategy if "." in str(strategy) else classes.get(str(strategy))
            if isinstance(strategy, str) and path:
                self.config = parser.parse_args([*args, f"--trainer.strategy.class_path={path}"])
        except ArgumentError as error:
            raise UsageError(error.message) from error
        settings = self.config[self.config.subcommand]
        if resume.OPTION in settings:
            raise UsageError("resume is an option of the command line, and no setting of a configuration file")
        hosts = _defaults_of_environment().get("num_nodes", settings.trainer.num_nodes)
        if settings.trainer.num_nodes != hosts:  # each host would train by itself, or wait for others
            raise UsageError(
                f"num_nodes={settings.trainer.num_nodes}, and there are {hosts} hosts (PL_TRAINER_NUM_NODES, which "
                f"'{PROGRAM} emulate' sets); pass --trainer.num_nodes={hosts}, or leave num_nodes out"
            )

    @override
    def before_instantiate_classes(self) -> None:
        if self._resumption is not None:
            self.config[self.config.subcommand].ckpt_path = self._resumption.file.path
            self._resumption.tell()
        for base in (Strategy, Callback, Logger):
            self.parser.add_instantiator(_instance, base)

    @override
    def instantiate_classes(self) -> None:
        try:
            super().instantiate_classes()
        except Exception:
            assert isinstance(self.parser, TrainingParser)
            if self.parser.failure is None:
                raise
            failed, error = self.parser.failure
            if isinstance(error, _REFUSALS) and failed.__module__.startswith(_NOT_USERS):
                raise UsageError(str(error)) from error
            if isinstance(error, ModuleNotFoundError) and failed.__module__.startswith(_NOT_USERS):
                command = re.search(r"`(pip install .+?)`", str(error))
                raise UsageError(
                    f"{failed.__name__} needs a missing package: {command[1] if command else error}"
                ) from error
            raise error from None

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        try:
            return super().instantiate_trainer(**kwargs)
        except _REFUSALS as error:
            is_name = "invalid strategy name" in str(error)
            hint = did_you_mean(self.config_init[self._command].trainer.strategy, StrategyRegistry) if is_name else ""
            raise UsageError(f"{error} {hint}".rstrip()) from error
