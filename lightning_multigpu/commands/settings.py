"""The settings of a command line, in their order: each option, and each setting of a configuration file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_multigpu._suggest import did_you_mean
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


def load(path: str) -> Mapping[str, Any]:
    """The settings in a configuration file.

    Raises:
        UsageError: the file is missing, cannot be read, is not YAML, or has no settings.
    """
    try:
        with open(path) as file:
            loaded = yaml.safe_load(file)
    except OSError as error:
        hint = did_you_mean(path, map(str, Path(path).parent.glob("*.y*ml")))
        raise UsageError(f"--config={path}: {error.strerror}. {hint}".rstrip()) from error
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"--config={path}: this is not YAML: {error}") from error
    if not isinstance(loaded, dict):
        raise UsageError(f"--config={path}: not settings, as in 'trainer: {{max_epochs: 3}}', but {loaded!r:.40}")
    return loaded
