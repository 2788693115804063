"""The parser of subcommands with options of their own, and checks of option values."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml
from typing_extensions import override

from lightning_multigpu._suggest import did_you_mean
from lightning_multigpu.commands.usage import UsageError


class OptionParser(argparse.ArgumentParser):
    """An ``ArgumentParser`` that raises :class:`UsageError` in place of printing its usage, and names what is near."""

    def __init__(self, prog: str, description: str, epilog: str | None = None, usage: str | None = None) -> None:
        super().__init__(
            prog=prog,
            usage=usage,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    @override
    def error(self, message: str) -> NoReturn:
        raise UsageError(message)

    def parse(self, arguments: Sequence[str]) -> argparse.Namespace:
        """The options.

        Raises:
            UsageError: one is unknown or has a wrong value.
            SystemExit: for ``--help``.
        """
        options, unknown = self.parse_known_args(arguments)
        if unknown:
            name = unknown[0].partition("=")[0]
            raise UsageError(f"{name!r} is no option here. {did_you_mean(name, self._option_string_actions)}".rstrip())
        return options


def check_directories(options: argparse.Namespace, *names: str) -> None:
    """Checks that the directories of files that are to be written exist.

    ``names`` are those of options whose values are paths of such files, or None.

    Raises:
        UsageError: a directory does not exist.
    """
    for name in names:
        path: Path | None = getattr(options, name)
        if path is not None and not path.parent.is_dir():
            raise UsageError(f"--{name}={path}: there is no directory {path.parent}; make it first")


def settings_in(path: str) -> Mapping[str, Any]:
    """The settings in a configuration file of ``fit``.

    Raises:
        UsageError: it cannot be read, is not YAML, or has no settings.
    """
    try:
        loaded = yaml.safe_load(Path(path).read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"--config={path}: {getattr(error, 'strerror', None) or error}") from error
    if not isinstance(loaded, dict):
        raise UsageError(f"--config={path}: not settings, as in 'trainer: {{max_epochs: 3}}', but {loaded!r:.40}")
    return loaded


def names_of(name: str, given: Sequence[str], known: Collection[str]) -> list[str]:
    """Names that were given to the option ``name`` with spaces or commas between, in their order, without repetitions.

    Raises:
        UsageError: there is none of that name.
    """
    names = [part.strip().lower().replace("-", "_") for value in given for part in value.split(",") if part.strip()]
    for wrong in (candidate for candidate in names if candidate not in known):
        raise UsageError(f"--{name}: {wrong!r} is unknown. {did_you_mean(wrong, known)} Known: {', '.join(known)}")
    return list(dict.fromkeys(names))


def strategies_of(given: Sequence[str]) -> list[str]:
    """Strategies that were given with spaces or commas between them, as in ``ddp,ring_ddp:compression=int8``.

    A comma before ``option=`` belongs to the options of the strategy before it, and so does one within brackets.

    Raises:
        UsageError: none is given, or one twice.
    """
    found: list[str] = []
    for part in re.findall(r"(?:\{.*?\}(?=,|$)|\[.*?\](?=,|$)|[^,])+", ",".join(given)):
        if found and re.match(r"[^:]+=", part):
            found[-1] += f",{part}"
        elif part.strip():
            found.append(part.strip())
    if not found or len({*found}) < len(found):
        raise UsageError(f"--strategies={' '.join(given)}: name each strategy once, with spaces or commas between")
    return found


def number(kind: Callable[[str], float], at_least: float, *, above: bool = False) -> Callable[[str], float]:
    """The ``type=`` of an option that is a number of at least ``at_least``, or above it."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = float("nan")
        if value < at_least or (above and value == at_least) or value != value or value == float("inf"):
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r}: pass {what} {'above' if above else 'of at least'} {at_least}")
        return value

    return parse
