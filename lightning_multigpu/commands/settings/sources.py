"""The settings of a command line, in the order given: each option, and each setting of a configuration file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_multigpu._suggest import nearest
from lightning_multigpu.commands.usage import UsageError

_NOT_SETTINGS = ("h", "help", "help_all", "print_config")

Settings = dict[str, Any]
"""Dotted name -> value, with the index of a list: ``"trainer.callbacks[0].class_path"``."""


def options(arguments: Sequence[str]) -> Iterator[tuple[str, str]]:
    """``--a=1 --b 2 -c x`` as ("a", "1"), ("b", "2"), ("c", "x"); options that only print are left out."""
    index = 0
    while index < len(arguments):
        argument = arguments[index]
        index += 1
        if not argument.startswith("-"):
            continue
        option, equals, value = argument.lstrip("-").partition("=")
        if not equals and index < len(arguments) and not arguments[index].startswith("--"):
            value = arguments[index]
            index += 1
        if option.rpartition(".")[2] not in _NOT_SETTINGS:
            yield option.removesuffix("+"), value


def sources(arguments: Sequence[str]) -> Iterator[tuple[str | None, Settings]]:
    """The settings of each option (None) and configuration file (its path).

    Raises:
        UsageError: a file cannot be read.
    """
    for option, value in options(arguments):
        if option in ("c", "config"):
            yield value, flat(load(value))
            continue
        try:
            yield None, flat(yaml.safe_load(value), option)
        except yaml.YAMLError:
            yield None, {option: value}


def flat(value: Any, name: str = "") -> Settings:
    """Nested settings by their dotted names."""
    if isinstance(value, Mapping) and (value or not name):
        inner = {f"{name}.{key}" if name else str(key): each for key, each in value.items()}
    elif isinstance(value, list) and value:
        inner = {f"{name}[{index}]": each for index, each in enumerate(value)}
    else:
        return {name: value}
    return {key: each for key, value in inner.items() for key, each in flat(value, key).items()}


def load(path: str, *, example: str = "trainer: {max_epochs: 3}") -> Mapping[str, Any]:
    """The settings in a configuration file.

    Args:
        path: of the file.
        example: of a setting, for the message.

    Raises:
        UsageError: the file is missing, cannot be read, is not YAML or holds something else than settings.
    """
    file = Path(path)
    try:
        loaded = yaml.safe_load(file.read_text())
    except FileNotFoundError:
        siblings = {sibling.stem: str(sibling) for sibling in file.parent.glob("*.y*ml")}
        near = nearest(file.stem, siblings)
        hint = f" Did you mean {siblings[near]!r}?" if near else ""
        raise UsageError(f"--config={path}: there is no such file.{hint}") from None
    except IsADirectoryError:
        raise UsageError(f"--config={path}: this is a directory; pass a file in it") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--config={path}: this file cannot be read: {error}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise UsageError(f"{path}{place}: this is not YAML: {getattr(error, 'problem', error)}") from error
    if not isinstance(loaded, dict):
        raise UsageError(f"{path}: not settings, as in {example!r}, but {loaded!r:.40}")
    return loaded
