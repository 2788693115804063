"""The settings of a command line: options and configuration files as nested mappings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_multigpu._suggest import nearest
from lightning_multigpu.commands.usage import UsageError

CLASS_KEYS = ("class_path", "init_args", "dict_kwargs")
_NOT_SETTINGS = ("h", "help", "help_all", "print_config")

Settings = MutableMapping[str, Any]


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


def load(path: str, *, example: str = "trainer: {max_epochs: 3}") -> Settings:
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
        raise UsageError(_not_yaml(path, error)) from error
    if not isinstance(loaded, dict):
        raise UsageError(f"{path}: not settings, as in {example!r}, but {loaded!r:.40}")
    return loaded


def _not_yaml(path: str, error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark is not None:
        mark = error.problem_mark
        return f"{path}, line {mark.line + 1}, column {mark.column + 1}: this is not YAML: {error.problem}"
    return f"{path}: this is not YAML: {error}"


def nested(option: str, value: str, known: Sequence[str]) -> Settings:
    """One option as a file would give it; what follows a class's setting belongs to its ``init_args``.

    Args:
        option: ``"trainer.strategy.bucket_cap_mb"``.
        value: its value; YAML, or else the text itself.
        known: all settings of the subcommand, as dotted names; ``"trainer.strategy"`` is one.
    """
    keys = option.split(".")
    setting = next((end for end in range(1, len(keys)) if ".".join(keys[:end]) in known), None)
    if setting is not None and keys[setting] not in CLASS_KEYS:
        keys.insert(setting, "init_args")
    try:
        inner: Any = yaml.safe_load(value)
    except yaml.YAMLError:
        inner = value
    for key in reversed(keys):
        inner = {key: inner}
    settings: Settings = inner
    return settings


def merge(into: Settings, settings: Mapping[str, Any]) -> None:
    """Adds later settings to earlier ones, in place; a class that was given as a word can then take arguments."""
    for key, value in settings.items():
        present = into.get(key)
        if isinstance(value, Mapping):
            if isinstance(present, str) and "init_args" in value:
                present = {"class_path": present}
            into[key] = present if isinstance(present, MutableMapping) else {}
            merge(into[key], value)
        else:
            into[key] = value
