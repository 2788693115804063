"""``lightning-multigpu fit|validate|test|predict``: Lightning's command line with the strategies of this pack."""

from __future__ import annotations

import os
from argparse import ArgumentError
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.cli import LightningArgumentParser, LightningCLI
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import Strategy
from typing_extensions import override

from lightning_multigpu.commands.settings import check_checkpoint, check_trainer_settings, path_of_strategy_class
from lightning_multigpu.commands.usage import PROGRAM, UsageError
from lightning_multigpu.commands.wrong_key import condensed, raise_for_wrong_key
from lightning_multigpu.registry import REGIMES

_REFUSALS = (ValueError, TypeError, MisconfigurationException)
# What these refuse is a setting of the user's, not a bug that needs a traceback.
_NOT_USERS = ("lightning.", "lightning_multigpu.")


def run(name: str, arguments: Sequence[str]) -> int:
    """Parses the arguments as LightningCLI does and runs ``Trainer.<name>``.

    Raises:
        UsageError: an argument, a configuration file or a setting is wrong; no process has been started.
        SystemExit: for ``--help`` and ``--print_config``.
    """
    TrainingCLI([name, *arguments])
    return 0


def _defaults_of_environment() -> dict[str, int]:
    """The numbers of hosts and ranks that ``emulate`` has set; a Trainer reads them only where it is given none."""
    names = {"num_nodes": "PL_TRAINER_NUM_NODES", "devices": "PL_TRAINER_DEVICES"}
    return {name: int(os.environ[variable]) for name, variable in names.items() if variable in os.environ}


class TrainingParser(LightningArgumentParser):
    """Remembers what the first class that could not be made raised.

    jsonargparse buries it, without its traceback, in a list of all the types that the value did not fit.

    Attributes:
        failure: the class and the exception; None so far.
    """

    failure: tuple[type, Exception] | None = None

    @override
    def add_instantiator(self, instantiator: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        @wraps(instantiator)
        def remembering(class_type: type, *class_args: Any, **class_kwargs: Any) -> Any:
            try:
                return instantiator(class_type, *class_args, **class_kwargs)
            except Exception as error:
                self.failure = self.failure or (class_type, error)
                raise

        super().add_instantiator(remembering, *args, **kwargs)


class TrainingCLI(LightningCLI):
    """LightningCLI that refuses what is wrong in one message, before any process is started.

    Model and data are given by their classes (``--model=examples.digits.DigitClassifier``). The configuration is
    saved beside the logs, over that of an earlier run there.

    Args:
        arguments: the subcommand and its options.

    Raises:
        UsageError: an argument, a configuration file or a setting is wrong.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        names = ", ".join(regime.name for regime in REGIMES)
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
                **{name: {"description": described} for name in self.subcommands()},
            },
        )

    @override
    def parse_arguments(self, parser: LightningArgumentParser, args: Any) -> None:
        try:
            self.config = parser.parse_args(args)
            strategy = self.config[self.config.subcommand].trainer.strategy
            if isinstance(strategy, str) and (path := path_of_strategy_class(strategy)) is not None:
                self.config = parser.parse_args([*args, f"--trainer.strategy.class_path={path}"])
        except ArgumentError as error:
            subcommand, *rest = args
            known = self._subcommand_parsers[subcommand].get_defaults(skip_validation=True).keys()
            raise_for_wrong_key(rest, list(known))
            raise UsageError(condensed(error.message)) from error
        settings = self.config[self.config.subcommand]
        check_trainer_settings(settings.trainer)
        check_checkpoint(settings.ckpt_path)

    @override
    def before_instantiate_classes(self) -> None:
        for base in (Strategy, Callback, Logger):
            self.parser.add_instantiator(lambda cls, *args, **kwargs: cls(*args, **kwargs), base)

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
            raise error from None

    @override
    def instantiate_trainer(self, **kwargs: Any) -> Trainer:
        try:
            return super().instantiate_trainer(**kwargs)
        except _REFUSALS as error:
            raise UsageError(str(error)) from error
